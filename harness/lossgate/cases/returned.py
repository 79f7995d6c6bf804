# SPDX-License-Identifier: Apache-2.0
"""Checks what a candidate returned against its declared interface."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import CandidateError
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
    """Returns the outputs of a rank.

    Args:
        returned: what the kernel returned.
        candidate: says what is declared.
        batch: as the ranks hold it.
        rank: the rank.
        device: where its inputs are.
        has_graph: whether what is declared differentiable must carry a graph.
        own_dtypes: whether dtypes must be those that are declared; autocast chooses others.

    Raises:
        CandidateError: if a type, shape, dtype or device is not as declared, an output is unknown
            to the spec or required and missing, or an output that is declared differentiable has
            no graph.
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
    precision, own_names = candidate.precision[batch.dtype], {f"metric {name!r}": name for name in returned.metrics}
    for name, (tensor, shape) in expected.items():
        dtype = TORCH_DTYPES[precision.dtype_of(own_names.get(name, name))]
        if not isinstance(tensor, Tensor):
            raise CandidateError(f"{who} returned {name} as {type(tensor).__name__}; expected a tensor")
        if tuple(tensor.shape) != shape:
            raise CandidateError(f"{who} returned {name} of shape {list(tensor.shape)}; expected {list(shape)}")
        if tensor.dtype != dtype and (own_dtypes or not tensor.is_floating_point()):
            got, want = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
            raise CandidateError(f"{who} returned {name} in {got}; {_remedy(own_names.get(name, name), got, want)}")
        if name in values and tensor.device.type != device.type:
            raise CandidateError(f"{who} returned {name} on {tensor.device.type}; its inputs are on {device.type}")
    for name in candidate.differentiable:
        if (output := getattr(returned, name)) is None:
            raise CandidateError(f"{who} returned no {name}, which is declared differentiable")
        if has_graph and not output.requires_grad:
            raise CandidateError(
                f"{who} returned {name} without a graph; it is declared differentiable; {_way_out(batch, rank)}"
            )
    return returned


def _remedy(name: str, got: str, want: str) -> str:
    own = f"returned={{{name!r}: {got!r}}}"
    return f"its Precision declares {want}: give it {own}, or loss={got!r} if the loss is computed in {got}"


def _values(
    returned: Outputs, candidate: Candidate, batch: GlobalBatch, rank: int, who: str
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns each output beside metrics, and the shape that it must have."""
    spec, found = candidate.spec, dict[str, tuple[Any, tuple[int, ...]]]()
    for name, output in RETURNED.items():
        if (value := getattr(returned, name)) is not None:
            if name not in spec.outputs:
                expected = ", ".join(spec.outputs)
                raise CandidateError(f"{who} returned {name}; spec {spec.name!r} has only {expected}")
            found[name] = (value, local_shape(output, candidate, batch.partition, rank))
        elif name == spec.outputs[0]:
            raise CandidateError(f"{who} returned no {name}; spec {spec.name!r} requires it")
    return found


def local_shape(
    output: Output, candidate: Candidate, partition: Partition, rank: int, hidden: int = 0
) -> tuple[int, ...]:
    """Returns the shape of what a rank gives of an output.

    Args:
        output: the output.
        candidate: says whether it is that of whole sequences.
        partition: how the problem is split.
        rank: the rank.
        hidden: the width of the hidden states, where a gradient may have it.
    """
    if candidate.returns_whole(output):
        return tuple(WholeSequences.of(partition, candidate.tokens, rank).token.shape)
    return partition.local_shape(output.dims, rank, hidden)


def _metrics(returned: Outputs, candidate: Candidate, who: str) -> dict[str, tuple[Any, tuple[int, ...]]]:
    spec = candidate.spec
    if not isinstance(returned.metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CandidateError(
            f"{who} returned metrics={returned.metrics!r:.60}; expected a dict of tensors, such as "
            '{"name": tensor}, and {} for none'
        )
    for name in returned.metrics:
        if name not in spec.metrics:
            raise CandidateError(
                f"{who} returned metric {name!r}, which spec {spec.name!r} does not have; "
                f"{nearest(str(name), spec.metrics)}"
            )
    return {f"metric {name!r}": (metric, ()) for name, metric in returned.metrics.items()}


def _way_out(batch: GlobalBatch, rank: int) -> str:
    """Returns what to do about an output without a graph."""
    if 0 in batch.partition.local_shape(("token", "sequence"), rank, 0):
        return "it has no token: a rank that has nothing to compute adds 0.0 * x.sum() of each differentiable input x"
    return "look for detach(), torch.no_grad() and tensors that are made anew"
