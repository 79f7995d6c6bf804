# SPDX-License-Identifier: Apache-2.0
"""``lossgate.current_mesh``: groups for code that asks its process for them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate import UsageError, current_mesh
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]


def test_each_rank_has_its_own_mesh_between_collectives(make_world: MakeWorld) -> None:
    def task(context: Any) -> list[bool]:
        found = [current_mesh() is context.mesh]
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=current_mesh().get_group("tp"))
            found.append(current_mesh() is context.mesh)
        return found

    assert make_world("dp=2,tp=2").run(task) == [[True] * 4] * 4


class _Scaled(torch.autograd.Function):
    """Multiplies by the number of the tp rank, which backward looks up again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1), group=current_mesh().get_group("tp"))
        return x * (1 + current_mesh().get_local_rank("tp"))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_reduce(torch.ones(1), group=current_mesh().get_group("tp"))
        return upstream * (1 + current_mesh().get_local_rank("tp"))


def test_backward_finds_it(make_world: MakeWorld) -> None:
    def task(context: Any) -> float:
        x = torch.ones((), requires_grad=True)
        _Scaled.apply(x).backward()  # pyright: ignore[reportAttributeAccessIssue]
        assert x.grad is not None
        return x.grad.item()

    assert make_world("tp=3").run(task) == [1, 2, 3]


def test_a_thread_that_a_kernel_starts_finds_that_of_its_rank(make_world: MakeWorld) -> None:
    def task(context: Any) -> bool:
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(current_mesh() is context.mesh))
        thread.start()
        thread.join()
        return found[0]

    assert make_world("tp=2").run(task) == [True, True]


def test_a_variable_of_the_process_is_that_of_another_rank(make_world: MakeWorld) -> None:
    """Why there is ``current_mesh``: the rank that comes last sets it for all."""
    kept: dict[str, Any] = {}

    def task(context: Any) -> bool:
        kept["mesh"] = context.mesh
        dist.all_reduce(torch.ones(1), group=context.mesh.get_group("tp"))
        return kept["mesh"] is context.mesh

    assert make_world("tp=2").run(task) != [True, True]


def test_outside_a_run_there_is_none(make_world: MakeWorld) -> None:
    make_world("tp=2").run(lambda context: None)
    with pytest.raises(UsageError, match=r"current_mesh\(\): no rank runs now; call it in a kernel, or in a function"):
        current_mesh()
