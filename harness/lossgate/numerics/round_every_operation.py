# SPDX-License-Identifier: Apache-2.0
"""Runs torch code in float64 as if each operation rounded.

The ensemble runs the loss stage of any spec this way, as the reference has it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lossgate.numerics.float_formats import FLOAT32, FloatFormat
from lossgate.numerics.noise import Noise

_EXACT = frozenset(
    [
        "view",
        "expand",
        "select",
        "slice",
        "neg",
        "where",
        "detach",
        "alias",
        "clone",
        "unsqueeze",
        "squeeze",
        "maximum",
        "minimum",
        "clamp",
        "zeros_like",
        "ones_like",
        "scalar_tensor",
        "lift_fresh",
        "new_zeros",
        "zeros",
        "gather",
        "index",
        "permute",
        "transpose",
        "abs",
        "amax",
        "amin",
        "cat",
        "constant_pad_nd",
        "copysign",
        "flip",
        "full",
        "full_like",
        "index_select",
        "masked_fill",
        "new_full",
        "new_ones",
        "roll",
        "scatter",
        "sign",
        "stack",
        "unbind",
        "zero_",
    ]
)
"""Operations that do not round."""

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "eq", "ne"])


class RoundEveryOperation(TorchDispatchMode):
    """Rounds the float64 result of every dispatched operation."""

    def __init__(self, noise: Noise, to: FloatFormat) -> None:
        super().__init__()
        self.noise, self.to = noise, to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes seconds and is of no use here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _COMPARISONS and isinstance(args[1], Tensor) and args[0].dtype is torch.float64:
            args = (self._with_ties(*args[:2]), *args[1:])
        result = func(*args, **(kwargs or {}))
        if name in _EXACT:
            return result
        if name == "expm1":  # or exp(x) - 1, which cancels
            result = result + result.add(1).clamp(min=1) * self.noise.uniform(result.shape) * FLOAT32.unit
        if name in ("_log_softmax", "logsumexp"):
            result = result + self._normaliser_error(args, result)
        if name in ("sum", "index_add") and result.dtype is torch.float64:
            result.add_(self._sum_error(func, args, kwargs or {}, result))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float64 and tensor.dim():
                tensor.copy_(torch.where(tensor.isfinite(), self.noise.round(tensor, self.to), tensor))
        return result

    def _with_ties(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns ``a``, with ``b`` in its place wherever the two are equal up to rounding.

        A kernel computes equal results from equal inputs, so that such a comparison stays a tie.
        """
        return torch.where((a - b).abs() <= 8 * self.to.unit * torch.maximum(a.abs(), b.abs()), b, a)

    def _normaliser_error(self, args: Any, result: Tensor) -> Tensor:
        """Returns the error of the logarithm of a sum of exponentials, however small the result is.

        It holds the rounding of the exponentials and of the logarithm itself, and is the same for a
        whole row.
        """
        dim, x = args[1] if isinstance(args[1], int) else args[1][0], args[0]
        row = result.amax(dim, keepdim=True) if result.dim() == x.dim() else result
        return 1.5 * FLOAT32.unit * self.noise.uniform(row.shape)

    def _sum_error(self, func: Any, args: Any, kwargs: Mapping[str, Any], total: Tensor) -> Tensor:
        """Returns the error of K terms that are added one by one in float32, as in
        ``RoundedRun.matmul``.

        Partial sums are rounded, and may be larger than the total.
        """
        position = 3 if func._schema.name == "aten::index_add" else 0
        terms: Tensor = args[position]
        squares, ones = terms.square(), torch.ones_like(terms)
        rest = args[:position], args[position + 1 :]
        if position:
            rest = ((torch.zeros_like(args[0]), *args[1:position]), args[position + 1 :])
        square_sum, count = (func(*rest[0], x, *rest[1], **kwargs) for x in (squares, ones))
        size = (count * (total.square() / 3 + square_sum / 2)).sqrt()
        return size * self.noise.uniform(total.shape) * FLOAT32.unit * (count > 1)
