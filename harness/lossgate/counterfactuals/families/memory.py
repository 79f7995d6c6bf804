# SPDX-License-Identifier: Apache-2.0
"""Matrices that are read in another order than they have in memory."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec


def memory(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of reading a transposed view by its pointer alone."""
    for name in {"hidden": ("weight", "hidden"), "logits": ("logits",)}.get(head, ()):
        for back, words in ((True, ""), (False, ", in forward alone")):
            yield mistake(
                f"transposed view of {name} read as if contiguous{words}",
                f"the transposed view of {name} is read as if its rows stood one after another in memory{words}",
                "memory",
                _not_padded,
                todo="take the strides of the view, or make it contiguous before you read it by its pointer",
                padding=True,
                leaves=partial(_reordered, name, back),
            )


def _not_padded(setting: Setting) -> bool:
    return not any(shard.padding for shard in setting.vocab_shards)


def _reordered(name: str, back: bool, setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    leaf = leaves[name]
    if name == "hidden":
        read = setting.moved_on_each_rank(leaf, _as_if_contiguous)
    elif name == "weight":
        read = torch.cat([_as_if_contiguous(leaf[shard.start : shard.end]) for shard in setting.vocab_shards])
    else:
        columns = [leaf[:, shard.start : shard.end] for shard in setting.vocab_shards]
        read = torch.cat([setting.moved_on_each_rank(own, _as_if_contiguous) for own in columns], 1)
    return {**leaves, name: read if back else with_gradient_of(read, leaf)}


def _as_if_contiguous(x: Tensor) -> Tensor:
    return x.reshape(x.shape[::-1]).t()
