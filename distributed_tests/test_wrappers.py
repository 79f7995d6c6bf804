# SPDX-License-Identifier: Apache-2.0
"""Fused heads under what shards weights and reduces gradients. ``ci/wrappers`` tests more."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

if sys.platform != "linux":
    pytest.skip("there is no DeepSpeed for this system", allow_module_level=True)

from distributed_tests.wrappers.losses import dense_logprobs, weight_of
from distributed_tests.wrappers.misuse import MISUSES, READERS, attempt, read
from distributed_tests.wrappers.model import RANKS, VOCAB, WIDTH, TinyTransformer, make_batch, make_model
from distributed_tests.wrappers.step import Cell, Step, compute, environment_kept, run_steps
from distributed_tests.wrappers.step_checks import findings
from distributed_tests.wrappers.table import Entry, judged, new_world, results, table, with_ways_out
from distributed_tests.wrappers.wrappers import (
    FSDP,
    FSDP2,
    WRAPPERS,
    FSDPFlat,
    StaticDDP,
    Zero3,
    parameters_without_text,
)
from fused_losses import backbone_and_lm_head, linear_logprobs, run_in_forward, tiled_token_logprobs
from lossgate import Layout
from lossgate.worlds import RankContext, World, make_world
from lossgate.worlds.base import RankRaised


@pytest.fixture
def world() -> World:
    return make_world("gloo", Layout(dp=RANKS), timeout=60.0)


@pytest.mark.slow
def test_every_wrapper_and_head() -> None:
    """One step of each cell of the table. ``ci/wrappers`` takes all options."""
    entries = table(full=False)
    assert not {place: entry.wrong for place, entry in entries.items() if entry.wrong}
    flat = {(wrapper, head) for wrapper in WRAPPERS if wrapper.endswith(", flat") for head in ("frozen", "LoRA")}
    tied = {(wrapper, "tied") for wrapper in ("FSDP of the head", "FSDP of the head, flat")}
    refused = {(wrapper, head) for (wrapper, head, _), entry in entries.items() if entry.refused}
    assert refused == (flat | tied) - {("FSDP of the head, flat", "frozen")}


def test_a_refusal_that_the_dense_head_does_not_share_is_wrong() -> None:
    cell = Cell("FSDP of the head", "plain", "tiled_token_logprobs")
    message = "RuntimeError: 'weight' must be 2-D"
    assert str(judged(cell, [message] * RANKS, [message] * RANKS)) == "refused: leave the head to the model's FSDP"
    working = Step({}, {}, {}, 0, logits=False, held=(1, 1, 1))
    assert judged(cell, [message] * RANKS, [working] * RANKS).wrong == (message,) * RANKS
    assert judged(cell, ["ValueError: of ours"] * RANKS, ["ValueError: of ours"] * RANKS).wrong


@pytest.mark.parametrize(
    ("way", "frames", "tries"),
    [
        ("dense", "...", 2),
        ("tiled_token_logprobs", "...", 1),
        ("tiled_token_logprobs", "  line 250, in wrap\n    deepspeed.initialize(\n  line 7, in initialize\n", 2),
    ],
)
def test_only_a_rare_error_without_a_kernel_is_tried_again(
    way: str, frames: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, made = Cell("ZeRO-3", "plain", way), count()

    def fail(steps: object) -> None:
        next(made)
        message = f"rank 0 raised RuntimeError: {cell}: {frames}\nthe tensor already had autograd metadata"
        raise RankRaised(message, 0)

    monkeypatch.setattr("distributed_tests.wrappers.table._run", fail)
    with pytest.raises(RankRaised, match="already had autograd metadata"):
        results([cell])
    assert next(made) == tries


def test_the_text_of_a_parameter_has_no_numbers() -> None:
    parameter = nn.Parameter(torch.full((2,), 7.0))
    with parameters_without_text():
        assert "7" not in repr(parameter).partition(" object at ")[0]
    assert "7., 7." in repr(parameter)


def test_a_way_out_that_does_not_work_is_wrong() -> None:
    refused, way_out = ("FSDP of the head", "tied", "tiled"), ("FSDP FULL_SHARD", "tied", "tiled")
    message = "RuntimeError: 'weight' must be 2-D"
    entry = judged(Cell(*refused[:2], "tiled_token_logprobs"), [message] * RANKS, [message] * RANKS)
    assert with_ways_out({refused: entry, way_out: Entry()})[refused] == entry
    found = with_ways_out({refused: entry, way_out: Entry(wrong=("hangs",))})
    assert found[refused].wrong == ("its way out does not work: FSDP FULL_SHARD, tied, tiled",)


def _call_the_model_first(context: RankContext) -> float:
    """Returns how much the gradients of a tiled and a dense head differ."""
    gradients = []
    for logprobs in (lambda *given: tiled_token_logprobs(*given).logprobs, dense_logprobs):

        def loss(model: nn.Module, ids: Tensor, logprobs: Callable[..., Tensor] = logprobs) -> Tensor:
            backbone, lm_head = backbone_and_lm_head(model)
            first = model(ids)[..., 0].sum()
            return first + logprobs(lm_head, backbone(ids).flatten(0, 1), ids.flatten()).sum()

        wrapped = FSDP2(make_model("plain"), 1)
        run_in_forward(wrapped.model, loss, make_batch(context.rank, 0).ids).backward()
        gradients.append([parameter.grad.full_tensor() for parameter in wrapped.model.parameters()])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
def test_a_function_may_call_the_model_in_whose_forward_it_runs(world: World) -> None:
    assert max(world.run(_call_the_model_first)) < 1e-5


@pytest.mark.slow
def test_options_of_a_step() -> None:
    plain = [Cell(wrapper, "plain", "tiled_token_logprobs") for wrapper in ("DDP, static_graph", "FSDP2", "ZeRO-3")]
    options = [{"microbatches": 2}, {"checkpointing": True}, {"empty": True}, {"dtype": "bfloat16"}]
    found = results([replace(cell, **option) for cell in plain for option in options])
    assert not {str(cell): entry for cell, entry in found.items() if str(entry) != "works"}


BUGS = [
    ("gradients bypass autograd", "DDP", "plain", "lm_head.weight: ranks have different weights after the step"),
    ("gradients bypass autograd", "DDP, static_graph", "plain", "lm_head.weight: ranks have different weights"),
    ("gradients bypass autograd", "FSDP FULL_SHARD", "plain", "lm_head.weight: 0 times the reference"),
    (
        "the reducer sees the first tile alone",
        "DDP",
        "plain",
        "lm_head.weight: 0[.][34][0-9]+ times the reference",
    ),  # a mean over noise
    ("the reducer sees the first tile alone", "FSDP NO_SHARD", "plain", "2 collectives, and 1 with the dense head"),
    ("the adapters' gradients are dropped", "DDP", "LoRA", "lm_head.lora_A.default.weight: 0 times the reference"),
    ("the adapters' gradients are dropped", "FSDP2", "LoRA", "lm_head.lora_B.default.weight: 0 times the reference"),
    ("the head's wrapper is not called", "DDP of the head", "plain", "lm_head.weight: ranks have different weights"),
    ("the dense head's wrapper is not called", "DDP of the head", "plain", "ranks have different weights"),
    ("weights are gathered in every tile", "FSDP2 of the head", "plain", "collectives, and 11 with the dense head"),
]


@pytest.mark.slow
def test_planted_bugs_are_seen(world: World) -> None:
    for bug, wrapper, head, expected in BUGS:
        cell = Cell(wrapper, head, bug)
        dense, steps = zip(*world.run(partial(run_steps, [cell.dense(), cell])), strict=True)
        found = findings(cell, steps, dense)
        assert any(re.search(expected, text) for text in found), (bug, wrapper, found)


@pytest.mark.slow
def test_the_checks_see_logits_and_weights_that_are_not_sharded(world: World) -> None:
    cell = Cell("FSDP2", "plain", "dense")
    (steps,) = zip(*world.run(partial(run_steps, [cell])), strict=True)
    assert findings(cell, steps, steps) == ["a tensor of [tokens, vocab] was made"]
    before, _, whole = steps[0].held
    fewer = [replace(step, logits=False) for step in steps]
    kept: list[Step] = [replace(step, held=(before, whole, whole)) for step in fewer]
    assert not findings(cell, fewer, steps)
    assert findings(cell, [replace(step, numbers={}) for step in fewer], steps)[0].startswith("rank 0: not in both: ")
    assert findings(cell, kept, steps) == [
        text
        for rank in range(RANKS)
        for text in (
            f"rank {rank}: held {before} numbers of the weights before the step, and {whole} after it",
            f"rank {rank}: holds {whole} of {whole} numbers of the weights",
        )
    ]


@pytest.mark.slow
def test_calls_outside_of_the_forward_are_refused_before_any_collective() -> None:
    """The table shows that the way out of each works: ``run_in_forward``, or to wrap the head."""
    with new_world() as world:
        found = world.run(partial(attempt, MISUSES))
    for misuse, *by_rank in zip(MISUSES, *found, strict=True):
        for message, collectives in by_rank:
            assert re.search(misuse.message, message), (misuse, message)
            assert not collectives, misuse


@pytest.mark.slow
def test_gathered_weights_can_be_read_without_gradients() -> None:
    with new_world() as world:
        for wrapper in READERS:
            for errors in world.run(partial(read, wrapper)):
                assert max(errors.values()) < 1e-5, (wrapper, errors)


def _read_a_head_with_a_norm(context: RankContext) -> float:
    model = make_model("plain")
    model.lm_head = nn.Sequential(nn.RMSNorm(WIDTH), model.lm_head)
    hidden, labels = torch.ones(5, WIDTH), torch.arange(5)
    expected = dense_logprobs(model.lm_head, hidden, labels)
    wrapped = FSDP(model, 1)
    with wrapped.whole(), torch.no_grad():
        head = backbone_and_lm_head(wrapped.model)[1]
        return float((tiled_token_logprobs(head, hidden, labels).logprobs - expected).abs().max())


@pytest.mark.slow
def test_a_vector_of_a_gathered_head_is_taken_for_no_piece(world: World) -> None:
    assert max(world.run(_read_a_head_with_a_norm)) < 1e-5


def _no_sync_first(context: RankContext) -> str:
    """Returns with what error torch ends a backward under no_sync before any synchronised one."""
    wrapped = StaticDDP(make_model("plain"), 1)
    batch = make_batch(context.rank, 0)
    tokens = len(batch.labels)
    try:
        with wrapped.microbatch(last=False):
            wrapped.backward(compute(wrapped, "dense", batch, tokens)[0])
        wrapped.backward(compute(wrapped, "dense", batch, tokens)[0])
    except RuntimeError as error:
        return str(error)
    return ""


def _leaf_twice(context: RankContext) -> str:
    """Returns with what error DeepSpeed ends a backward through two calls of a leaf module."""
    with environment_kept():
        wrapped = Zero3(make_model("LoRA"), 1)

        def loss(model: nn.Module, ids: Tensor) -> Tensor:
            backbone, lm_head = backbone_and_lm_head(model)
            hidden = backbone(ids)
            return (lm_head(hidden) + lm_head(hidden)).sum()

        try:
            wrapped.backward(run_in_forward(wrapped.model, loss, make_batch(context.rank, 0).ids))
        except AssertionError:
            return "AssertionError"
    return ""


@pytest.mark.slow
def test_limits_of_torch_and_deepspeed_that_the_docs_name(world: World) -> None:
    """They hold for a dense head. Should one be gone, the docs can say less."""
    for message in world.run(_no_sync_first):
        assert "expect_autograd_hooks_" in message
    with new_world() as another:
        assert another.run(_leaf_twice) == ["AssertionError"] * RANKS


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("options", "whole"),
    [({}, True), ({"use_rslora": True}, True), ({"use_dora": True}, False), ({"lora_bias": True}, False)],
    ids=["LoRA", "rsLoRA", "DoRA", "lora_bias"],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_adapters_and_the_whole_weight_of_the_docs(options: dict[str, bool], whole: bool) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(TinyTransformer(), LoraConfig(r=2, target_modules=["lm_head"], **options))
    _, head = backbone_and_lm_head(model)
    for parameter in head.parameters():
        parameter.data.normal_()
    hidden, labels = torch.randn(5, WIDTH), torch.randint(VOCAB, (5,))
    expected = dense_logprobs(head, hidden, labels)
    torch.testing.assert_close(tiled_token_logprobs(head, hidden, labels, tiles=2).logprobs, expected)
    found = linear_logprobs(hidden, weight_of(head), labels).logprobs
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) == whole


def _train_inside_summon(context: RankContext) -> list[bool]:
    """Returns whether training inside ``summon_full_params`` reaches FSDP's flat parameter."""
    reached = []
    hidden, labels = torch.ones(5, WIDTH), torch.arange(5)
    for logprobs in (dense_logprobs, lambda head, h, y: linear_logprobs(h, head.weight, y).logprobs):
        wrapped = FSDPFlat(make_model("plain"), 1)
        with FullyShardedDataParallel.summon_full_params(wrapped.model):
            logprobs(backbone_and_lm_head(wrapped.model)[1], hidden, labels).sum().backward()
        reached.append(any(parameter.grad is not None for parameter in wrapped.model.parameters()))
    return reached


