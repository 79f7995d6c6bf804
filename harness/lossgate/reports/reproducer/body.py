# SPDX-License-Identifier: Apache-2.0
"""The code that is the same in every reproducer.

It calls a kernel, and prints what the kernel returned next to what was expected. A reproducer adds
only the numbers. This file is copied as it is, so it imports only torch and the standard library.
"""

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import make_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "cp", "tp")
SHOWN = 5
"""How many entries of a wrong output are shown."""


def load_kernel(location: str, name: str) -> Callable[..., Any]:
    """Returns the kernel, a function of (inputs, options, mesh).

    The kernel returns the loss, or an object with loss, logprobs, token_entropy and metrics.
    """
    if not location.endswith(".py"):
        module = importlib.import_module(location)
    else:
        sys.path.insert(0, str(Path(location).parent))
        spec = importlib.util.spec_from_file_location(Path(location).stem, location)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    named = [value for value in vars(module).values() if callable(value) and getattr(value, "name", None) == name]
    return named[0] if named else getattr(module, name)


def numbers(values: Any, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns a tensor of a flat list of numbers."""
    return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)


def call(kernel: Callable[..., Any], given: dict[str, Any], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Calls the kernel on one rank, forward and backward. Returns outputs and gradients by name."""
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given["inputs"].items()}
    inputs = _object(copies, Batch)
    leaves = {name: getattr(inputs, name).requires_grad_() for name in given["leaves"]}
    returned = kernel(inputs, _object(given["options"]), mesh)
    if isinstance(returned, Tensor):
        returned = _object({"loss": returned})
    roots: list[Tensor] = []
    upstream: list[Tensor] = []
    for name, gradient in given["upstream"].items():
        root = getattr(returned, name, None)
        if root is not None:
            roots.append(root)
            upstream.append(gradient.to(root.dtype))
    torch.autograd.backward(roots, upstream)
    got = {name: getattr(returned, name, None) for name in ("loss", "logprobs", "token_entropy")}
    got |= getattr(returned, "metrics", {})
    got |= {f"grad of {name}": leaf.grad for name, leaf in leaves.items()}
    return {name: value.detach().clone() for name, value in got.items() if value is not None}


class Batch:
    """What a kernel may call on its inputs, for sequences that are whole on their rank."""

    mask: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor

    def to_rows(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Lays ``[T, ...]`` out as ``[B, S, ...]``."""
        places = self._places()
        rows = tensor.new_full((len(places), max([1, *map(len, places)]), *tensor.shape[1:]), fill)
        for row, place in enumerate(places):
            rows[row, : len(place)] = tensor[place.start : place.stop]
        return rows

    def from_rows(self, rows: Tensor) -> Tensor:
        """Undoes ``to_rows``."""
        places = self._places()
        pack = rows.new_zeros((int(self.cu_seqlens_padded[-1]), *rows.shape[2:]))
        for row, place in enumerate(places):
            part = rows[row, : len(place)]
            pack[place.start : place.start + len(part)] = part
        return pack

    def per_sequence(self, tensor: Tensor) -> Tensor:
        """Returns the number that all trained tokens of a sequence share, ``[B]``."""
        numbers, trained = self.to_rows(tensor), self.to_rows(self.mask)
        first = numbers.gather(1, trained.int().argmax(1, keepdim=True)).squeeze(1)
        return torch.where(trained.any(1), first, 0)

    def _places(self) -> list[range]:
        starts, lengths = self.cu_seqlens_padded.tolist(), self.cu_seqlens.diff().tolist()
        return [range(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _object(values: dict[str, Any], *bases: type) -> Any:
    return make_dataclass("Given", list(values), bases=bases)(**values)


def run_rank(rank: int, folder: str, location: str, name: str, sizes: tuple[int, ...], calls: list[Any]) -> None:
    """Makes all calls on one rank, and saves the outputs of the last call."""
    torch.set_num_threads(1)
    ranks = sizes[0] * sizes[1] * sizes[2]
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    kernel, mesh = load_kernel(location, name), init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    got = [call(kernel, one[rank], mesh) for one in calls]
    torch.save(got[-1], os.path.join(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


def whole_of(parts: list[Tensor], output: dict[str, Any]) -> Tensor:
    """Puts the parts of all ranks together, in float64.

    For each rank and each entry of the whole, ``places`` has the number of the entry of the rank's
    part; -1 if the rank has none. ``factors`` has the factor of each rank's part.
    """
    if output["combine"] != "sum":
        return getattr(torch, "a" + output["combine"])(torch.stack([part.double() for part in parts]))
    total = torch.zeros(output["want"].numel(), dtype=torch.float64)
    for part, places, factor in zip(parts, output["places"], output["factors"], strict=True):
        at = torch.tensor(places)
        if factor:  # else the caller leaves out the rank's part, which may be NaN
            total[at >= 0] += part.double().flatten()[at[at >= 0]] * factor
    return total.reshape(output["want"].shape)


def show(got: Tensor, output: dict[str, Any]) -> bool:
    """Prints an output next to what was expected. Returns whether the two are near."""
    want, allowed = output["want"], output["allowed"]
    same = (got == want) | (got.isnan() & want.isnan())
    off = (got - want).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
    if output["counted"] is not None:
        off = off * torch.tensor(output["counted"])
    largest = float(off.max()) if off.numel() else 0.0
    right = largest <= allowed
    mark = "" if right else "  <-- wrong"
    print(f"{output['name']}: off by at most {largest:.3g}; rounding explains {allowed:.3g}{mark}")
    if right:
        return True
    for number in off.flatten().topk(min(SHOWN, off.numel())).indices.tolist():
        if off.flatten()[number] > allowed:
            at = [int(one) for one in torch.unravel_index(torch.tensor(number), off.shape)] if off.dim() else ""
            print(f"  {at} got {float(got.flatten()[number]):.9g}, want {float(want.flatten()[number]):.9g}")
    return False


def main(location: str, name: str, sizes: tuple[int, ...], calls: list[Any], outputs: list[dict[str, Any]]) -> int:
    """Runs the ranks. If there are several, each has a process of its own.

    Returns 1 if an output is wrong or missing, else 0.
    """
    ranks, right = sizes[0] * sizes[1] * sizes[2], True
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            run_rank(0, folder, location, name, sizes, calls)
        else:
            processes.spawn(run_rank, (folder, location, name, sizes, calls), nprocs=ranks)
        got = [torch.load(os.path.join(folder, str(rank))) for rank in range(ranks)]
    for output in outputs:
        missing = [rank for rank in range(ranks) if output["name"] not in got[rank]]
        if missing:
            print(f"{output['name']}: missing on rank {', '.join(map(str, missing))}  <-- wrong")
        parts = [] if missing else [one[output["name"]] for one in got]
        right &= not missing and show(whole_of(parts, output), output)
    return 0 if right else 1
