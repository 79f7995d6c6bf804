# SPDX-License-Identifier: Apache-2.0
"""Parts of a batch: what single ranks hold, as fields of the whole batch, and tokens at the edges
of sequences and of what ranks hold.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.seams import Part
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.spec import Spec


def masks_of(setting: Setting, ranks: Iterable[int]) -> dict[str, Tensor]:
    """Returns the masks of tokens and of sequences, false beyond what some ranks hold.

    Args:
        setting: the problem.
        ranks: numbered as ``Setting.token_shards``.
    """
    chosen = list(ranks)
    tokens = setting.mask_of(torch.cat([setting.token_shards[rank] for rank in chosen]) if chosen else torch.tensor([]))
    own = [sequence for rank in chosen for sequence in setting.partition.sequences(rank // setting.size("cp"))]
    sequences = torch.zeros(len(setting.lengths), dtype=torch.bool).index_fill(0, torch.tensor(own).long(), True)
    within = {"token": tokens, "sequence": sequences}
    dims = {**setting.batch.field_dims, "mask": ("token",)}
    return {
        name: setting.fields[name] & within[of[0]]
        for name, of in dims.items()
        if len(of) == 1 and of[0] in within and setting.fields[name].dtype is torch.bool
    }


def bools(spec: Spec) -> list[str]:
    """Returns the names of the mask and of other bool fields, as far as a loss has them."""
    own = [name for name, field in spec.added.items() if field.dtype == "bool" and len(field.dims) == 1]
    return ["mask", *own] if spec.trained_dim == "token" else own


def fields_of_tokens(spec: Spec, head: str) -> list[str]:
    """Returns the names of the labels, if the head has some, the mask and all fields of tokens."""
    own = [name for name, dims in spec.fields.items() if dims == ("token",)]
    return [*["labels"] * (head in ("hidden", "logits")), "mask", *own]


def all_true(name: str, setting: Setting) -> Fields:
    """Returns a bool field that is true everywhere."""
    return {name: torch.ones_like(setting.fields[name])}


def where_rows(rows: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    """Returns a tensor with other rows where ``rows``, ``[rows]`` bool, is false."""
    return torch.where(rows.reshape(-1, *[1] * (x.dim() - 1)), x, other)


def named(field: str) -> str:
    """Names a field in a sentence."""
    return "the mask" if field == "mask" else field


def numbers_of_tokens(spec: Spec) -> list[str]:
    """Returns the names of the fields that the spec adds and that hold a number for each token."""
    return [name for name, field in spec.added.items() if field.dtype == "float32" and field.dims == ("token",)]


def counts_of(setting: Setting, ranks: Iterable[int]) -> dict[str, Tensor]:
    """Returns what the counts would be, had the batch nothing but what some ranks hold."""
    return setting.spec.counts({**setting.fields, **masks_of(setting, ranks)})


def rank_by_rank(
    setting: Setting, axes: Collection[Axis], names: Collection[str], *, mean: bool = False
) -> Iterator[Part]:
    """Yields the parts of a loss that each rank computes, with counts that leave some axes out.

    Args:
        setting: the problem.
        axes: those over which the counts are not added up.
        names: of these counts.
        mean: whether the parts are averaged over these axes, not added.
    """
    weight = 1 / prod(setting.size(axis) for axis in axes) if mean else 1.0
    for rank in range(len(setting.token_shards)):
        local: dict[str, Any] = counts_of(setting, setting.group_of(rank, axes)) if names else {}
        yield weight, {**masks_of(setting, [rank]), **{name: local[name] for name in names}}


def reads_count(setting: Setting, name: str) -> bool:
    """Returns whether the loss of a problem hangs on a count, or a metric that is returned."""
    return setting.bound.reads_count(name, setting.returned)


def edges(setting: Setting, *, first: bool) -> Tensor:
    """Returns ``[tokens]`` bool: the first or the last token of each sequence."""
    sequence = setting.fields["sequence"]
    edge = sequence != sequence.roll(1 if first else -1)
    if len(edge):
        edge[0 if first else -1] = True
    return edge


def last_trained(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the last true entry of a mask in each sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, lambda own: _first(own.flip(0)).flip(0))


def first_trained(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the first true entry of a mask in each sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, _first)


def spans(setting: Setting, mask: Tensor) -> Tensor:
    """Returns ``[tokens]`` bool: all from the first to the last true entry of each sequence."""
    return _in_each_sequence(setting, mask, lambda own: _begun(own) & _begun(own.flip(0)).flip(0))


def first_run(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the first run of true entries of a mask in each sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, _run)


def last_run(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the last run of true entries of a mask in each sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, lambda own: _run(own.flip(0)).flip(0))


def _in_each_sequence(setting: Setting, mask: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
    lengths = setting.fields["cu_seqlens"].diff().tolist()
    return torch.cat([mask[:0], *(find(own) for own in mask.split(lengths) if len(own))])


def _begun(own: Tensor) -> Tensor:
    return own.cumsum(0) > 0


def _first(own: Tensor) -> Tensor:
    return own & (own.cumsum(0) == 1)


def _run(own: Tensor) -> Tensor:
    return own & ~_begun(_begun(own) & ~own)


def padded_pieces(setting: Setting) -> list[Tensor]:
    """Returns the tokens of each piece into which cp cuts sequences in a zigzag, padding included;
    those of each sequence if cp is not split.

    Args:
        setting: with its padding.
    """
    partition, cp = setting.partition, setting.size("cp")
    number = 2 * cp if cp > 1 else 1
    spans = zip(partition.starts[:-1], partition.padded_lengths, strict=True)
    return [piece for start, held in spans for piece in torch.arange(start, start + held).tensor_split(number)]


def piece_ends(setting: Setting, *, last: bool = True) -> Tensor:
    """Returns ``[tokens]`` bool: the ends of what each rank holds, piece by piece."""
    ends = torch.zeros(setting.tokens, dtype=torch.bool)
    for own in setting.token_shards:
        if len(own):
            breaks = (own[1:] != own[:-1] + 1).nonzero().squeeze(1)
            outer = torch.tensor([len(own) - 1 if last else 0])
            ends[own[torch.cat([breaks, outer]) if last else torch.cat([outer, breaks + 1])]] = True
    return ends


def rank_ends(setting: Setting) -> Tensor:
    """Returns ``[tokens]`` bool: the last token of each rank."""
    return setting.mask_of(torch.tensor([int(own[-1]) for own in setting.token_shards if len(own)]).long())


def sequence_ends_on_ranks(setting: Setting) -> Tensor:
    """Returns ``[tokens]`` bool: the last token that a rank holds of each sequence."""
    ends, sequence = torch.zeros(setting.tokens, dtype=torch.bool), setting.fields["sequence"]
    for own in setting.token_shards:
        last = sequence[own] != sequence[own].roll(-1)
        last[-1:] = True
        ends[own] = last
    return ends
