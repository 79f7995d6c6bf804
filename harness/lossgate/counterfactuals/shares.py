# SPDX-License-Identifier: Apache-2.0
"""What single ranks hold of a batch, as fields of the whole batch: masks that are false elsewhere,
and the counts of it.
"""

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.seams import Part
from lossgate.counterfactuals.setting import Setting
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
