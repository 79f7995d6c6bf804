# SPDX-License-Identifier: Apache-2.0
"""Runs candidates on a fake accelerator and prints what goes wrong, one JSON line for each run.

    python property_tests/kernels/fake_device.py ci/candidates/ours.py ...

The device "sim" has no memory and computes nothing: its tensors have only shapes and dtypes. So no
GPU is needed. Two things raise there that are slow or wrong on a GPU, and that no CPU shows:

- an operation on tensors of several devices;
- an operation that needs a value on the host, such as ``.item()``, ``if tensor:`` or a boolean
  index. On a GPU the host waits there for the device.

Three things are not seen: a value copied with ``.cpu()`` and not used, an index on the CPU, which a
GPU copies to itself, and a scalar on the CPU, which torch lets meet any device.

The device is registered once for a process and stays, so this is no test but a script for one.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fused_losses import Pack, unchecked_values
from fused_losses.packed_lengths import PackedLengths
from lossgate import Candidate, Layout
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.loading import load_candidates
from lossgate.layout import AXES
from lossgate.problems.problem import Problem
from lossgate.worlds.base import RankContext, T, Task

DEVICE = "sim"
LAYOUTS = tuple(Layout.parse(text) for text in ("single", "dp=2", "cp=2", "tp=2"))
PROBLEMS = 2
"""For each candidate, layout and dtype. All are different, so that together they take most
branches."""


class FakeDevice(FakeTensorMode):
    """Makes every tensor a fake one, those on the CPU too."""

    avoid_device_init = True  # There is nothing to initialise: numbers must not be copied to the device.

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # A problem is made of real tensors, on the CPU.


@dataclass(frozen=True)
class Run:
    """What was run, and the error that it raised, if any."""

    name: str
    layout: str
    error: str | None


def main(targets: list[str]) -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    torch.sim.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # torch.autocast asks
    candidates = [candidate for target in targets for candidate in load_candidates(target)]
    for run in [*_runs_of_candidates(candidates), *_runs_of_packs()]:
        print(json.dumps(asdict(run)))


class OneRank:
    """A world of which only one rank runs, on the fake device."""

    def __init__(self, context: RankContext) -> None:
        self.layout = context.layout
        self._context = context
        self.repeatable = True

    def run(self, task: Task[T], *, order: str, seed: int, patience: float) -> list[T]:
        with FakeDevice(), unchecked_values():  # the checks of values wait for the device
            return [task(self._context)]


def _runs_of_candidates(candidates: list[Candidate]) -> Iterator[Run]:
    for layout in LAYOUTS:
        with _last_rank(layout) as context:
            for candidate in candidates:
                for problem in _problems(candidate, layout):
                    case = Case(candidate, problem, OneRank(context))
                    _ = case.placed.partition.token_shards  # made of real tensors, before any fake ones
                    yield Run(candidate.name, str(layout), _error(lambda case=case: case.ranks))


def _problems(candidate: Candidate, layout: Layout) -> Iterator[Problem]:
    if set(layout.axes) <= set(candidate.axes):
        for dtype in candidate.dtypes:
            seed = crc32(f"{layout} {dtype}".encode())
            yield from sample_problems(candidate, layout, dtype, PROBLEMS, seed)


@contextmanager
def _last_rank(layout: Layout) -> Iterator[RankContext]:
    """Gives the context of the last rank. Collectives return without the others.

    The first rank is that of the layout "single".
    """
    rank = layout.ranks - 1
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    ranks = torch.arange(layout.ranks).view(*layout.sizes.values())
    at = list(layout.coordinate(rank).values())
    along = [ranks[tuple(slice(None) if i == axis else at[i] for i in range(len(AXES)))] for axis in range(len(AXES))]
    groups = [dist.new_group(members.tolist(), backend="fake") for members in along]
    mesh = DeviceMesh.from_group(groups, DEVICE, ranks, mesh_dim_names=AXES)
    yield RankContext(rank, layout, mesh, torch.device(DEVICE))
    dist.destroy_process_group()


def _runs_of_packs() -> Iterator[Run]:
    """Runs what no candidate calls: packs, over cp."""
    with _last_rank(Layout(cp=2)) as context, FakeDevice():
        group = context.mesh.get_group("cp")
        cu_seqlens = torch.tensor([0, 3, 8], device=DEVICE)
        tokens: dict[str, Any] = dict.fromkeys(("index", "sequence", "position"), torch.zeros(6, device=DEVICE).long())
        real = torch.ones(6, dtype=torch.bool, device=DEVICE)
        starts: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens}
        host = PackedLengths(true=(3, 5), padded=(3, 9), rows=2, row_width=None)
        pack = Pack(**tokens, real=real, lengths=cu_seqlens.diff(), **starts, cp=2, host=host)
        rows = torch.zeros(2, 5, device=DEVICE)
        whole = torch.zeros(12, device=DEVICE)
        local = torch.zeros(6, device=DEVICE, requires_grad=True)
        calls: dict[str, Callable[[], Any]] = {
            "Pack.of": lambda: Pack.of(cu_seqlens, cp_group=group),
            "Pack.from_rows": lambda: pack.from_rows(rows, shift=1),
            "Pack.from_rows, packed": lambda: pack.from_rows(whole, shift=1),
            "Pack.labels": lambda: pack.labels(rows.long()),
            "Pack.split": lambda: pack.split(whole),
            "Pack.gather": lambda: _backward(pack.gather(local, group)),
            "Pack.to_rows": lambda: _backward(pack.to_rows(local, 5, group)),
        }
        for name, call in calls.items():
            yield Run(name, str(context.layout), _error(call))


def _backward(result: Tensor) -> None:
    result.backward(torch.ones_like(result))


def _error(call: Callable[[], Any]) -> str | None:
    """Returns the error that a call raises, and where it does."""
    try:
        call()
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        return f"{type(error).__name__}: {str(error).splitlines()[0]} ({place})"
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
