# SPDX-License-Identifier: Apache-2.0
"""Small lm-heads of many kinds, for the tests of kernels that call a head tile by tile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, VOCAB = 4, 9


class LoraHead(nn.Module):
    """A wrapped linear layer with an adapter, as in PEFT; its children have the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
        self.base_layer.requires_grad_(requires_grad=False)
        self.lora_A = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        self.lora_B = nn.Linear(2, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + 0.5 * self.lora_B(self.lora_A(hidden))


class ShardedHead(nn.Module):
    """A head as in ZeRO-3: every rank stores some rows, and each call is a collective.

    There is one collective in forward and one in backward.
    """

    def __init__(self, weight: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.rows = nn.Parameter(weight.tensor_split(group.size())[group.rank()].clone())
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        weight = _GatherRows.apply(self.rows, self.group)
        assert isinstance(weight, Tensor)
        return hidden @ weight.T


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.tensor_split(ctx.group.size())[ctx.group.rank()], None


class Remembers(nn.Module):
    """A head that leaves a tensor with gradients behind, as its weight_norm does."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
        with pytest.warns(FutureWarning, match="weight_norm"):
            self.linear = nn.utils.weight_norm(linear)

    def forward(self, hidden: Tensor) -> Tensor:
        self.last = self.linear(hidden)
        return self.last


class Switched(nn.Module):
    """A head with two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, VOCAB, dtype=torch.float64) for _ in range(2))
        self.active = 0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.adapters[self.active](hidden)


class Cosine(nn.Linear):
    """A head that makes NaN of a hidden state of zeros."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden / hidden.norm(dim=1, keepdim=True))


class HiddenWeight(nn.Module):
    """A head that uses a parameter which is none of its attributes."""

    def __init__(self, weight: nn.Parameter, *, as_parameter: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList([weight]) if as_parameter else [weight]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights[0].T


def batch(tokens: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64), torch.randint(
        VOCAB, (tokens,), generator=generator
    )


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return make()


def dense(head: nn.Module, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(head(hidden) / temperature, 1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
