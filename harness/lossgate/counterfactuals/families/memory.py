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
                todo="take the strides of the view, or make it contiguous before you read it by its pointer",
                padding=True,
                leaves=partial(_reordered, name, back),
            )


def _reordered(name: str, back: bool, setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    leaf = leaves[name]
    if name == "weight":
        held = [leaf[shard.start : shard.end] for shard in setting.vocab_shards]
    else:
        held = [leaf[own] for own in setting.token_shards]
    read = torch.cat([x.reshape(x.shape[::-1]).t() for x in held])
    if name != "weight":
        read = torch.empty_like(read).index_copy(0, torch.cat(setting.token_shards), read)
    return {**leaves, name: read if back else with_gradient_of(read, leaf)}
