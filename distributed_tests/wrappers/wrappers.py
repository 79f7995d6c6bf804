# SPDX-License-Identifier: Apache-2.0
"""The wrappers: how each is put around a model, and how a training step goes under it."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed_tests.wrappers.model import trained
from fused_losses import backbone_and_lm_head
from fused_losses.models import unwrap

RATE = 2.0**20
"""The learning rate: so large that weights after a step tell the gradient exactly."""


class Wrapped:
    """A model in a wrapper, ready to train. By itself it wraps nothing, for one rank."""

    shards = False
    """Whether each rank holds only a part of the weights."""

    def __init__(self, model: nn.Module, microbatches: int) -> None:
        self.microbatches = microbatches
        self.model = self.wrap(model)
        self.optimizer = self.make_optimizer()

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def make_optimizer(self) -> Any:
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=RATE)

    def first_iteration(self, loss: Callable[[], Tensor]) -> None:
        """Does what the wrapper needs before it can train."""

    @property
    def loss_factor(self) -> float:
        """By what the loss is multiplied, since the wrapper averages over ranks."""
        return float(dist.get_world_size())

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        """Is entered around forward and backward of a microbatch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> AbstractContextManager[Any]:
        """Is entered to read the whole weights."""
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Returns the whole weights of all parameters, on every rank."""
        with self.whole():
            return {name: _whole(parameter).double() for name, parameter in trained(self.model).items()}

    def held(self) -> int:
        """Returns how many numbers of the weights this rank holds."""
        return sum(_local(parameter).numel() for parameter in self.model.parameters())


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _whole(parameter: Any) -> Tensor:
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().clone()


class DDP(Wrapped):
    """DistributedDataParallel around the model."""

    static_graph = False

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, static_graph=self.static_graph)

    def first_iteration(self, loss: Callable[[], Tensor]) -> None:
        """Does a synchronised backward, without which torch fails under no_sync."""
        if self.static_graph and self.microbatches > 1:
            loss().backward()
            self.optimizer.zero_grad()

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else cast(DistributedDataParallel, self.model).no_sync()


class StaticDDP(DDP):
    static_graph = True


class DDPHead(DDP):
    """DistributedDataParallel around the backbone, and another around the head."""

    def wrap(self, model: nn.Module) -> nn.Module:
        inner = unwrap(model)
        for name in ("model", "lm_head"):
            if any(p.requires_grad for p in getattr(inner, name).parameters()):
                setattr(inner, name, DistributedDataParallel(getattr(inner, name), static_graph=self.static_graph))
        return model

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        inner = unwrap(self.model)
        with contextlib.ExitStack() as stack:
            for name in ("model", "lm_head"):
                if not last and isinstance(part := getattr(inner, name), DistributedDataParallel):
                    stack.enter_context(part.no_sync())
            yield


class StaticDDPHead(DDPHead):
    static_graph = True


class FSDP(Wrapped):
    """FullyShardedDataParallel around the model."""

    shards = True
    strategy = ShardingStrategy.FULL_SHARD
    use_orig_params = True

    def wrap(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.strategy,
            use_orig_params=self.use_orig_params,
            device_id=torch.device("cpu"),
        )

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else cast(FullyShardedDataParallel, self.model).no_sync()

    def whole(self) -> AbstractContextManager[Any]:
        return FullyShardedDataParallel.summon_full_params(self.model, writeback=False)


class FSDPGradOp(FSDP):
    strategy = ShardingStrategy.SHARD_GRAD_OP


class FSDPNoShard(FSDP):
    shards = False
    strategy = ShardingStrategy.NO_SHARD


class FSDPHead(FSDP):
    """FullyShardedDataParallel around the head, inside another around the model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        inner = unwrap(model)
        inner.lm_head = super().wrap(cast(nn.Module, inner.lm_head))
        return super().wrap(model)


class FSDPFlat(FSDP):
    use_orig_params = False


NOT_UNIFORM = "Must flatten tensors with uniform `requires_grad`"
GATHERED_APART = "'weight' must be 2-D"
UNTIED = "FSDP with use_orig_params=False has untied the head"
REFUSALS = (NOT_UNIFORM, GATHERED_APART, UNTIED)
"""What errors contain with which torch refuses a wrapper for some models, or we do for it."""


class FSDPFlatHead(FSDPHead):
    use_orig_params = False

    def wrap(self, model: nn.Module) -> nn.Module:
        tied = _is_tied(model)
        wrapped = super().wrap(model)
        if tied:  # Torch says nothing, and trains two weights, for a dense head too.
            assert len(list(wrapped.parameters())) == 2
            raise ValueError(UNTIED)
        return wrapped


