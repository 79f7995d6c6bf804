# SPDX-License-Identifier: Apache-2.0
"""The collectives and sends that a rank makes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from lossgate.worlds.simulated.collectives import show
from lossgate.worlds.simulated.communicator import Logged

_BROUGHT: Mapping[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce_coalesced", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather_into_tensor", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter_tensor", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all_single", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::allgather_coalesced_": ("all_gather_coalesced", 1),
    "c10d::barrier": ("barrier", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce_coalesced", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather_into_tensor", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather_into_tensor", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter_tensor", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all_single", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
"""For each operator that torch dispatches: the name of its function in ``torch.distributed``, and
the position of the argument that holds the tensors of the rank."""
_NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class Collective:
    """A rank's call of a collective, or of a send, over a group of several ranks."""

    name: str
    """The name of the function in ``torch.distributed``."""
    group: str
    """The axis, such as "tp", or torch's description of a group that is no axis."""
    shown: str
    """Dtypes and shapes of the tensors that the rank brings."""
    bytes: int
    """Bytes of the tensors that the rank brings."""

    def __str__(self) -> str:
        return f"{self.name} over {self.group}"


def axes_of(mesh: DeviceMesh) -> dict[str, str]:
    """Returns the axes of a mesh that have several ranks, by the names of their groups."""
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1}


def brought(operation: Any, args: Sequence[Any], axes: Mapping[str, str]) -> Iterator[Collective]:
    """Yields the collective that torch dispatches, if it is one over several ranks.

    Args:
        operation: the operator that torch dispatches.
        args: its arguments.
        axes: the labels of groups, by the names of the groups. Others get torch's description.
    """
    if operation.namespace not in _NAMESPACES:
        return
    schema = operation._schema.name
    group = _group_of(args) if schema in _BROUGHT else None
    if group is None or group.size() < 2:
        return
    name, position = _BROUGHT[schema]
    leaves = tree_leaves(args[position]) if name != "barrier" else ()  # torch gives a barrier a tensor of its own
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    label = axes.get(group.group_name, group.group_desc)
    yield Collective(name, label, ", ".join(map(show, tensors)), size)


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    return _resolve_process_group(names[-1]) if names else None  # pyright: ignore[reportArgumentType]


def logged(log: Sequence[Logged], rank: int) -> tuple[Collective, ...]:
    """Returns the collectives and sends of a rank of a simulated world, from the log of a run."""
    return tuple(
        Collective(line.collective, line.label, line.shown, line.bytes)
        for line in log
        if line.rank == rank and line.members > 1
    )
