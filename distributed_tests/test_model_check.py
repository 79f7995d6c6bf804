# SPDX-License-Identifier: Apache-2.0
"""``backbone_and_lm_head`` runs models whose weights are sharded, when it is asked to."""

import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

if sys.platform != "linux":
    pytest.skip("there is no DeepSpeed for this system", allow_module_level=True)

from distributed_tests.wrappers.model import RANKS, TinyTransformer, make_batch
from distributed_tests.wrappers.step import compute, environment_kept
from distributed_tests.wrappers.wrappers import WRAPPERS
from fused_losses import backbone_and_lm_head
from lossgate import Layout
from lossgate.worlds import RankContext, make_world


class Scaled(TinyTransformer):
    """Does something after its head."""

    def forward(self, ids: Tensor) -> Tensor:
        return 0.5 * super().forward(ids)


def _made(kind: type[TinyTransformer]) -> TinyTransformer:
    torch.manual_seed(0)
    return kind()


def _messages(wrapper: str, context: RankContext) -> tuple[str, str, str, bool]:
    """Returns what is said of an unchecked model, of a scaled one, and of a right one.

    And whether the right one still trains as one that was checked before it was wrapped.
    """
    with environment_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right, scaled = (WRAPPERS[wrapper](_made(kind), 1) for kind in (TinyTransformer, Scaled))
        with warnings.catch_warnings(record=True) as unchecked:
            warnings.simplefilter("always")
            backbone_and_lm_head(right.model)
        refused = ""
        try:
            backbone_and_lm_head(scaled.model, check=True)
        except ValueError as error:
            refused = str(error)
        backbone_and_lm_head(right.model, check=True)
        with warnings.catch_warnings(record=True) as afterwards:
            warnings.simplefilter("always")
            backbone_and_lm_head(right.model)
        model = _made(TinyTransformer)
        backbone_and_lm_head(model)
        weights = []
        for wrapped in (right, WRAPPERS[wrapper](model, 1)):
            batch = make_batch(context.rank, 0)
            with wrapped.microbatch(last=True):
                loss = compute(wrapped, "tiled_token_logprobs", batch, 100)[0]
                wrapped.backward(loss * wrapped.loss_factor)
            wrapped.step()
            weights.append(wrapped.weights())
        same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
        return (
            " ".join(str(one.message) for one in unchecked),
            refused,
            " ".join(str(one.message) for one in afterwards if "not checked" in str(one.message)),
            same,
        )


@pytest.mark.parametrize(
    "wrapper",
    ["FSDP FULL_SHARD", "FSDP FULL_SHARD, flat", "FSDP of the head", "FSDP2", "FSDP2 of the head", "ZeRO-3"],
)
def test_sharded_models_run_when_asked(wrapper: str) -> None:
    world = make_world("gloo", Layout(dp=RANKS), timeout=60.0)
    for unchecked, refused, afterwards, same in world.run(partial(_messages, wrapper)):
        assert "not checked that its logits are those of its lm-head alone, since its weights are sharded" in unchecked
        assert "or with check=True on every rank" in unchecked
        assert "Scaled: its forward changes the logits of its lm-head" in refused
        assert not afterwards
        assert same


def _runs_alone(wrapper: str, context: RankContext) -> str:
    with environment_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = WRAPPERS[wrapper](_made(Scaled), 1).model
        try:
            return str(backbone_and_lm_head(model)) if context.rank == 0 else "changes the logits"
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("wrapper", ["DDP", "ZeRO-2"])
def test_models_with_whole_weights_run_on_one_rank_alone(wrapper: str) -> None:
    world = make_world("gloo", Layout(dp=RANKS), timeout=60.0)
    assert all("changes the logits" in message for message in world.run(partial(_runs_alone, wrapper)))
