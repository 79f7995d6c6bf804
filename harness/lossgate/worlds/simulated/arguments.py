# SPDX-License-Identifier: Apache-2.0
"""Checks of a collective's arguments. Each returns what is wrong, for an error message, or None.

``agreed`` of a ``Call`` covers what all members must pass alike; the checks here cover the rest.
"""

from collections.abc import Sequence

from torch import Tensor

from lossgate.worlds.simulated.calls import Call, show


def slots_mismatch(slots: Sequence[Tensor], own: Tensor, group_rank: int, ranks: int) -> str | None:
    """Checks that all_gather has one output per rank, and the caller's own in its input's shape."""
    if len(slots) != ranks:
        return f"{len(slots)} outputs for {ranks} ranks"
    if slots[group_rank].shape != own.shape:
        return f"its own output slot is {show(slots[group_rank])}, its input {show(own)}"
    return None


def parts_mismatch(parts: Sequence[Tensor], ranks: int) -> str | None:
    """Checks that reduce_scatter has one input per rank."""
    return f"{len(parts)} inputs for {ranks} ranks" if len(parts) != ranks else None


def size_mismatch(whole_name: str, whole: Tensor, part_name: str, part: Tensor, ranks: int) -> str | None:
    """Checks that the whole is as large as the parts of all ranks together, and has their dtype."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        return f"{whole_name} {show(whole)} is not {ranks} times {part_name} {show(part)}"
    return None


def cover_mismatch(source: Tensor, sent: list[int], output: Tensor, received: list[int]) -> str | None:
    """Checks that the splits of an all_to_all_single add up to the rows of input and output."""
    if sum(sent) != source.shape[0] or sum(received) != output.shape[0]:
        return f"splits {sent} do not add up to the rows of {show(source)}, or {received} to those of {show(output)}"
    return None


def splits_mismatch(calls: Sequence[Call]) -> str | None:
    """Checks that each member sends what the receiver expects.

    Args:
        calls: the all_to_all calls of all members, by group rank.
    """
    for i, receiver in enumerate(calls):
        for j, sender in enumerate(calls):
            if sender.splits[0][i] != receiver.splits[1][j]:
                return (
                    f"rank {sender.rank} sends {sender.splits[0][i]} to rank {receiver.rank}, "
                    f"which expects {receiver.splits[1][j]}  [{sender.site}] [{receiver.site}]"
                )
    return None
