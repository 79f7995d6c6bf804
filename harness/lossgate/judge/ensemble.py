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
from lossgate.judge.logit_stage import LogitStage
from lossgate.judge.loss_stage import RoundedLoss
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads.head import Head
from lossgate.specs.outputs import Output
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
    leaves, loss = batch.leaves, RoundedLoss(batch, bound, run)
    if not head.has_logits:
        ((name, leaf),) = leaves.items()
        values = TokenValues(logprobs=leaf.expand(run.members, *leaf.shape))
        outputs, upstream = loss.outputs(values)
        gradient = run.noise.round(upstream.get("logprobs", torch.zeros_like(values.logprobs)), run.stages.inputs)
        return Ensemble(outputs | {head.gradients(leaves)[name]: gradient}, None)
    stage = LogitStage(head, leaves, batch.fields, bound, run)
    outputs, upstream = loss.outputs(stage.values)
    return Ensemble(outputs, stage.backward(upstream))


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
