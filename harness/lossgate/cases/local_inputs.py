# SPDX-License-Identifier: Apache-2.0
"""What a kernel is given on a rank: the shards of a batch, as the inputs of its spec and head."""

from typing import Any

import torch
from torch import Tensor

from lossgate.problems.batch import GlobalBatch
from lossgate.problems.whole_sequences import Tokens
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import Spec


def local_inputs(
    spec: Spec,
    head: str,
    batch: GlobalBatch,
    rank: int,
    device: torch.device | None = None,
    tokens: Tokens = "shard",
    dtype: torch.dtype | None = None,
) -> Any:
    """Makes the inputs of a rank, each time anew. The differentiable ones require grad.

    Args:
        spec: the loss.
        head: where the kernel starts.
        batch: as the ranks hold it, with padding.
        rank: whose shards are made.
        device: where they are; by default where the batch is.
        tokens: how the kernel is given what belongs to tokens.
        dtype: of all floating-point inputs; by default that of the problem for the differentiable
            ones, and float32 for others.
    """

    def of_kind(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    dims = HEADS[head].leaves
    leaves = {name: of_kind(batch.local_leaf(name, dims[name], rank)).requires_grad_() for name in batch.leaves}
    absent = dict.fromkeys(set(dims) - set(leaves))
    given = batch.local_fields(rank, tokens, spec.unshifted)
    fields = {name: of_kind(value) if isinstance(value, Tensor) else value for name, value in given.items()}
    inputs_class: Any = spec.inputs[head]
    return inputs_class(**fields, **leaves, **absent)
