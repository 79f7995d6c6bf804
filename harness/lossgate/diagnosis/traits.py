# SPDX-License-Identifier: Apache-2.0
"""Traits that tokens or rows of the vocabulary may have in common, such as that they are masked.

A trait is named by words that follow "tokens" or "rows of the vocabulary", as in "that are masked".
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.batch_parts import edges, last_trained, piece_ends, rank_ends, sequence_ends_on_ranks
from lossgate.counterfactuals.setting import Setting
from lossgate.problems.partition import VocabShard
from lossgate.specs.record import fields_of

Traits = Mapping[str, Tensor]
"""The rows with each trait, ``[rows]`` bool, by the words of the trait."""


def traits_of(setting: Setting, dim: str) -> Traits:
    """Returns the traits of the rows of a dim, the plainest first.

    Args:
        setting: the problem on its layout.
        dim: "token" or "vocab". Rows of other dims have no traits.
    """
    found = {"token": _of_tokens, "vocab": _of_vocabulary}.get(dim)
    return {} if found is None else dict(found(setting))


def _of_tokens(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    mask, sequence = setting.fields["mask"], setting.fields["sequence"]
    yield "that are masked", ~mask
    yield "that are trained", mask
    yield "that are the last of their sequence", edges(setting, first=False)
    yield "that are the first of their sequence", edges(setting, first=True)
    yield "that are the last trained one of their sequence", last_trained(setting, mask)
    yield from _of_fields(setting, sequence)
    yield from _of_ranks(setting)
    yield from _of_labels(setting)
    yield from _of_tiles(setting)
    pairs = setting.spec.group_size == 2
    yield "of chosen sequences" if pairs else "of every second sequence from the first on", sequence % 2 == 0
    yield "of rejected sequences" if pairs else "of every second sequence from the second on", sequence % 2 == 1
    yield "of the first sequence", sequence == 0
    yield "of the last sequence", sequence == len(setting.partition.lengths) - 1


def _of_fields(setting: Setting, sequence: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields traits by the fields of the spec. A bool is true or false. A number is above or below
    0, or above or below the log-probability.
    """
    spec = setting.spec
    values = setting.bound.dense.token_values(setting.bound_spec)
    logprobs = values.logprobs.detach() if "logprobs" in values.given else None
    for name in fields_of(spec.batch_type):
        dims, x = spec.fields.get(name, ()), setting.fields.get(name)
        if not isinstance(x, Tensor) or dims not in (("token",), ("sequence",)):
            continue
        of_tokens = x if dims == ("token",) else x[sequence]
        if x.dtype is torch.bool:
            yield f"whose {name} is false", ~of_tokens
            yield f"whose {name} is true", of_tokens
        elif x.is_floating_point():
            yield f"whose {name} is above 0", of_tokens > 0
            yield f"whose {name} is below 0", of_tokens < 0
            if logprobs is not None and dims == ("token",):
                yield f"whose log-probability is above {name}", logprobs > of_tokens
                yield f"whose log-probability is below {name}", logprobs < of_tokens


def _of_ranks(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    cp = setting.size("cp")
    axes: tuple[Axis, ...] = ("dp", "cp")
    for axis in axes:
        if (size := setting.size(axis)) > 1:
            at = torch.zeros(setting.tokens, dtype=torch.long)
            for rank, own in enumerate(setting.token_shards):
                at[own] = rank // cp if axis == "dp" else rank % cp
            yield f"that the first rank of {axis} holds", at == 0
            yield f"that ranks of {axis} other than the first hold", at > 0
            yield f"that the last rank of {axis} holds", at == size - 1
            yield f"that ranks of {axis} other than the last hold", at < size - 1
    if len(setting.token_shards) > 1:
        yield "that are the last of their rank", rank_ends(setting)
        yield "that are the last of their sequence on their rank", sequence_ends_on_ranks(setting)
        yield "that are the last of a piece of consecutive tokens that a rank holds", piece_ends(setting)
        yield "that are the first of a piece of consecutive tokens that a rank holds", piece_ends(setting, last=False)


def _of_labels(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    if not setting.head.has_logits:
        return
    labels = setting.fields["labels"]
    yield "whose label is the first row of the vocabulary", labels == 0
    yield "whose label is the last row of the vocabulary", labels == setting.bound.problem.vocab - 1
    shards = setting.vocab_shards
    if len(shards) > 1:
        yield "whose label the first rank of tp holds", _within(labels, shards[:1])
        yield "whose label ranks of tp other than the first hold", _within(labels, shards[1:])
        yield "whose label is the first row of a rank of tp", _any(labels == shard.start for shard in shards)
        yield "whose label is the last row of a rank of tp", _any(labels == shard.end - 1 for shard in shards)


def _of_tiles(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    for size in setting.tiles.get("token", ()):
        chunk = setting.place_on_rank // size
        last, incomplete = torch.zeros_like(chunk, dtype=torch.bool), torch.zeros_like(chunk, dtype=torch.bool)
        for own, held in zip(setting.token_shards, setting.held_by_ranks, strict=True):
            last[own] = chunk[own] == (held - 1) // size
            incomplete[own] = last[own] & bool(held % size)
        yield f"among the first {size} of their rank", chunk == 0
        yield f"after the first {size} of their rank", chunk > 0
        yield f"of a last chunk that has fewer than {size} tokens", incomplete
        yield f"of the last chunk of {size} tokens of their rank", last
        yield f"of all chunks of {size} tokens except the last of their rank", ~last


def _of_vocabulary(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    rows = torch.arange(setting.bound.problem.vocab)
    labels = setting.fields["labels"]
    yield "that are the label of a trained token", torch.isin(rows, labels[setting.fields["mask"]])
    yield "that are the label of no trained token", ~torch.isin(rows, labels[setting.fields["mask"]])
    yield "that are the label of a masked token", torch.isin(rows, labels[~setting.fields["mask"]])
    yield "that are the first of the vocabulary", rows == 0
    yield "that are the last of the vocabulary", rows == len(rows) - 1
    shards = setting.vocab_shards
    if len(shards) > 1:
        yield "that the first rank of tp holds", _within(rows, shards[:1])
        yield "that ranks of tp other than the first hold", _within(rows, shards[1:])
        yield "that the last rank of tp holds", _within(rows, shards[-1:])
        yield "that are the first of a rank of tp", _any(rows == shard.start for shard in shards)
        yield "that are the last of a rank of tp", _any(rows == shard.end - 1 for shard in shards)
    for size in setting.tiles.get("vocab", ()):
        local = rows.clone()
        incomplete = torch.zeros(len(rows), dtype=torch.bool)
        for shard in shards:
            own = _within(rows, [shard])
            local[own] = rows[own] - shard.start
            incomplete |= own & (local >= shard.rows // size * size)
        yield f"of the first {size} rows of their rank", local < size
        yield f"of a last tile that has fewer than {size} rows", incomplete


def _within(x: Tensor, shards: Iterable[VocabShard]) -> Tensor:
    return _any((x >= shard.start) & (x < shard.end) for shard in shards)


def _any(each: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(each)).any(0)
