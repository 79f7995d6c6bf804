# SPDX-License-Identifier: Apache-2.0
"""Tokens at the edges of sequences, and of what ranks hold."""

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
    return _true_entry(setting, mask, -1)


def first_trained(setting: Setting, mask: Tensor) -> Tensor:
    """Returns the first true entry of a mask in each sequence, ``[tokens]`` bool."""
    return _true_entry(setting, mask, 0)


def spans(setting: Setting, mask: Tensor) -> Tensor:
    """Returns ``[tokens]`` bool: all from the first to the last true entry of each sequence."""
    found, cu_seqlens = torch.zeros_like(mask), setting.fields["cu_seqlens"]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        true = mask[start:end].nonzero()
        if len(true):
            found[start + int(true[0]) : start + int(true[-1]) + 1] = True
    return found


def runs(setting: Setting, mask: Tensor, which: int) -> Tensor:
    """Returns ``[tokens]`` bool: the first (-1) or the last (1) run of true entries of each
    sequence.
    """
    found, cu_seqlens = torch.zeros_like(mask), setting.fields["cu_seqlens"]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        own = mask[start:end] if which < 0 else mask[start:end].flip(0)
        holes = (~own & (own.cumsum(0) > 0)).cumsum(0)
        run = own & (holes == 0)
        found[start:end] = run if which < 0 else run.flip(0)
    return found


def _true_entry(setting: Setting, mask: Tensor, which: int) -> Tensor:
    found, cu_seqlens = torch.zeros_like(mask), setting.fields["cu_seqlens"]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        true = mask[start:end].nonzero()
        if len(true):
            found[start + int(true[which])] = True
    return found


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
