# SPDX-License-Identifier: Apache-2.0
"""What every rank is asked to do: run a candidate, forward and backward, on its shard.

It does so on the device of its rank. Problems are made, and results returned, on the CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.compiled_kernels import many_shapes
from lossgate.cases.local_inputs import local_inputs
from lossgate.cases.returned import check_returned
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.errors import CandidateError, UsageError
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.whole_sequences import WholeSequences
from lossgate.specs.outputs import RETURNED, Output, metric_output
from lossgate.worlds.base import RankContext

RankOutputs = Mapping[Output, Tensor | None]
"""Outputs of one rank. A gradient is None if backward did not reach its leaf."""


@dataclass(frozen=True)
class RankTask:
    """A task for the ranks of a world.

    It is data: the candidate pickles as its source. The batch goes along, so that every rank has
    the same bits, whatever its machine.
    """

    candidate: Candidate
    options: Mapping[str, Any]
    """Those that are not at their default."""
    batch: GlobalBatch

    def __call__(self, context: RankContext) -> RankOutputs:
        """Runs the candidate on this rank.

        Raises:
            CandidateError: if it breaks its declared interface, or calls lossgate wrongly itself.
        """
        candidate, batch, rank, device = self.candidate, self.batch, context.rank, context.device
        local = local_inputs(candidate.spec, candidate.head, batch, rank, device, candidate.tokens)
        leaves = {name: getattr(local, name) for name in batch.leaves}
        options = candidate.spec.bind(self.options).options
        try:
            with many_shapes():
                returned = candidate(local, options, context.mesh)
        except UsageError as error:  # passed on as it is, it would end the run like one of the command line
            raise CandidateError(
                f"candidate {candidate.name!r} on rank {rank} raised {type(error).__name__}: {error}"
            ) from error
        outputs = check_returned(returned, candidate, batch, rank, device)
        _backward(outputs, candidate, batch, context)
        found = _collect(outputs, candidate, leaves)
        return {output: None if tensor is None else tensor.cpu() for output, tensor in found.items()}


def _collect(outputs: Outputs, candidate: Candidate, leaves: Mapping[str, Tensor]) -> RankOutputs:
    returned = {candidate.spec.output(name): getattr(outputs, name) for name in candidate.spec.outputs}
    local: dict[Output, Tensor | None] = {o: tensor.detach() for o, tensor in returned.items() if tensor is not None}
    local |= {metric_output(name): metric.detach() for name, metric in outputs.metrics.items()}
    for leaf, output in candidate.starts_at.gradients(leaves).items():
        tensor = leaves[leaf]
        empty = tensor.numel() == 0  # a rank without tokens has no gradient to miss
        local[output] = torch.zeros_like(tensor) if tensor.grad is None and empty else tensor.grad
    return local


def _backward(outputs: Outputs, candidate: Candidate, batch: GlobalBatch, context: RankContext) -> None:
    roots: list[Tensor] = []
    upstream: list[Tensor] = []
    for name, cotangent in batch.cotangents.items():
        root: Tensor | None = getattr(outputs, name)
        if root is not None:
            roots.append(root)
            if candidate.returns_whole(RETURNED[name]):
                own = WholeSequences.of(batch.partition, candidate.tokens, context.rank).lay_upstream(cotangent)
            else:
                own = batch.partition.shard(cotangent, RETURNED[name].dims, context.rank)
            upstream.append(own.to(context.device, root.dtype))
    torch.autograd.backward(roots, upstream)
