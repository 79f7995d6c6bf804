# SPDX-License-Identifier: Apache-2.0
"""From the leaves to what a loss uses of each token, and back to the gradient of the logits: for
all members at once, and for all tokens or some.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lossgate.judge.token_stage import Softmax, TokenStage
from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads.base import Head
from lossgate.specs.token_values import TokenValues


class LogitStage:
    """The stages of a head with logits. M members, T tokens, V rows of the vocabulary."""

    def __init__(
        self,
        head: Head,
        leaves: Mapping[str, Tensor],
        fields: Mapping[str, Tensor],
        bound: BoundSpec,
        run: RoundedRun,
    ) -> None:
        """Runs forward.

        Args:
            head: where the kernels start.
            leaves: its differentiable inputs, for the tokens.
            fields: of the tokens; see ``GlobalBatch``.
            bound: the spec with its options.
            run: the members, and how they round.
        """
        self._bound, self._run, self._tokens = bound, run, TokenStage(fields, bound, run)
        # A kernel holds the temperature in float32: one error for all logits of a run.
        self._temperature = bound.temperature * (1 + self._error_of_runs())
        capped, self._slope = self._capped(head.rounded_logits(leaves, run))
        self._logits = self._tempered(capped)
        # The logits of labels, each as a dot product of its own.
        apart = head.rounded_logits_at(leaves, self._tokens.ids, run)
        if apart is not None:
            apart = self._tempered(self._capped(apart)[0])
        self._softmax: Softmax | None
        self.values: TokenValues
        self._softmax, self.values = self._tokens.values(self._logits, apart)

    @property
    def _stages(self) -> Stages:
        return self._run.stages

    def _error_of_runs(self) -> Tensor:
        """Returns one relative error of float32 for each member, ``[M, 1, 1]``."""
        return FLOAT32.unit * self._run.of_each(3)

    def _capped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits after the soft-cap, and its slope at each; None without one."""
        cap = self._bound.softcap
        if cap is None:
            return logits, None
        round_, stage = self._run.round, self._stages.logits
        # An approximation of tanh is off in one direction for many tokens.
        bent = round_(round_(logits / cap, stage).tanh() * (1 + self._error_of_runs()), stage)
        return round_(bent * cap, stage), round_(1 - round_(bent.square(), stage), stage)

    def _tempered(self, logits: Tensor) -> Tensor:
        """Returns logits divided by the temperature."""
        if self._bound.temperature == 1.0:
            return logits
        return self._run.round(logits / self._temperature, self._stages.logits)

    def backward(self, upstream: Mapping[str, Tensor]) -> Tensor:
        """Returns the gradient of the logits as the head gives them, ``[M, T, V]``.

        Args:
            upstream: the gradient of each of ``values`` that has one, by name.
        """
        dlogits = self._of_capped(upstream)
        if self._slope is not None:
            dlogits = self._run.round(dlogits * self._slope, self._stages.logits)
        return self._run.noise.round(dlogits, self._stages.dlogits)

    def _of_capped(self, upstream: Mapping[str, Tensor]) -> Tensor:
        """Returns the gradient of the logits after the soft-cap, ``[M, T, V]``, not yet rounded.

        It is the sum of what each value per token gives back, divided by the temperature.
        """
        if not upstream:
            return torch.zeros_like(self._logits)
        first, *others = self._tokens.parts(self._softmax, self.values, upstream)
        dlogits = first
        for part in others:
            dlogits = self._run.round(dlogits + part)
        if self._bound.temperature != 1.0:  # the gradient of the tempered logits has the logits' dtype
            dlogits = self._run.noise.round(dlogits, self._stages.logits)
        return dlogits
