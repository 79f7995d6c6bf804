# SPDX-License-Identifier: Apache-2.0
"""Which comparisons a loss makes, and whether rounding could change their outcome.

The loss is run under a dispatch mode that notes the outcome of every clamp, minimum, maximum and comparison. Exact ties,
such as a ratio of exactly 1 in on-policy training, are no decision: both sides give the same value there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lossgate.problems.batch import Batch
from lossgate.specs.base import Spec, TokenValues

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "maximum", "minimum"])


class _Decisions(TorchDispatchMode):
    """Notes, for each comparison in turn, the sign of the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _COMPARISONS and args[0].is_floating_point():
            self.taken.append((args[0] - args[1]).sign())
        elif name in ("clamp", "clamp_min", "clamp_max"):
            bounds = dict(zip(("min", "max") if name != "clamp_max" else ("max",), args[1:], strict=False)) | dict(kwargs or {})
            self.taken += [(args[0] - bound).sign() for bound in bounds.values() if bound is not None]
        return result


def unsettled(spec: Spec, options: Any, values: TokenValues, probes: Sequence[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """``([tokens] bool, [sequences] bool)``: where a comparison comes out otherwise for one of the probes."""
    tokens = torch.zeros(batch.partition.tokens, dtype=torch.bool)
    sequences = torch.zeros(len(batch.partition.lengths), dtype=torch.bool)
    plain = _decisions(spec, options, values, batch)
    for probe in probes:
        for was, now in zip(plain, _decisions(spec, options, replace(values, logprobs=probe), batch), strict=True):
            changed = (was != now) & (was != 0)
            if changed.dim() == 2:
                changed = changed.any(1)
            if changed.shape == tokens.shape:
                tokens |= changed
            elif changed.shape == sequences.shape:
                sequences |= changed
            elif changed.dim() and len(changed) * batch.partition.together == len(sequences):
                sequences |= changed.repeat_interleave(batch.partition.together)
    return tokens, sequences


def _decisions(spec: Spec, options: Any, values: TokenValues, batch: Batch) -> list[Tensor]:
    assert spec.loss is not None
    with torch.no_grad(), _Decisions() as decisions:
        spec.loss(values, batch.fields, options)
    return decisions.taken
