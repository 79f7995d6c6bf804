# SPDX-License-Identifier: Apache-2.0
"""Tokens at the edges of sequences, and of what ranks hold."""

from collections.abc import Callable

import torch
from torch import Tensor

from lossgate.counterfactuals.setting import Setting


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
