# SPDX-License-Identifier: Apache-2.0
"""Tests of the clipped policy gradient against its reference, in float64.

They cover every KL option with log-probabilities that top-k or top-p filtering has set to -inf
beside those without filtering, and NeMo-RL's local normaliser, by which no candidate is judged.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_losses import clipped_pg
from fused_losses import clipped_pg_loss
from lossgate.losses.clipped_pg import ClippedPgOptions
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.loss_inputs import GSPO, TRUNCATED, experience

MakeWorld = Callable[..., SimulatedWorld]
Outcome = tuple[Tensor, dict[str, Tensor], tuple[Tensor, Tensor]]

FILTERED, FILTERED_BEFORE = torch.tensor([1, 3, 8]), torch.tensor([3, 6])
"""Tokens whose label is filtered out by the policy, and by the policy before the update.

They count. Token 3 is both.
"""

KL = {
    "k1": {"reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_type": "k2"},
    "k3": {},
    "k3, clamped input": {"kl_input_clamp_value": 0.3},
    "k2, clamped output": {"reference_policy_kl_type": "k2", "kl_output_clamp_value": 0.05},
    "k1, no clamps": {"reference_policy_kl_type": "k1", "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "k3, on-policy approximation": {"use_on_policy_kl_approximation": True},
    "k1, on-policy approximation": {"reference_policy_kl_type": "k1", "use_on_policy_kl_approximation": True},
    "no penalty": {"reference_policy_kl_penalty": 0.0},
    "in reward": {"use_kl_in_reward": True},
}
POLICY: dict[str, dict[str, Any]] = {
    "ppo": {},
    "of sequences": {"token_level_loss": False},
    "gspo, icepop": GSPO | TRUNCATED,
    "seq-mask-tis": TRUNCATED | {"truncated_importance_sampling_type": "seq-mask-tis"},
    "tis": TRUNCATED | {"truncated_importance_sampling_type": "tis", "epsilon": 1e-8},
    "cispo": {"use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "on-policy": {"force_on_policy_ratio": True},
    "positive examples": {"positive_example_nll_weight": 0.3},
    "dual clip": {"ratio_clip_c": 1.1},
}
with_kl = pytest.mark.parametrize("kl", KL.values(), ids=KL)
with_policy = pytest.mark.parametrize("policy", POLICY.values(), ids=POLICY)


def filtered(**options: Any) -> dict[str, Any]:
    """Returns the arguments of a loss under filtering; both log-probabilities are leaves."""
    given = experience(**{"reference_policy_kl_penalty": 0.5, **options})
    c, p = given["logprobs"].detach(), given["prev_logprobs"]
    # Filtering leaves fewer labels to share the probability, so that of one that is left is larger.
    return given | {
        "logprobs": (c / 2).index_fill(0, FILTERED, -inf).requires_grad_(),
        "unfiltered_logprobs": c.clone().requires_grad_(),
        "prev_logprobs": p.index_fill(0, FILTERED_BEFORE, -inf),
        "rewards": given["rewards"].double(),
    }


def kernel(given: dict[str, Any], **changes: Any) -> Outcome:
    loss, metrics = clipped_pg_loss(**{**given, **changes})
    return loss, metrics, _gradients(loss, given)


def reference(given: dict[str, Any]) -> Outcome:
    rest = {name: x for name, x in given.items() if name != "config"}
    counts = {name: torch.tensor(given[name]) for name in ("valid_tokens", "valid_sequences", "positive_tokens")}
    options = {name: x for name, x in vars(given["config"]).items() if name != "filtered_tokens"}
    loss, metrics = clipped_pg(**{**rest, **counts}, options=ClippedPgOptions(**options))
    del metrics["loss"]  # the loss itself
    return loss, metrics, _gradients(loss, given)


def _gradients(loss: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns those of filtered and of unfiltered log-probabilities."""
    leaves = given["logprobs"], given["unfiltered_logprobs"]
    a, b = torch.autograd.grad(loss, leaves, allow_unused=True)
    return (*(torch.zeros(12, dtype=torch.float64) if x is None else x for x in (a, b)),)  # type: ignore[return-value]


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@with_kl
@with_policy
def test_filtered_and_unfiltered_logprobs(kl: dict[str, Any], policy: dict[str, Any]) -> None:
    """The penalty is that of the whole distribution, the policy loss that of the filtered one."""
    given = filtered(**kl, **policy)
    found = kernel(given)
    assert all(x.isfinite().all() for x in (found[0], *found[1].values(), *found[2]))
    assert_equal(found, reference(given))


