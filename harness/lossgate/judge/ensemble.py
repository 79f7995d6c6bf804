# SPDX-License-Identifier: Apache-2.0
"""The noise of a correct kernel: an ensemble of runs that round as the candidate declares.

The stages from the head to the log-probabilities are spelled out in primitive operations, forward
and backward, for all members at once. Each operation gets random rounding errors: those of the
declared dtype at the stages that ``Precision`` names, and those of float32 elsewhere. The loss
itself runs as the reference computes it, with noise on every operation that torch dispatches.

Errors in the results of whole operators, such as log_softmax and its backward, are not enough. They
miss the cancellation in ``p - 1`` where the label's probability is near 1, and raised 8 to 9% false
alarms in the gradient of the hidden states.
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
"""The number of members: as many as fit into this many tensor elements, but at least ``_FEWEST``
and at most ``_MOST``. Small problems get more members, because their few numbers say less about
their noise."""


@dataclass(frozen=True)
class Ensemble:
    """The outputs of correct runs on one rank. They are the same for every layout.

    Gradients depend on the layout. ``gradient_on`` computes them from ``dlogits``.
    """

    outputs: Mapping[Output, Tensor]
    """Each output ``[members, *shape]`` in float64; no gradients at heads with logits."""
    dlogits: Tensor | None
    """The gradient of the logits, ``[members, T, V]``; None at heads without logits."""


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
        exact = upstream.get("logprobs", torch.zeros_like(values.logprobs))
        gradient = run.noise.round(exact, run.stages.inputs)
        return Ensemble(outputs | {head.gradients(leaves)[name]: gradient}, None)
    stage = LogitStage(head, leaves, batch.fields, bound, run)
    outputs, upstream = loss.outputs(stage.values)
    return Ensemble(outputs, stage.backward(upstream))


def gradient_on(
    partition: Partition, leaf: str, head: Head, batch: GlobalBatch, dlogits: Tensor, run: RoundedRun
) -> Tensor:
    """Returns the gradient of a leaf as the ranks of a layout give it, ``[members, *shape]``.

    Args:
        partition: the split over the ranks of the layout. Each rank's part is rounded, and all are
            added up.
        leaf: the name of the leaf.
        head, batch: as for ``run_ensemble``.
        dlogits: the gradient of the logits; see ``Ensemble``.
        run: the members, and how they round.
    """
    gradient = head.rounded_gradient(leaf, batch.leaves, dlogits, partition, run)
    return run.noise.round(gradient, run.stages.inputs) if run.stages.grads_in_forward else gradient


def rounded_runs(batch: GlobalBatch, stages: Stages, seed: str) -> RoundedRun:
    """Returns runs with random errors, as many as a problem needs.

    Args:
        batch: the tensors of the problem.
        stages: the formats to which the runs round.
        seed: the seed of the errors.
    """
    return RoundedRun(Noise(crc32(seed.encode())), _members(batch), stages)


def _members(batch: GlobalBatch) -> int:
    largest = max(leaf.numel() for leaf in batch.leaves.values())
    logits = batch.partition.tokens * batch.partition.vocab
    return min(max(_ELEMENTS // max(largest, logits), _FEWEST), _MOST)
