# SPDX-License-Identifier: Apache-2.0
"""A call of a kernel on one rank, forward and backward: its inputs, and what properties vary.

A rank computes on its own device. Problems are made, and results returned, on the CPU.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lossgate.base.errors import CandidateError, UsageError
from lossgate.cases.returned import check_returned
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.whole_sequences import Tokens, WholeSequences
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import RETURNED, Output, metric_output
from lossgate.specs.spec import Spec
from lossgate.worlds.base import RankContext

_SHAPES = 100_000
"""More than any run has problems."""


def many_shapes() -> AbstractContextManager[object]:
    """Allows torch's compiler many shapes in this thread: each problem has others.

    By itself it gives up after eight, and a kernel that is compiled whole then raises an error.
    Without the compiler, which takes seconds to load, it does nothing.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return nullcontext()
    limits = ("recompile_limit", "accumulated_recompile_limit")
    return config.patch({limit: max(getattr(config, limit), _SHAPES) for limit in limits})


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


T = TypeVar("T")

RankOutputs = Mapping[Output, Tensor | None]
"""Outputs of one rank. A gradient is None if backward did not reach its leaf."""


class RankCall:
    """A kernel with the inputs of one rank.

    It does nothing by itself: ``forward``, ``backward`` and ``collect`` are the steps of a call.
    """

    def __init__(self, candidate: Candidate, options: Any, batch: GlobalBatch, context: RankContext) -> None:
        """Makes the inputs, on the device of the rank.

        Args:
            candidate: the kernel.
            options: an object of the spec's option class.
            batch: as the ranks hold it, with padding.
            context: of the rank.
        """
        self.candidate, self.options, self.batch, self.context = candidate, options, batch, context
        made = local_inputs(candidate.spec, candidate.head, batch, context.rank, context.device, candidate.tokens)
        self.use(made)

    def use(self, inputs: Any) -> None:
        """Has the kernel be called with other inputs than those that were made."""
        self.inputs = inputs
        self.leaves: dict[str, Tensor] = {name: getattr(inputs, name) for name in self.batch.leaves}
        """The differentiable inputs, by name."""

    def replace(self, **changed: Any) -> None:
        """Replaces some of the inputs, by name."""
        self.use(replace(self.inputs, **changed))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs that are tensors, by name."""
        return {name: value for name, value in vars(self.inputs).items() if isinstance(value, Tensor)}

    def again(self) -> "RankCall":
        """Returns the same call, with inputs that are made anew."""
        return RankCall(self.candidate, self.options, self.batch, self.context)

    def forward(self, *, has_graph: bool = True, own_dtypes: bool = True) -> Outputs:
        """Calls the kernel.

        Args:
            has_graph: whether what is declared differentiable must carry a graph.
            own_dtypes: whether dtypes must be those that are declared.

        Raises:
            CandidateError: if the kernel breaks its declared interface, or calls lossgate wrongly
                itself.
        """
        try:
            with many_shapes():
                returned = self.candidate(self.inputs, self.options, self.context.mesh)
        except UsageError as error:  # passed on as it is, it would end the run like one of the command line
            raise CandidateError(
                f"candidate {self.candidate.name!r} on rank {self.context.rank} raised {type(error).__name__}: {error}"
            ) from error
        rank, device = self.context.rank, self.context.device
        return check_returned(
            returned, self.candidate, self.batch, rank, device, has_graph=has_graph, own_dtypes=own_dtypes
        )

    def backward(self, outputs: Outputs, factor: float = 1.0, *, retain_graph: bool = False) -> None:
        """Calls backward with the upstream gradients of the problem.

        Args:
            outputs: what ``forward`` returned.
            factor: multiplies the upstream gradients.
            retain_graph: as torch has it.
        """
        roots = self.roots(outputs)
        upstream = [one * factor for one in self.upstreams(roots).values()]
        torch.autograd.backward([*roots.values()], upstream, retain_graph=retain_graph)

    def roots(self, outputs: Outputs) -> dict[str, Tensor]:
        """Returns the outputs that get an upstream gradient, by name."""
        given = {name: getattr(outputs, name) for name in self.batch.cotangents}
        return {name: root for name, root in given.items() if root is not None}

    def upstreams(self, roots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the upstream gradients of some outputs on this rank, by name."""
        return {name: self.upstream(name, root) for name, root in roots.items()}

    def upstream(self, name: str, root: Tensor) -> Tensor:
        """Returns the upstream gradient of an output on this rank."""
        own = local_upstream(name, self.candidate, self.batch, self.context.rank)
        return own.to(self.context.device, root.dtype)

    def collect(self, outputs: Outputs, divided_by: float = 1.0, leaves: Collection[str] | None = None) -> RankOutputs:
        """Returns copies of what the kernel gave, on the CPU.

        Args:
            outputs: what ``forward`` returned.
            divided_by: divides the gradients. A power of two, so that nothing is rounded.
            leaves: those whose gradients are returned; by default all.
        """
        spec, chosen = self.candidate.spec, self.leaves if leaves is None else {n: self.leaves[n] for n in leaves}
        returned = {spec.output(name): getattr(outputs, name) for name in spec.outputs}
        local: dict[Output, Tensor | None] = {
            o: tensor.detach() for o, tensor in returned.items() if tensor is not None
        }
        local |= {metric_output(name): metric.detach() for name, metric in outputs.metrics.items()}
        for leaf, output in self.candidate.starts_at.gradients(chosen).items():
            tensor = chosen[leaf]
            empty = tensor.numel() == 0  # a rank without tokens has no gradient to miss
            gradient = torch.zeros_like(tensor) if tensor.grad is None and empty else tensor.grad
            local[output] = gradient if gradient is None or divided_by == 1 else gradient / divided_by
        # A kernel may write to its gradients and outputs in a later call.
        return {o: None if tensor is None else tensor.detach().to("cpu", copy=True) for o, tensor in local.items()}


def local_upstream(name: str, candidate: Candidate, batch: GlobalBatch, rank: int) -> Tensor:
    """Returns the upstream gradient of an output on a rank, in float64."""
    cotangent, partition = batch.cotangents[name], batch.partition
    if candidate.returns_whole(RETURNED[name]):
        return WholeSequences.of(partition, candidate.tokens, rank).lay_upstream(cotangent)
    return partition.shard(cotangent, RETURNED[name].dims, rank)


How = Callable[[RankCall], T]
"""How a kernel is called on each rank. It pickles: worlds whose ranks are processes send it."""


def plainly(call: RankCall) -> RankOutputs:
    """Calls a kernel once, forward and backward."""
    outputs = call.forward()
    call.backward(outputs)
    return call.collect(outputs)


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
    how: How[Any] = plainly
    """How the kernel is called."""

    def __call__(self, context: RankContext) -> Any:
        """Runs the candidate on this rank, and returns what ``how`` does.

        Raises:
            CandidateError: if it breaks its declared interface, or calls lossgate wrongly itself.
        """
        options = self.candidate.spec.bind(self.options).options
        return self.how(RankCall(self.candidate, options, self.batch, context))