@with_kl
def test_the_penalty_is_not_that_of_filtered_logprobs(kl: dict[str, Any]) -> None:
    """A kernel that ignored ``unfiltered_logprobs`` fails here."""
    given = filtered(**kl)
    loss, metrics, (_, of_unfiltered) = kernel(given)
    ignored = clipped_pg_loss(**{**given, "unfiltered_logprobs": None})
    penalised = given["config"].has_kl
    assert bool(loss != ignored[0]) == penalised
    assert bool(metrics["kl_penalty"] != ignored[1]["kl_penalty"]) == penalised
    assert bool(of_unfiltered.any()) == penalised
    assert all(torch.equal(x, ignored[1][name]) for name, x in metrics.items() if name != "kl_penalty")


def test_filtered_tokens_have_a_penalty_and_no_policy_loss() -> None:
    _, _, (of_filtered, of_unfiltered) = kernel(filtered())
    assert not of_filtered[FILTERED].any()
    assert of_unfiltered[FILTERED].all()
    assert not of_filtered[FILTERED_BEFORE].any()


@pytest.mark.parametrize("policy", [{}, GSPO | TRUNCATED], ids=["ppo", "gspo"])
def test_filtered_tokens_are_as_masked_ones_without_unfiltered_logprobs(policy: dict[str, Any]) -> None:
    """But for what is computed of the other policies alone: metrics, and weights of sequences."""
    given = filtered(**policy)
    given["prev_logprobs"] = experience()["prev_logprobs"].index_fill(0, FILTERED, -inf)
    masked = given["mask"].index_fill(0, FILTERED, False)
    found = kernel(given, unfiltered_logprobs=None)
    expected = kernel(given | {"mask": masked}, unfiltered_logprobs=None)
    assert_equal(found, expected)


# The normaliser of the NLL of positive examples

LOCAL: dict[str, Any] = {"positive_example_nll_weight": 0.3, "positive_nll_normaliser": "local"}


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.5}, {"token_level_loss": False}, GSPO], ids=str)
def test_the_local_normaliser(options: dict[str, Any]) -> None:
    """It counts the tokens of this call that filtering leaves, and not ``positive_tokens``."""
    given = filtered(**LOCAL, **options) | {"positive_tokens": 100}
    found = kernel(given)
    assert_equal(found, reference(given))
    assert_equal(kernel(given, positive_tokens=None), found)
    assert found[0] != kernel(filtered(**{**LOCAL, **options, "positive_nll_normaliser": "global"}))[0]


def test_the_local_normaliser_without_positive_examples() -> None:
    given = experience(**LOCAL) | {"rewards": torch.zeros(4)}
    assert clipped_pg_loss(**given)[1]["positive_nll_loss"] == 0


def test_the_local_normaliser_counts_whole_sequences_over_ranks(make_world: MakeWorld) -> None:
    """NeMo-RL counts after it has gathered the tokens of a microbatch over cp."""
    whole = filtered(**LOCAL)

    def body(context: RankContext) -> tuple[Tensor, Tensor]:
        own = {
            name: x.detach()[context.rank :: 2] if isinstance(x, Tensor) and len(x) == 12 else x
            for name, x in whole.items()
        }
        leaf = own["logprobs"].requires_grad_()
        loss, metrics = clipped_pg_loss(**{**own, "logprobs": leaf}, cp_group=context.mesh.get_group("cp"))
        return metrics["positive_nll_loss"], torch.autograd.grad(loss, leaf)[0]

    world = make_world("cp=2")
    parts, gradients = zip(*world.run(body), strict=True)
    _, metrics, (gradient, _) = reference(whole)
    assert_equal(sum(parts), metrics["positive_nll_loss"])
    assert_equal(torch.stack(gradients, 1).flatten(), gradient)
    sent = [logged.shown.split(" -> ")[0] for logged in world.log if logged.rank == 0]
    assert sent == ["SUM, [float64[5, 4]]"]


def test_losses_of_parts_do_not_add_up_with_the_local_normaliser() -> None:
    """That is what NeMo-RL computes, and why the default is another."""
    given = experience(**LOCAL, reference_policy_kl_penalty=0.0)
    parts = [clipped_pg_loss(**{**given, "sample_mask": torch.arange(4) == i})[0] for i in range(4)]
    assert torch.stack(parts).sum() - clipped_pg_loss(**given)[0] > 0.01
