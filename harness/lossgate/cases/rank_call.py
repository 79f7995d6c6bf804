# SPDX-License-Identifier: Apache-2.0
"""A call of a kernel on one rank: its inputs, and its steps, which properties vary.

A rank computes on its own device. Problems are made, and results are returned, on the CPU.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lossgate.base.errors import CandidateError, UsageError
from lossgate.cases.random_numbers import seed, seeded
from lossgate.cases.returned import check_returned
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.whole_sequences import Tokens, WholeSequences
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import RETURNED, Output, metric_output
from lossgate.specs.spec import Spec
from lossgate.worlds.base import RankContext
from lossgate.worlds.call_sites import raise_site

_SHAPES = 100_000
"""A number larger than the number of problems of any run."""


def many_shapes() -> AbstractContextManager[object]:
    """Allows torch's compiler many shapes in this thread, because each problem has others.

    By default the compiler gives up after eight shapes, and a kernel that is compiled as a whole
    then raises an error. This does nothing if the compiler, which takes seconds to load, is not
    loaded.
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
    """Makes the inputs of a rank, anew in each call. The differentiable inputs require grad.

    Args:
        spec: the spec of the loss.
        head: where the kernel starts.
        batch: the batch as the ranks hold it, with padding.
        rank: the rank.
        device: the device of the inputs; by default that of the batch.
        tokens: how the kernel is given the fields of tokens.
        dtype: the dtype of all floating-point inputs; by default the problem's for differentiable
            inputs, and float32 for others.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    dims = HEADS[head].leaves
    leaves = {name: moved(batch.local_leaf(name, dims[name], rank)).requires_grad_() for name in batch.leaves}
    absent = dict.fromkeys(set(dims) - set(leaves))
    given = batch.local_fields(rank, tokens, spec.unshifted)
    fields = {name: moved(value) if isinstance(value, Tensor) else value for name, value in given.items()}
    inputs_class: Any = spec.inputs[head]
    return inputs_class(**fields, **leaves, **absent)


T = TypeVar("T")

RankOutputs = Mapping[Output, Tensor | None]
"""Outputs of one rank. A gradient is None if backward did not reach its leaf."""


class RankCall:
    """A call of a kernel with the inputs of one rank. Its steps are ``forward``, ``backward`` and
    ``collect``.
    """

    def __init__(
        self, candidate: Candidate, options: Any, batch: GlobalBatch, context: RankContext, seed: int = 0
    ) -> None:
        """Makes the inputs, on the device of the rank.

        Args:
            candidate: the kernel.
            options: an object of the spec's option class.
            batch: the batch as the ranks hold it, with padding.
            context: the rank, its device and its mesh.
            seed: the seed of the kernel's random numbers.
        """
        self.candidate, self.options, self.batch, self.context = candidate, options, batch, context
        self.seed = seed
        made = local_inputs(candidate.spec, candidate.head, batch, context.rank, context.device, candidate.tokens)
        self.use(made)

    def use(self, inputs: Any) -> None:
        """Replaces the inputs with which the kernel will be called."""
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
        """Returns the same call, with inputs that are made anew, and the same random numbers."""
        seed(self.seed)
        return RankCall(self.candidate, self.options, self.batch, self.context, self.seed)

    def forward(self, *, has_graph: bool = True, own_dtypes: bool = True) -> Outputs:
        """Calls the kernel.

        Args:
            has_graph: whether outputs that are declared differentiable must carry a graph.
            own_dtypes: whether dtypes must be the declared ones.

        Raises:
            CandidateError: if the kernel breaks its declared interface, or itself calls lossgate
                wrongly.
            UsageError: if the spec does not have a metric that the kernel returned.
        """
        rank, device = self.context.rank, self.context.device
        try:
            with many_shapes():
                returned = self.candidate(self.inputs, self.options, self.context.mesh)
        except UsageError as error:  # else it would end the run like a wrong command line
            raise CandidateError(
                f"candidate {self.candidate.name!r} on rank {rank} raised {type(error).__name__}: {error}"
            ) from error
        return check_returned(
            returned, self.candidate, self.batch, rank, device, has_graph=has_graph, own_dtypes=own_dtypes
        )

    def backward(self, outputs: Outputs, factor: float = 1.0, *, retain_graph: bool = False) -> None:
        """Calls backward with the upstream gradients of the problem.

        Args:
            outputs: the outputs of ``forward``.
            factor: the factor of the upstream gradients.
            retain_graph: as for ``torch.autograd.backward``.
        """
        roots = self.roots(outputs)
        upstream = [gradient * factor for gradient in self.upstreams(roots).values()]
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
        """Returns copies of the outputs, metrics and gradients of the kernel, on the CPU.

        Args:
            outputs: the outputs of ``forward``.
            divided_by: the divisor of the gradients. It is a power of two, so that nothing is
                rounded.
            leaves: the differentiable inputs whose gradients are returned; by default all.
        """
        spec = self.candidate.spec
        found: dict[Output, Tensor | None] = {}
        for name in spec.outputs:
            if (tensor := getattr(outputs, name)) is not None:
                found[spec.output(name)] = tensor
        found |= {metric_output(name): metric for name, metric in outputs.metrics.items()}
        chosen = self.leaves if leaves is None else {name: self.leaves[name] for name in leaves}
        for name, output in self.candidate.starts_at.gradients(chosen).items():
            leaf = chosen[name]
            gradient = leaf.grad
            if gradient is None and leaf.numel() == 0:  # a rank without tokens has no gradient to miss
                gradient = torch.zeros_like(leaf)
            if gradient is not None and divided_by != 1:
                gradient = gradient / divided_by
            found[output] = gradient
        # Copied, because a kernel may write to its gradients and outputs in a later call.
        return {o: None if tensor is None else tensor.detach().to("cpu", copy=True) for o, tensor in found.items()}


def local_upstream(name: str, candidate: Candidate, batch: GlobalBatch, rank: int) -> Tensor:
    """Returns the upstream gradient of an output on a rank, in float64."""
    cotangent, partition = batch.cotangents[name], batch.partition
    if candidate.returns_whole(RETURNED[name]):
        return WholeSequences.of(partition, candidate.tokens, rank).lay_upstream(cotangent)
    return partition.shard(cotangent, RETURNED[name].dims, rank)


How = Callable[[RankCall], T]
"""A function that calls a kernel on a rank. It must pickle, because worlds send it to processes."""


def plainly(call: RankCall) -> RankOutputs:
    """Calls a kernel once, forward and backward."""
    outputs = call.forward()
    call.backward(outputs)
    return call.collect(outputs)


@dataclass(frozen=True)
class RankTask:
    """A task for the ranks of a world.

    It is data that can be sent: the candidate pickles as its source. The batch is sent too, so
    every rank has the same bits on any machine.
    """

    candidate: Candidate
    options: Mapping[str, Any]
    """The options that are not at their default."""
    batch: GlobalBatch
    how: How[Any] = plainly
    """How the kernel is called."""
    seed: int = 0
    """The seed of the kernel's random numbers."""

    def __call__(self, context: RankContext) -> Any:
        """Calls the candidate on this rank, and returns the result of ``how``.

        Raises:
            CandidateError: if the kernel breaks its declared interface, or itself calls lossgate
                wrongly.
            UsageError: if the kernel can't import something, if a module lacks something, as
                another version of it does, or if the spec does not have a metric that the kernel
                returned. That says nothing of the kernel's loss.
        """
        options = self.candidate.spec.bind(self.options).options
        try:
            with seeded(self.seed):
                return self.how(RankCall(self.candidate, options, self.batch, context, self.seed))
        except (ImportError, AttributeError) as error:
            if isinstance(error, AttributeError) and not isinstance(error.obj, ModuleType):
                raise
            raise UsageError(
                f"candidate {self.candidate.name!r} raised {type(error).__name__}: {error}  [{raise_site(error)}]; "
                f"install what it needs for {sys.executable}, or mend that line"
            ) from error
