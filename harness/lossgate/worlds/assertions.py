# SPDX-License-Identifier: Apache-2.0
"""An assertion that all ranks of a group make together."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.layout import name_ranks


def all_ranks_assert(condition: bool | Tensor, message: str = "", group: Any = None) -> None:
    """Checks a condition on every rank of a group, and fails on all of them if it fails on one.

    A plain ``assert`` ends one rank, and leaves the others in their next collective. All ranks of
    the group must call this, as they would a collective.

    Args:
        condition: what should hold on this rank: a bool, or a tensor of one entry.
        message: what is wrong where it does not hold.
        group: the ranks that check together; by default all.

    Raises:
        AssertionError: on each rank of the group. It names the ranks on which the condition fails.
    """
    if not dist.is_initialized():
        assert condition, message
        return
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    held = torch.tensor([bool(condition)], dtype=torch.uint8, device=device)
    of_all = [torch.empty_like(held) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, held, group=group)
    if failed := [rank for rank, one in zip(_ranks_of(group), of_all, strict=True) if not one.item()]:
        raise AssertionError(f"{message or 'the condition does not hold'} (on {name_ranks(failed)})")


def _ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)