def test_training_inside_summon_full_params_is_lost_for_a_dense_head_too(world: World) -> None:
    """Nothing tells such a parameter from an ordinary one. docs/reference/kernels.md says so."""
    assert world.run(_train_inside_summon) == [[False, False]] * RANKS


def _tensor_parallel(context: RankContext) -> float:
    """Follows the message about DTensors: to_local, vocab_start and tp_group."""
    torch.manual_seed(0)
    whole, hidden, labels = torch.randn(10, 4), torch.randn(6, 4), torch.randint(10, (6,))
    weight = nn.Parameter(distribute_tensor(whole, context.mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"weight is a DTensor.* with weight.to_local\(\), vocab_start"):
        linear_logprobs(hidden, weight, labels)
    group = context.mesh.get_group("tp")
    given = {"vocab_start": 5 * dist.get_rank(group), "tp_group": group}
    linear_logprobs(hidden, weight.to_local(), labels, **given).logprobs.sum().backward()
    whole.requires_grad_()
    torch.log_softmax(hidden @ whole.T, 1).gather(1, labels[:, None]).sum().backward()
    assert weight.grad is not None
    assert whole.grad is not None
    return float((weight.grad.full_tensor() - whole.grad).abs().max())


def test_a_dtensor_is_refused_and_its_way_out_works() -> None:
    assert max(make_world("gloo", Layout(tp=2)).run(_tensor_parallel)) < 1e-5
