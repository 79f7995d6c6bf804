# SPDX-License-Identifier: Apache-2.0
"""Checks what a candidate returned against its declared interface."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import CandidateError, UsageError
from lossgate.base.spelling import nearest
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.problems.whole_sequences import WholeSequences
from lossgate.specs.outputs import RETURNED, Output


def check_returned(
    returned: Any,
    candidate: Candidate,
    batch: GlobalBatch,
    rank: int,
    device: torch.device,
    *,
    has_graph: bool = True,
    own_dtypes: bool = True,
) -> Outputs:
    """Checks the outputs of a rank, and returns them as ``Outputs``.

    Args:
        returned: the value that the kernel returned.
        candidate: the candidate, which declares its outputs.
        batch: the batch as the ranks hold it.
        rank: the rank.
        device: the device of the rank's inputs.
        has_graph: whether outputs that are declared differentiable must carry a graph.
        own_dtypes: whether dtypes must be the declared ones. Autocast chooses others.

    Raises:
        CandidateError: if a type, shape, dtype or device is not as declared; if the spec does not
            have an output; if a required output is missing; or if an output that is declared
            differentiable has no graph.
        UsageError: if the spec does not have a metric. That says nothing of the kernel's loss.
    """
    who = f"candidate {candidate.name!r} on rank {rank}"
    if isinstance(returned, Tensor):
        returned = Outputs(loss=returned)
    if not isinstance(returned, Outputs):
        raise CandidateError(
            f"{who} returned {type(returned).__name__}; expected lossgate.Outputs, or the loss as a tensor"
        )
    values = _values(returned, candidate, batch, rank, who)
    expected = values | _metrics(returned, candidate, who)
    precision, metric_names = candidate.precision[batch.dtype], {f"metric {name!r}": name for name in returned.metrics}
    for shown, (tensor, shape) in expected.items():
        name = metric_names.get(shown, shown)
        dtype = TORCH_DTYPES[precision.dtype_of(name)]
        if not isinstance(tensor, Tensor):
            raise CandidateError(f"{who} returned {shown} as {type(tensor).__name__}; expected a tensor")
        if tuple(tensor.shape) != shape:
            raise CandidateError(f"{who} returned {shown} of shape {list(tensor.shape)}; expected {list(shape)}")
        if tensor.dtype != dtype and (own_dtypes or not tensor.is_floating_point()):
            got, want = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
            raise CandidateError(f"{who} returned {shown} in {got}; {_remedy(name, got, want)}")
        if shown in values and tensor.device.type != device.type:
            raise CandidateError(f"{who} returned {shown} on {tensor.device.type}; its inputs are on {device.type}")
    for name in candidate.differentiable:
        if (output := getattr(returned, name)) is None:
            raise CandidateError(
                f"{who} returned no {name}, which is declared differentiable; return it, or drop it from differentiable"
            )
        if has_graph and not output.requires_grad:
            raise CandidateError(
                f"{who} returned {name} without a graph; it is declared differentiable; {_way_out(batch, rank)}"
            )
    return returned


def _remedy(name: str, got: str, want: str) -> str:
    """Returns advice for an output in another dtype than the declared one."""
    own = f"returned={{{name!r}: {got!r}}}"
    return f"its Precision declares {want}: add {own} to it, or loss={got!r} if the loss is computed in {got}"


def _values(
    returned: Outputs, candidate: Candidate, batch: GlobalBatch, rank: int, who: str
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns each output except metrics, with the shape that it must have, by name."""
    spec, found = candidate.spec, dict[str, tuple[Any, tuple[int, ...]]]()
    for name, output in RETURNED.items():
        value = getattr(returned, name)
        if value is None:
            if name == spec.outputs[0]:
                raise CandidateError(f"{who} returned no {name}; spec {spec.name!r} requires it")
            continue
        if name not in spec.outputs:
            expected = ", ".join(spec.outputs)
            raise CandidateError(f"{who} returned {name}; spec {spec.name!r} has only {expected}")
        found[name] = (value, local_shape(output, candidate, batch.partition, rank))
    return found


def local_shape(
    output: Output, candidate: Candidate, partition: Partition, rank: int, hidden: int = 0
) -> tuple[int, ...]:
    """Returns the shape of an output, or of its part, on a rank.

    Args:
        output: the output.
        candidate: the candidate, which may return outputs of whole sequences.
        partition: how the problem is split.
        rank: the rank.
        hidden: the width of the hidden states, which gradients may have.
    """
    if candidate.returns_whole(output):
        return tuple(WholeSequences.of(partition, candidate.tokens, rank).token.shape)
    return partition.local_shape(output.dims, rank, hidden)


def _metrics(returned: Outputs, candidate: Candidate, who: str) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns each metric with the shape that it must have, by its name in messages."""
    spec = candidate.spec
    if not isinstance(returned.metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CandidateError(
            f"{who} returned metrics={returned.metrics!r:.60}; expected a dict of tensors, such as "
            '{"name": tensor}, and {} for none'
        )
    for name in returned.metrics:
        if name not in spec.metrics:
            own = f"it is no metric: return it as Outputs({name}=...) alone" if name in spec.outputs else ""
            raise UsageError(
                f"{who} returned metric {name!r}, which spec {spec.name!r} does not have; "
                f"{nearest(str(name), spec.metrics, own)}"
            )
    return {f"metric {name!r}": (metric, ()) for name, metric in returned.metrics.items()}


def _way_out(batch: GlobalBatch, rank: int) -> str:
    """Returns advice for an output without a graph."""
    if 0 in batch.partition.local_shape(("token", "sequence"), rank, 0):
        return "this rank has no token, and such a rank adds 0.0 * x.sum() of each differentiable input x"
    return "look for detach(), torch.no_grad() and tensors that are made anew"
