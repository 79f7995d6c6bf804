# SPDX-License-Identifier: Apache-2.0
"""State of the process and its threads: each rank has its own, and no task leaves it changed."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from lossgate.worlds import RankContext
from lossgate.worlds.base import Deadlock, Hang, RankRaised, StateLeak
from lossgate.worlds.process_state import ProcessState

from .on_ranks import MakeWorld, failure_of

_never_left: list[Any] = []


def enter_inference_mode() -> None:
    mode = torch.inference_mode()
    mode.__enter__()
    _never_left.append(mode)


CUBLAS: Any = torch.backends.cuda.matmul
MKLDNN: Any = torch.backends.mkldnn
CHANGES: dict[str, Callable[[], Any]] = {
    # What the message says: how to bring it about.
    "torch.get_default_dtype() at torch.float64 (it was torch.float32)": lambda: torch.set_default_dtype(torch.float64),
    "torch.are_deterministic_algorithms_enabled() at True (it was False)": lambda: torch.use_deterministic_algorithms(
        True
    ),
    "torch.is_deterministic_algorithms_warn_only_enabled() at True": lambda: torch.use_deterministic_algorithms(
        False, warn_only=True
    ),
    "torch.get_float32_matmul_precision() at 'high' (it was 'highest')": lambda: torch.set_float32_matmul_precision(
        "high"
    ),
    "torch.get_float32_matmul_precision() at MixedPrecision(": lambda: setattr(MKLDNN.matmul, "fp32_precision", "bf16"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction at (False, True)": lambda: setattr(
        CUBLAS, "allow_bf16_reduced_precision_reduction", False
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction at (False, True)": lambda: setattr(
        CUBLAS, "allow_fp16_reduced_precision_reduction", False
    ),
    "torch.backends.cudnn.allow_tf32 at False (it was True)": lambda: setattr(
        torch.backends.cudnn, "allow_tf32", False
    ),
    "torch.backends.cudnn.enabled at False (it was True)": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "torch.backends.cudnn.benchmark at True (it was False)": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cudnn.deterministic at True (it was False)": lambda: setattr(
        torch.backends.cudnn, "deterministic", True
    ),
    "torch.backends.mkldnn.enabled at False (it was True)": lambda: setattr(MKLDNN, "enabled", False),
    "torch.is_inference_mode_enabled() at True (it was False)": enter_inference_mode,
    "torch.is_grad_enabled() at False (it was True)": lambda: torch.set_grad_enabled(False),
    "torch.is_autocast_enabled('cpu') at True (it was False)": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.get_autocast_dtype('cpu') at torch.float16": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "torch.is_autocast_enabled('cuda') at True (it was False)": lambda: torch.set_autocast_enabled("cuda", True),
    "torch.get_autocast_dtype('cuda') at torch.bfloat16": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "torch.is_autocast_cache_enabled() at False (it was True)": lambda: torch.set_autocast_cache_enabled(False),
    "torch.get_default_device() at device(type='meta') (it was None)": lambda: torch.set_default_device("meta"),
    "torch.get_num_threads() at 3": lambda: torch.set_num_threads(3),
    "torch.autograd.set_multithreading_enabled at True": lambda: torch.autograd.set_multithreading_enabled(True),
    "os.environ.get('LOSSGATE_TEST') at 'new' (it was None)": lambda: os.environ.update(LOSSGATE_TEST="new"),
    "os.environ.get('LOSSGATE_OLD') at 'new' (it was 'old')": lambda: os.environ.update(LOSSGATE_OLD="new"),
    "os.environ.get('LOSSGATE_OLD') at None (it was 'old')": lambda: os.environ.pop("LOSSGATE_OLD"),
}


@pytest.mark.parametrize("left", CHANGES)
def test_what_a_rank_leaves_changed_is_reported_and_restored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setenv("LOSSGATE_OLD", "old")
    world, before = make_world("tp=2"), ProcessState.capture()

    def body(context: RankContext) -> None:
        if context.rank == 1:
            CHANGES[left]()

    def words(context: RankContext, states: dict[int, ProcessState]) -> list[str]:
        if context.rank in states:
            return states[context.rank].changes()
        states[context.rank] = ProcessState.capture()
        return []

    in_ranks = partial(words, states={})
    world.run(in_ranks)
    message = failure_of(world, body, StateLeak)
    assert message.startswith("rank 1 left ")
    assert left in message
    assert message.endswith(
        "; restore it before the kernel returns, by a context manager or try ... finally, "
        "or set it where the kernel's module is imported"
    )
    assert before.changes() == []
    assert world.run(in_ranks) == [[], []]


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_ranks_see_only_their_own_changes(make_world: MakeWorld) -> None:
    def dtypes(context: RankContext) -> list[torch.dtype]:
        found: list[torch.dtype] = []
        if context.rank == 0:
            with float64():
                dist.barrier()
                found.append(torch.ones(1).dtype)
                dist.barrier()
                found.append(torch.ones(1).dtype)
        else:
            for _ in range(2):
                dist.barrier()
                found.append(torch.ones(1).dtype)
        return [*found, torch.ones(1).dtype]

    assert make_world("tp=2").run(dtypes) == [[torch.float64] * 2 + [torch.float32], [torch.float32] * 3]


def test_what_is_changed_for_a_while_is_no_leak(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        with (
            float64(),
            torch.no_grad(),
            torch.autocast("cpu"),
            torch.device("meta"),
            torch.inference_mode(),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("LOSSGATE_TEST", str(context.rank))
            dist.barrier()
            assert os.environ["LOSSGATE_TEST"] == str(context.rank)
        torch.set_float32_matmul_precision(precision)

    make_world("tp=2").run(body)


def test_random_numbers_of_a_rank_are_its_own_and_end_with_the_run(make_world: MakeWorld) -> None:
    world, state, of_python = make_world("tp=2"), torch.get_rng_state(), random.getstate()

    def draw(context: RankContext) -> list[float]:
        first = torch.rand(1).item()
        dist.barrier()
        if context.rank == 1:
            torch.manual_seed(5)
            random.random()
        dist.barrier()
        return [first, torch.rand(1).item()]

    expected = torch.rand(2).tolist()
    torch.set_rng_state(state)
    other = torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    for _ in range(2):
        assert world.run(draw) == [expected, [expected[0], other]]
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == of_python


def test_each_rank_has_its_own_loss_parallel(make_world: MakeWorld) -> None:
    """The context adds functions to a dict of the process, and takes them out of it at its end."""

    def body(context: RankContext, *, fails: bool = False) -> Tensor:
        shape, own = torch.Size((3, 6)), torch.arange(9.0).view(3, 3) * (context.rank + 1)
        own.requires_grad_()
        logits = DTensor.from_local(own, context.mesh["tp"], [Shard(1)], run_check=False, shape=shape, stride=(6, 1))
        with loss_parallel():
            whole: Any = cross_entropy(logits, torch.tensor([0, 3, 5]))
            loss: Tensor = whole.to_local()
            if fails and context.rank == 1:
                raise ValueError
            loss.backward()
        dist.barrier()
        assert own.grad is not None
        return torch.cat((loss.detach()[None], own.grad.flatten()))

    world, before = make_world("tp=2"), dict(DTensor._op_dispatcher._custom_op_handlers)
    whole = torch.cat((torch.arange(9.0).view(3, 3), torch.arange(9.0).view(3, 3) * 2), 1).requires_grad_()
    loss = cross_entropy(whole, torch.tensor([0, 3, 5]))
    loss.backward()
    assert whole.grad is not None
    expected = [torch.cat((loss.detach()[None], part.flatten())) for part in whole.grad.chunk(2, 1)]
    for _ in range(2):
        torch.testing.assert_close(world.run(body), expected)
        failure_of(world, partial(body, fails=True), RankRaised)
        assert DTensor._op_dispatcher._custom_op_handlers == before


def test_another_failure_wins_over_a_leak(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        torch.set_default_dtype(torch.float64)
        if context.rank == 1:
            dist.barrier()

    assert "rank 0: has returned" in failure_of(make_world("tp=2"), body, Deadlock)
    assert torch.get_default_dtype() is torch.float32


def test_a_rank_that_raises_leaves_nothing(make_world: MakeWorld) -> None:
    world = make_world("tp=2")

    def body(context: RankContext) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        dist.barrier()
        raise ValueError

    failure_of(world, body, RankRaised)
    assert torch.get_default_dtype() is torch.float32
    assert world.run(lambda _: torch.is_grad_enabled()) == [True, True]


def test_a_rank_that_hangs_leaves_nothing(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        torch.set_default_dtype(torch.float64)
        time.sleep(2.5)

    with pytest.raises(Hang):
        make_world("single", timeout=0.5).run(body)
    assert torch.get_default_dtype() is torch.float32
    torch.manual_seed(0)
    time.sleep(2)  # the rank's thread goes on and ends
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())


def test_what_compilers_add_to_the_environment_stays(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    def body(context: RankContext) -> str:
        if context.rank == 0:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = "here"
        dist.barrier()
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    assert make_world("tp=2").run(body) == ["here", "here"]
