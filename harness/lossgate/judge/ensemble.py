# SPDX-License-Identifier: Apache-2.0
"""The noise of a correct kernel: an ensemble of runs that round as the candidate declares.

The stages from the head to the log-probabilities are spelled out in primitive operations, forward
and backward, for all members at once, with random rounding errors: of the declared dtype at the
stages that ``Precision`` names, of float32 after every other operation. (Perturbing whole operators
instead, such as log_softmax and its backward, misses the cancellation in ``p - 1`` where the
label's probability is near 1, and raised 8 to 9% false alarms in the gradient of the hidden
states.) The loss itself runs as the reference has it, with float32 noise on every operation that
torch dispatches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from lossgate.declaration.candidate import Candidate
from lossgate.judge.loss_stage import RoundedLoss
from lossgate.judge.token_stage import Softmax, TokenStage
from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.specs.heads.base import Head
from lossgate.specs.outputs import Output
from lossgate.specs.spec import BoundSpec
from lossgate.specs.token_values import TokenValues

_ELEMENTS, _FEWEST, _MOST = 1 << 18, 12, 32
"""Members are as many as a bounded number of tensor elements allows, within the two other numbers.
So small problems, whose few numbers say less about their noise, get more of them."""


@dataclass(frozen=True)
class Ensemble:
    """What correct runs give on one rank: the same whatever the layout.

    What hangs on a layout is added by ``gradient_on``.
    """

    outputs: Mapping[Output, Tensor]
    """Each output ``[members, *shape]`` in float64; no gradients at heads with logits."""
    dlogits: Tensor | None
    """``[members, T, V]``, at heads with logits."""


def stages_of(candidate: Candidate, dtype: str) -> Stages:
    """Returns the float format of each stage of a candidate, for inputs of a dtype."""
    hidden_gradient = candidate.contract.grads.get("hidden", {})
    return candidate.precision[dtype].stages(
        dtype, caller_reduces_hidden=hidden_gradient.get("tp", "replicate") != "replicate"
    )


def run_ensemble(head: Head, batch: GlobalBatch, bound: BoundSpec, run: RoundedRun) -> Ensemble:
    """Runs an ensemble of kernels of one precision on a problem.

    Args:
        head: where the kernels start.
        batch: the tensors of the unsharded problem.
        bound: the spec with options, and with the outputs that will be compared.
        run: the members, and how they round.
    """
    return _Ensemble(head, batch, bound, run).run()


def gradient_on(
    partition: Partition, leaf: str, head: Head, batch: GlobalBatch, dlogits: Tensor, run: RoundedRun
) -> Tensor:
    """Returns the gradient of a leaf as the ranks of a layout give it, ``[members, *shape]``.

    Args:
        partition: of the layout, whose ranks' parts are rounded and added up.
        leaf: the leaf.
        head, batch: as for ``run_ensemble``.
        dlogits: of the ensemble.
        run: the members, and how they round.
    """
    gradient = head.rounded_gradient(leaf, batch.leaves, dlogits, partition, run)
    return run.noise.round(gradient, run.stages.inputs) if run.stages.grads_in_forward else gradient


def rounded_runs(batch: GlobalBatch, stages: Stages, seed: str) -> RoundedRun:
    """Returns runs with random errors, as many as a problem needs.

    Args:
        batch: of the problem.
        stages: the formats to which they round.
        seed: of the errors.
    """
    return RoundedRun(Noise(crc32(seed.encode())), _members(batch), stages)


def _members(batch: GlobalBatch) -> int:
    largest = max(leaf.numel() for leaf in batch.leaves.values())
    logits = batch.partition.tokens * batch.partition.vocab
    return min(max(_ELEMENTS // max(largest, logits), _FEWEST), _MOST)


class _Ensemble:
    def __init__(self, head: Head, batch: GlobalBatch, bound: BoundSpec, run: RoundedRun) -> None:
        self.head, self.batch, self.bound, self.rounded = head, batch, bound, run
        self.tokens, self.loss = TokenStage(batch, bound, run), RoundedLoss(batch, bound, run)
        # A kernel holds the temperature in float32: one error for all logits of a run.
        self.temperature = bound.temperature * (1 + self._error_of_runs())

    @property
    def stages(self) -> Stages:
        return self.rounded.stages

    def _error_of_runs(self) -> Tensor:
        """Returns one relative error of float32 for each member, ``[M, 1, 1]``."""
        return FLOAT32.unit * self.rounded.noise.uniform(torch.Size((self.rounded.members, 1, 1)))

    def run(self) -> Ensemble:
        leaves, noise = self.batch.leaves, self.rounded.noise
        if not self.head.has_logits:
            ((name, leaf),) = leaves.items()
            values = TokenValues(logprobs=leaf.expand(self.rounded.members, *leaf.shape))
            outputs, upstream = self.loss.outputs(values)
            gradient = noise.round(upstream.get("logprobs", torch.zeros_like(values.logprobs)), self.stages.inputs)
            return Ensemble(outputs | {self.head.gradients(leaves)[name]: gradient}, None)
        capped, slope = self._capped(self.head.rounded_logits(leaves, self.rounded))
        logits = self._tempered(capped)
        softmax, values = self.tokens.values(logits, self._apart())
        outputs, upstream = self.loss.outputs(values)
        dlogits = self._dlogits(logits, softmax, values, upstream)
        if slope is not None:
            dlogits = self.rounded.round(dlogits * slope, self.stages.logits)
        return Ensemble(outputs, noise.round(dlogits, self.stages.dlogits))

    def _apart(self) -> Tensor | None:
        """Returns the logits of labels, each as a dot product of its own; None at a head that has
        none to compute.
        """
        own = self.head.rounded_logits_at(self.batch.leaves, self.tokens.ids, self.rounded)
        return None if own is None else self._tempered(self._capped(own)[0])

    def _capped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits after the soft-cap, and its slope at each; None without one."""
        cap = self.bound.softcap
        if cap is None:
            return logits, None
        round_, stage = self.rounded.round, self.stages.logits
        # An approximation of tanh is off in one direction for many tokens.
        bent = round_(round_(logits / cap, stage).tanh() * (1 + self._error_of_runs()), stage)
        return round_(bent * cap, stage), round_(1 - round_(bent.square(), stage), stage)

    def _tempered(self, logits: Tensor) -> Tensor:
        """Returns logits divided by the temperature."""
        if self.bound.temperature == 1.0:
            return logits
        return self.rounded.round(logits / self.temperature, self.stages.logits)

    def _dlogits(
        self, logits: Tensor, softmax: Softmax | None, values: TokenValues, upstream: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the gradient of the logits after the soft-cap, ``[M, T, V]``, not yet rounded.

        It is the sum of what each value per token gives back, divided by the temperature.
        """
        if not upstream:
            return torch.zeros_like(logits)
        first, *others = self.tokens.parts(softmax, values, upstream)
        dlogits = first
        for part in others:
            dlogits = self.rounded.round(dlogits + part)
        if self.bound.temperature != 1.0:  # the gradient of the tempered logits has the logits' dtype
            dlogits = self.rounded.noise.round(dlogits, self.stages.logits)
        return dlogits
