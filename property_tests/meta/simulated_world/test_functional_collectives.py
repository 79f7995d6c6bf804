# SPDX-License-Identifier: Apache-2.0
"""Functional collectives and DTensor."""

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from lossgate.worlds import RankContext

from .on_ranks import MakeWorld, of_rank


def test_functional_collectives_forward_and_backward(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> tuple[list[float], float]:
        mesh = context.mesh["tp"]
        x = of_rank(context.rank + 1, 2).requires_grad_()
        gathered = (
            funcol.all_gather_single_autograd(x, 0, mesh)
            if hasattr(funcol, "all_gather_single_autograd")
            else funcol.all_gather_tensor_autograd(x, 0, mesh)
        )
        (gathered * (context.rank + 1)).sum().backward()
        assert x.grad is not None
        return funcol.all_reduce(x.detach(), "sum", mesh).tolist(), x.grad[0].item()

    assert make_world("tp=2").run(body) == [([3, 3], 3), ([3, 3], 3)]


def test_dtensor(make_world: MakeWorld) -> None:
    whole = torch.arange(10.0).view(2, 5)

    def body(context: RankContext) -> list[list[float]]:
        mesh = context.mesh["tp"]
        local = whole.chunk(2, 1)[mesh.get_local_rank()]
        tensor = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())
        total = F.relu(tensor - 4).sum(1, keepdim=True)
        assert isinstance(total, DTensor)
        return total.full_tensor().tolist()

    assert make_world("tp=2").run(body) == [[[0], [15]]] * 2