def _is_tied(model: nn.Module) -> bool:
    """Returns whether the head has the embedding's weight."""
    found: Any = backbone_and_lm_head(model, check=False)
    return found[0].embed_tokens.weight is getattr(found[1], "weight", None)


class FSDPFlatGradOp(FSDPGradOp):
    use_orig_params = False


class FSDPFlatNoShard(FSDPNoShard):
    use_orig_params = False


class FSDP2(Wrapped):
    """``fully_shard`` on the model alone."""

    shards = True

    def wrap(self, model: nn.Module) -> nn.Module:
        return fully_shard(model)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        cast(FSDPModule, self.model).set_requires_gradient_sync(last)
        yield


class FSDP2Head(FSDP2):
    """``fully_shard`` on every layer, on the head itself and on the model.

    A tied head needs a group with the embedding.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        found: Any = backbone_and_lm_head(model, check=False)
        backbone, head = found
        for layer in backbone.layers:
            fully_shard(layer)
        fully_shard([backbone.embed_tokens, head] if _is_tied(model) else head)
        return fully_shard(model)


class Zero(Wrapped):
    """A DeepSpeed engine."""

    stage = 1
    leaf_head = True

    def wrap(self, model: nn.Module) -> nn.Module:
        import deepspeed

        prepare_deepspeed()
        parameters = [p for p in model.parameters() if p.requires_grad]
        dtype = parameters[0].dtype
        if self.leaf_head:
            deepspeed.utils.set_z3_leaf_module(backbone_and_lm_head(model, check=False)[1], True)
        with parameters_without_text():
            engine, self.engine_optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=cast(Any, torch.optim.SGD(parameters, lr=RATE)),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": self.microbatches,
                    "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_allow_untested_optimizer": True,
                    "bf16": {"enabled": dtype is torch.bfloat16},
                    "gradient_clipping": 0.0,
                    "steps_per_print": 1000,
                },
            )
        return engine

    def make_optimizer(self) -> Any:
        return self.engine_optimizer

    @property
    def loss_factor(self) -> float:
        return float(dist.get_world_size() * self.microbatches)

    def backward(self, loss: Tensor) -> None:
        cast(Any, self.model).backward(loss)
        if not cast(Any, self.model).is_gradient_accumulation_boundary():
            cast(Any, self.model).step()  # only counts the microbatch

    def step(self) -> None:
        cast(Any, self.model).step()


class Zero2(Zero):
    stage = 2


class Zero3(Zero):
    shards = True
    stage = 3

    def whole(self) -> AbstractContextManager[Any]:
        import deepspeed

        return cast(Any, deepspeed).zero.GatheredParameters(list(self.model.parameters()))


def prepare_deepspeed() -> None:
    """Prepares DeepSpeed for ranks without a GPU and without a compiler."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_SIZE": str(dist.get_world_size())}
    available = cast(Any, deepspeed).ops.__compatible_ops__
    available.update(dict.fromkeys((name for name in available if "shm" in name), False))
    cast(Any, deepspeed).init_distributed("gloo")


@contextmanager
def parameters_without_text() -> Iterator[None]:
    """Parameters are printed without their numbers.

    DeepSpeed makes a text of all parameters, and throws it away. Each number of it is a view, and
    a view is where torch has failed there (``RARE_ERROR`` of the table).
    """
    with mock.patch.object(nn.Parameter, "__repr__", object.__repr__):
        yield


WRAPPERS: Mapping[str, type[Wrapped]] = {
    "DDP": DDP,
    "DDP, static_graph": StaticDDP,
    "DDP of the head": DDPHead,
    "DDP of the head, static_graph": StaticDDPHead,
    "FSDP FULL_SHARD": FSDP,
    "FSDP SHARD_GRAD_OP": FSDPGradOp,
    "FSDP NO_SHARD": FSDPNoShard,
    "FSDP of the head": FSDPHead,
    "FSDP of the head, flat": FSDPFlatHead,
    "FSDP FULL_SHARD, flat": FSDPFlat,
    "FSDP SHARD_GRAD_OP, flat": FSDPFlatGradOp,
    "FSDP NO_SHARD, flat": FSDPFlatNoShard,
    "FSDP2": FSDP2,
    "FSDP2 of the head": FSDP2Head,
    "ZeRO-1": Zero,
    "ZeRO-2": Zero2,
    "ZeRO-3": Zero3,
}
