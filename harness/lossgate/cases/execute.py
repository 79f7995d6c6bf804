# SPDX-License-Identifier: Apache-2.0
"""Runs a candidate on every rank of a world and puts its outputs together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.assemble import assemble
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.declaration.contract import Placements
from lossgate.dtypes import DTYPES
from lossgate.errors import CandidateError
from lossgate.losses import find_spec
from lossgate.problems.batch import Batch
from lossgate.specs.outputs import OUTPUT_DIMS, grad_name, output_dims
from lossgate.specs.spec import HEADS, Spec
from lossgate.worlds import RankContext, World


@dataclass(frozen=True)
class Result:
    """Whole outputs of a candidate, float64, by name, with the dtype in which they came; and what was wrong with them.

    Names: "loss", "logprobs", a metric's name, and "grad of <leaf>".
    """

    outputs: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    faults: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Local:
    """One rank's outputs. A gradient is None where nothing reached the leaf."""

    outputs: dict[str, Tensor | None]


def execute(candidate: Candidate, batch: Batch, world: World) -> Result:
    """Run ``candidate`` forward and backward on the problem of ``batch``.

    Raises ``CandidateError`` if it breaks its declared interface, ``RankFailure`` if a rank fails.
    """
    spec, problem = find_spec(candidate.spec), batch.problem

    def body(context: RankContext) -> _Local:
        return _Local(_on_rank(candidate, spec, batch, context))

    locals_ = world.run(body, order=problem.reduction_order, seed=problem.seed)
    outputs: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    faults: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(name for local in locals_ for name in local.outputs):
        parts = [local.outputs.get(name) for local in locals_]
        missing = [rank for rank, part in enumerate(parts) if part is None]
        if missing:
            what = "nothing reached it" if name.startswith("grad of ") else "other ranks return it, and it is missing"
            faults[name] = (f"{what} on rank {', '.join(map(str, missing))}",)
            continue
        present = [part for part in parts if part is not None]
        whole = assemble(
            present,
            output_dims(name, candidate.head),
            _placements(candidate, spec, name),
            batch.partition,
            problem.hidden,
        )
        outputs[name], dtypes[name], faults[name] = whole.tensor, present[0].dtype, whole.faults
    return Result(outputs, dtypes, {name: told for name, told in faults.items() if told})


def _placements(candidate: Candidate, spec: Spec, name: str) -> Placements:
    contract = candidate.contract
    if name == "loss":
        return contract.of_loss()
    if name in ("logprobs", "token_entropy"):
        return contract.of_token_values()
    if name.startswith("grad of "):
        return contract.of_grad(name.removeprefix("grad of "))
    return spec.metric_placements(contract, name)


def _on_rank(candidate: Candidate, spec: Spec, batch: Batch, context: RankContext) -> dict[str, Tensor | None]:
    dims = HEADS[candidate.head].leaves
    leaves = {name: batch.local_leaf(name, dims[name], context.rank).requires_grad_() for name in batch.leaves}
    absent = dict.fromkeys(set(dims) - set(leaves))
    inputs = spec.inputs[candidate.head](**batch.local_fields(context.rank), **leaves, **absent)
    returned = candidate(inputs, spec.make_options(batch.problem.options), context.mesh)
    outputs = _checked(returned, candidate, spec, batch, context)
    _backward(outputs, batch, context)
    returned_now = {name: getattr(outputs, name) for name in spec.outputs}
    local: dict[str, Tensor | None] = {
        name: tensor.detach() for name, tensor in returned_now.items() if tensor is not None
    }
    local |= {name: metric.detach() for name, metric in outputs.metrics.items()}
    for name, leaf in leaves.items():
        empty = leaf.numel() == 0  # a rank without tokens has no gradient to miss
        local[grad_name(name)] = torch.zeros_like(leaf) if leaf.grad is None and empty else leaf.grad
    return local


def _backward(outputs: Outputs, batch: Batch, context: RankContext) -> None:
    roots: list[Tensor] = []
    upstream: list[Tensor] = []
    for name, cotangent in batch.cotangents.items():
        root: Tensor | None = getattr(outputs, name)
        if root is not None:
            roots.append(root)
            upstream.append(batch.partition.shard(cotangent, OUTPUT_DIMS[name], context.rank).to(root.dtype))
    torch.autograd.backward(roots, upstream)


def _checked(returned: Any, candidate: Candidate, spec: Spec, batch: Batch, context: RankContext) -> Outputs:
    """Refuse what the declared interface does not allow, in words."""
    who = f"candidate {candidate.name!r} on rank {context.rank}"
    if isinstance(returned, Tensor):
        returned = Outputs(loss=returned)
    if not isinstance(returned, Outputs):
        raise CandidateError(
            f"{who} returned {type(returned).__name__}; expected lossgate.Outputs, or the loss as a tensor"
        )
    tokens = batch.partition.local_shape(("token",), context.rank, 0)
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for name, shape in (("loss", ()), ("logprobs", tokens), ("token_entropy", tokens)):
        if (value := getattr(returned, name)) is not None:
            if name not in spec.outputs:
                raise CandidateError(
                    f"{who} returned {name}, which spec {spec.name!r} has not; expected any of {', '.join(spec.outputs)}"
                )
            expected[name] = (value, shape)
        elif name == spec.outputs[0]:
            raise CandidateError(f"{who} returned no {name}, which spec {spec.name!r} owes")
    for name, metric in returned.metrics.items():
        if name not in spec.metrics:
            raise CandidateError(f"{who} returned metric {name!r}; spec {spec.name!r} has {', '.join(spec.metrics)}")
        expected[f"metric {name!r}"] = (metric, ())
    dtype = DTYPES[candidate.precision[batch.problem.dtype].loss]
    for name, (tensor, shape) in expected.items():
        if not isinstance(tensor, Tensor):
            raise CandidateError(f"{who} returned {name} as {type(tensor).__name__}; expected a tensor")
        if tuple(tensor.shape) != shape:
            raise CandidateError(f"{who} returned {name} of shape {list(tensor.shape)}; expected {list(shape)}")
        if tensor.dtype != dtype:
            got, want = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
            raise CandidateError(f"{who} returned {name} in {got}; its Precision(loss=...) declares {want}")
    for name in spec.differentiable(candidate):
        output = getattr(returned, name)
        if output is None or not output.requires_grad:
            raise CandidateError(
                f"{who} returned {'no' if output is None else 'a detached'} {name}, without a graph; it is declared differentiable"
            )
    return returned
