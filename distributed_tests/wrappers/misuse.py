# SPDX-License-Identifier: Apache-2.0
"""Calls outside of the forward that gathers the weights: what is refused, and what is not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from distributed_tests.wrappers.losses import dense_logprobs
from distributed_tests.wrappers.model import VOCAB, WIDTH, make_model
from distributed_tests.wrappers.step import collectives_called, environment_kept
from distributed_tests.wrappers.wrappers import WRAPPERS, FSDP2Head, Wrapped, Zero3
from fused_losses import (
    Metrics,
    backbone_and_lm_head,
    linear_cross_entropy,
    linear_logprobs,
    tiled_loss,
    tiled_token_logprobs,
)
from lossgate.worlds import RankContext

Kernel = Callable[[Any, Tensor, Tensor], Tensor]


KERNELS: Mapping[str, Kernel] = {
    "linear_logprobs": lambda head, h, y: linear_logprobs(h, head.weight, y).logprobs,
    "linear_cross_entropy": lambda head, h, y: linear_cross_entropy(h, head.weight, y),
    "tiled_token_logprobs": lambda head, h, y: tiled_token_logprobs(head, h, y).logprobs,
    "tiled_loss": lambda head, h, y: tiled_loss(head, h, y, lambda values, _: (values.logprobs.sum(), Metrics()))[0],
    "linear_logprobs of a computed weight": lambda head, h, y: linear_logprobs(h, 2 * head.weight, y).logprobs,
}
_EVERY = list(KERNELS)[:4]


@dataclass(frozen=True)
class Misuse:
    """A call that is refused."""

    wrapper: str
    kernel: str
    message: str
    """What the error must say, a regular expression."""
    head: str = "plain"
    gathered: bool = False
    """Whether the weights are gathered in the way that the wrapper offers for reading them."""


_FSDP = r"weight belongs to FSDP and is used outside of its forward.* that FSDP wraps: run_in_forward\("
_FSDP2 = r"weight is a DTensor.* inside the forward of the module that was passed to fully_shard: run_in_forward\("
_IDLE = r"weight is used outside of the forward for which FSDP2 gathers it.*, without unshard\(\): run_in_forward\("
_ZERO = r"weight belongs to ZeRO-3 and is used outside of .*, without GatheredParameters: run_in_forward\(lm_head"

MISUSES = [
    *(Misuse("FSDP FULL_SHARD", kernel, _FSDP, gathered=g) for kernel in _EVERY for g in (False, True)),
    *(Misuse("FSDP NO_SHARD", kernel, _FSDP) for kernel in KERNELS),
    *(Misuse("FSDP FULL_SHARD, flat", kernel, _FSDP) for kernel in _EVERY),
    *(Misuse("FSDP NO_SHARD, flat", kernel, _FSDP) for kernel in _EVERY),
    Misuse("FSDP FULL_SHARD", "tiled_token_logprobs", _FSDP, head="frozen"),
    *(Misuse("FSDP2", kernel, _FSDP2) for kernel in _EVERY),
    *(Misuse("FSDP2", kernel, _IDLE, gathered=True) for kernel in KERNELS),
    *(Misuse("FSDP2 of the head", kernel, _FSDP2) for kernel in _EVERY[:2]),
    *(Misuse("FSDP2 of the head", kernel, _IDLE, gathered=True) for kernel in _EVERY[:2]),
    Misuse(
        "FSDP2 of a part of the head",
        "tiled_token_logprobs",
        r"its lora_A.default has a wrapper of its own \(FSDPLinear\), which would .* for every tile; wrap the whole",
        head="LoRA",
    ),
    *(Misuse("ZeRO-3", kernel, _ZERO, gathered=g) for kernel in _EVERY[:2] for g in (False, True)),
    Misuse(
        "ZeRO-3 without a leaf",
        "tiled_token_logprobs",
        r"for every tile; call deepspeed.utils.set_z3_leaf_module\(lm_head, True\) before deepspeed.initialize",
        head="LoRA",
    ),
]


class _PartOfHead(FSDP2Head):
    """``fully_shard`` on an adapter of the head alone."""

    def wrap(self, model: nn.Module) -> nn.Module:
        head: Any = backbone_and_lm_head(model)[1]
        fully_shard(head.lora_A["default"])
        return fully_shard(model)


class _Zero3WithoutLeaf(Zero3):
    leaf_head = False


_WRAPPERS: Mapping[str, type[Wrapped]] = {
    **WRAPPERS,
    "FSDP2 of a part of the head": _PartOfHead,
    "ZeRO-3 without a leaf": _Zero3WithoutLeaf,
}


@contextmanager
def gathered(wrapped: Wrapped) -> Iterator[None]:
    """Gathers the weights in the way that the wrapper offers for reading them."""
    modules = [module for module in wrapped.model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        cast(FSDPModule, module).unshard()
    with wrapped.whole():
        yield
    for module in modules:
        cast(FSDPModule, module).reshard()


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, WIDTH, generator=generator)
    return hidden.requires_grad_(), torch.randint(VOCAB, (5,), generator=generator)


@contextmanager
def _wrapped(wrapper: str, head: str) -> Iterator[tuple[Wrapped, nn.Module]]:
    with environment_kept():
        wrapped = _WRAPPERS[wrapper](make_model(head), 1)
        yield wrapped, backbone_and_lm_head(wrapped.model)[1]


def attempt(misuses: Sequence[Misuse], context: RankContext) -> list[tuple[str, int]]:
    """Makes calls that must be refused.

    Returns:
        For each the message of the error, and how many collectives the call made.
    """
    return [_attempt(misuse) for misuse in misuses]


def _attempt(misuse: Misuse) -> tuple[str, int]:
    with _wrapped(misuse.wrapper, misuse.head) as (wrapped, head):
        if misuse.gathered:
            with gathered(wrapped):
                return _call(misuse, head)
        return _call(misuse, head)


def _call(misuse: Misuse, head: nn.Module) -> tuple[str, int]:
    before = collectives_called()
    try:
        KERNELS[misuse.kernel](head, *_tokens())
    except ValueError as error:
        return str(error), collectives_called() - before
    return "", collectives_called() - before


READERS = ("FSDP FULL_SHARD", "FSDP NO_SHARD", "FSDP FULL_SHARD, flat", "FSDP2", "FSDP2 of the head", "ZeRO-3")


def read(wrapper: str, context: RankContext) -> dict[str, float]:
    """Computes log-probabilities without gradients, with the weights gathered to be read.

    Returns:
        The largest error of each kernel.
    """
    hidden, labels = _tokens()
    expected = dense_logprobs(backbone_and_lm_head(make_model("plain"))[1], hidden, labels)
    errors = {}
    with _wrapped(wrapper, "plain") as (wrapped, head), gathered(wrapped), torch.no_grad():
        for name in ("linear_logprobs", "tiled_token_logprobs"):
            errors[name] = float((KERNELS[name](head, hidden, labels) - expected).abs().max())
    return errors
