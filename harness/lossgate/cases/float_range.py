# SPDX-License-Identifier: Apache-2.0
"""Masks tokens whose numbers a narrow dtype cannot hold, such as ratios of 1e9 in float16.

A right kernel in that dtype gives infinities there, and NaN where it multiplies them by 0. So
problems do not train such tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lossgate.cases.kinks import tokens_of
from lossgate.cases.reference import DenseRun
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.numerics.torch_operations import DispatchMode
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.specs.bound_spec import BoundSpec

_SHARE = 2.0**-7
"""The largest number of one token, as a share of the dtype's largest number. So sums over tokens,
and over a row of the lm-head, stay in range."""

_ROUNDS = 5
"""The most rounds of masking. A masked token moves the means over others, so these are checked
again."""


def mask_out_of_range(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> GlobalBatch:
    """Masks the tokens at which the loss, or a gradient, leaves the range of the dtypes in which
    kernels hold it.

    Returns:
        The batch with a smaller mask; the batch itself if all numbers are in range. Dtypes with the
        exponents of float32 count as wide enough for all numbers.
    """
    largest = min(torch.finfo(dtype).max for dtype in (TORCH_DTYPES[problem.dtype], problem.coarsest.dtype))
    if largest >= torch.finfo(torch.bfloat16).max or bound.spec.reference is None:
        return batch
    for _ in range(_ROUNDS):
        beyond = torch.zeros(batch.partition.tokens, dtype=torch.bool)
        for large in _large(batch, problem, bound, _SHARE * largest):
            beyond |= tokens_of(large, batch)
        if not bool((beyond & batch.fields["mask"]).any()):
            break
        masked = replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~beyond})
        batch = bound.spec.counted(masked)
    return batch


def _large(batch: GlobalBatch, problem: Problem, bound: BoundSpec, most: float) -> Iterator[Tensor]:
    """Yields bool tensors: the entries that are too large, in results of operations and in the
    gradients of the values per token.
    """
    run = DenseRun(batch, problem.head)
    run.token_values(bound)
    with _RecordLarge(most) as record:
        upstream = run.loss_stage(bound.returning(())).upstream
    yield from record.found
    # A logit's gradient is multiplied by rows of the hidden states and of the lm-head.
    factor = max(1.0, *(float(leaf.abs().max()) for leaf in batch.leaves.values())) / bound.temperature
    for gradient in upstream.values():
        yield (gradient.abs() * factor > most) & gradient.isfinite()


class _RecordLarge(DispatchMode):
    """Records which entries of the results of operations are finite, but larger than ``most``."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                large = (tensor.abs() > self.most) & tensor.isfinite()
                if bool(large.any()):
                    self.found.append(large)
        return result
