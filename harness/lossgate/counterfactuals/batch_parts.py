# SPDX-License-Identifier: Apache-2.0
"""Parts of a batch: the tokens that ranks hold, and the tokens at the edges of sequences, pieces
and ranks. All are given as fields of the whole batch.
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
    """Returns the bool fields of tokens and of sequences, set to false outside of some ranks.

    Args:
        setting: the problem.
        ranks: their numbers, in the order of ``Setting.token_shards``.
    """
    is_held = {
        "token": torch.zeros(setting.tokens, dtype=torch.bool),
        "sequence": torch.zeros(len(setting.lengths), dtype=torch.bool),
    }
    for rank in ranks:
        is_held["token"][setting.token_shards[rank]] = True
        is_held["sequence"][list(setting.partition.sequences(rank // setting.size("cp")))] = True
    found: dict[str, Tensor] = {}
    for name, dims in {**setting.batch.field_dims, "mask": ("token",)}.items():
        if len(dims) == 1 and dims[0] in is_held and setting.fields[name].dtype is torch.bool:
            found[name] = setting.fields[name] & is_held[dims[0]]
    return found


def bools(spec: Spec) -> list[str]:
    """Returns the names of the bool fields of a loss. The mask is one if the loss trains tokens."""
    own = [name for name, field in spec.added.items() if field.dtype == "bool" and len(field.dims) == 1]
    return ["mask", *own] if spec.trained_dim == "token" else own


def fields_of_tokens(spec: Spec, head: str) -> list[str]:
    """Returns the names of all fields of tokens, the mask and the labels of the head included."""
    labels = ["labels"] if head in ("hidden", "logits") else []
    return [*labels, "mask", *(name for name, dims in spec.fields.items() if dims == ("token",))]


def all_true(name: str, setting: Setting) -> Fields:
    """Returns a bool field that is true everywhere."""
    return {name: torch.ones_like(setting.fields[name])}


def where_rows(rows: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    """Returns a tensor whose rows come from ``x`` where ``rows`` is true, and from ``other``
    elsewhere.
    """
    return torch.where(rows.reshape(-1, *[1] * (x.dim() - 1)), x, other)


def named(field: str) -> str:
    """Names a field in a sentence."""
    return "the mask" if field == "mask" else field


def numbers_of_tokens(spec: Spec) -> list[str]:
    """Returns the names of the fields of a spec that hold a number for each token."""
    return [name for name, field in spec.added.items() if field.dtype == "float32" and field.dims == ("token",)]


def counts_of(setting: Setting, ranks: Iterable[int]) -> dict[str, Tensor]:
    """Returns the counts of a batch that has only the tokens and sequences of some ranks."""
    return setting.spec.counts({**setting.fields, **masks_of(setting, ranks)})


def rank_by_rank(
    setting: Setting, axes: Collection[Axis], names: Collection[str], *, mean: bool = False
) -> Iterator[Part]:
    """Yields the part of a loss that each rank computes with counts that are local over some axes.

    Args:
        setting: the problem.
        axes: the axes over which the counts are not added up.
        names: the names of these counts.
        mean: whether the parts are averaged over these axes. Otherwise they are added up.
    """
    weight = 1 / prod(setting.size(axis) for axis in axes) if mean else 1.0
    for rank in range(len(setting.token_shards)):
        local: dict[str, Any] = counts_of(setting, setting.group_of(rank, axes)) if names else {}
        yield weight, {**masks_of(setting, [rank]), **{name: local[name] for name in names}}


def reads_count(setting: Setting, name: str) -> bool:
    """Returns whether the loss of a problem, or a metric that is returned, depends on a count."""
    return setting.bound.reads_count(name, setting.returned)


def edges(setting: Setting, *, first: bool) -> Tensor:
    """Returns the first or the last token of each sequence, ``[tokens]`` bool."""
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
    """Returns all tokens from the first to the last true one in a sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, lambda own: _begun(own) & _begun(own.flip(0)).flip(0))


def first_run(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the first run of true entries of a mask in each sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, _run)


def last_run(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the last run of true entries of a mask in each sequence, ``[tokens]`` bool."""
    return _in_each_sequence(setting, mask, lambda own: _run(own.flip(0)).flip(0))


def _in_each_sequence(setting: Setting, mask: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
    lengths = setting.fields["cu_seqlens"].diff().tolist()
    # The empty part is there for a batch without tokens: torch.cat takes no empty list.
    return torch.cat([mask[:0], *(find(own) for own in mask.split(lengths) if len(own))])


def _begun(own: Tensor) -> Tensor:
    """Returns, for each entry, whether it or an entry before it is true."""
    return own.cumsum(0) > 0


def _first(own: Tensor) -> Tensor:
    return own & (own.cumsum(0) == 1)


def _run(own: Tensor) -> Tensor:
    is_gap = _begun(own) & ~own
    return own & ~_begun(is_gap)


def padded_pieces(setting: Setting) -> list[Tensor]:
    """Returns the tokens of each piece of each sequence, padding included.

    The zigzag of cp cuts a sequence into 2 * cp pieces. Without cp, a sequence is one piece.

    Args:
        setting: the problem with its padding.
    """
    partition, cp = setting.partition, setting.size("cp")
    number = 2 * cp if cp > 1 else 1
    pieces: list[Tensor] = []
    for start, length in zip(partition.starts[:-1], partition.padded_lengths, strict=True):
        pieces += torch.arange(start, start + length).tensor_split(number)
    return pieces


def piece_ends(setting: Setting, *, last: bool = True) -> Tensor:
    """Returns the last tokens of the pieces that ranks hold, ``[tokens]`` bool.

    Args:
        setting: the problem.
        last: False for the first tokens.
    """
    ends = torch.zeros(setting.tokens, dtype=torch.bool)
    for own in setting.token_shards:
        is_end = torch.ones(len(own), dtype=torch.bool)
        is_break = own[1:] != own[:-1] + 1
        if last:
            is_end[:-1] = is_break
        else:
            is_end[1:] = is_break
        ends[own] = is_end
    return ends


def rank_ends(setting: Setting) -> Tensor:
    """Returns the last token of each rank, ``[tokens]`` bool."""
    return setting.mask_of(torch.cat([own[-1:] for own in setting.token_shards]))


def sequence_ends_on_ranks(setting: Setting) -> Tensor:
    """Returns the last token that a rank holds of each sequence, ``[tokens]`` bool."""
    ends = torch.zeros(setting.tokens, dtype=torch.bool)
    for own in setting.token_shards:
        sequence = setting.fields["sequence"][own]
        is_end = torch.ones(len(own), dtype=torch.bool)  # the last token of a rank is always an end
        is_end[:-1] = sequence[:-1] != sequence[1:]
        ends[own] = is_end
    return ends
