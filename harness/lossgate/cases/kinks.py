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
from lossgate.specs.spec import Spec, TokenValues

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
            self._note(args[0] - args[1])
        elif name in ("clamp", "clamp_min", "clamp_max"):
            bounds = dict(zip(("min", "max") if name != "clamp_max" else ("max",), args[1:], strict=False)) | dict(
                kwargs or {}
            )
            for bound in bounds.values():
                if bound is not None:
                    self._note(args[0] - bound)
        return result

    def _note(self, difference: Tensor) -> None:
        self.taken.append(difference.sign().nan_to_num_(0.0))


def unsettled(
    spec: Spec, options: Any, values: TokenValues, probes: Sequence[Tensor], batch: Batch
) -> tuple[Tensor, Tensor]:
    """``([tokens] bool, [sequences] bool)``: where a comparison comes out otherwise for one of the probes, other log-probabilities."""
    tokens = torch.zeros(batch.partition.tokens, dtype=torch.bool)
    sequences = torch.zeros(len(batch.partition.lengths), dtype=torch.bool)
    together = batch.partition.together
    for taken in _decisions(spec, options, values, torch.stack([values.logprobs, *probes]), batch):
        changed = ((taken != taken[0]) & (taken[0] != 0)).any(0)
        if changed.shape == tokens.shape:
            tokens |= changed
        elif changed.shape == sequences.shape:
            sequences |= changed
        elif len(changed) * together == len(sequences):
            sequences |= changed.repeat_interleave(together)
    return tokens, sequences


def _decisions(spec: Spec, options: Any, values: TokenValues, probes: Tensor, batch: Batch) -> list[Tensor]:
    """For each comparison that hangs on the log-probabilities, ``[probes, tokens or sequences or pairs]``."""
    stage = spec.loss
    assert stage is not None
    with torch.no_grad(), _Decisions() as decisions:
        torch.vmap(lambda logprobs: stage(replace(values, logprobs=logprobs), batch.fields, options)[0])(probes)
    return [taken for taken in decisions.taken if taken.dim() == 2 and len(taken) == len(probes)]
