# SPDX-License-Identifier: Apache-2.0
"""Tests of the references of ``dpo`` and ``preference``.

The methods are closed forms, mpmath in loops, hand computation and properties.
"""

import math
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from dense_losses.preference import align_reference, dpo, preference
from lossgate.losses.dpo import DpoOptions

LENGTHS = (3, 2, 4, 3, 2, 5, 3, 2)
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
TOKENS_OF = [[t for t, i in enumerate(SEQUENCE.tolist()) if i == number] for number in range(len(LENGTHS))]
# Sequence 4 has no trained token.
# fmt: off
MASK = torch.tensor([1, 1, 0,  1, 0,  0, 1, 1, 0,  1, 1, 0,  0, 0,  1, 1, 0, 1, 0,  1, 1, 0,  1, 0]).bool()
# fmt: on
SAMPLE_MASK = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]).bool()  # pair 3 is dropped

OPTIONS = {
    "dpo": DpoOptions(),
    "beta 0": DpoOptions(reference_policy_kl_penalty=0.0),
    "means": DpoOptions(reference_policy_kl_penalty=0.7, preference_average_log_probs=True),
    "ipo": DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.2),
    "ipo of means": DpoOptions(loss_type="ipo", preference_average_log_probs=True),
    "weights": DpoOptions(sft_loss_weight=0.3, preference_loss_weight=1.7, reference_policy_kl_penalty=0.5),
    "sft of means": DpoOptions(sft_loss_weight=1.0, sft_average_log_probs=True),
    "sft alone": DpoOptions(preference_loss_weight=0.0, sft_loss_weight=1.0),
    "token layout": DpoOptions(reference_layout="token", reference_policy_kl_penalty=0.5),
    "rolled layout": DpoOptions(reference_layout="rolled", reference_policy_kl_penalty=0.5),
    "epsilon": DpoOptions(epsilon=0.25, sft_loss_weight=0.5),
}
REWARDS = torch.tensor([2.0, 1.0, -1.0, 3.0, 0.5, 0.5], dtype=torch.float64)
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
METRICS = {
    "loss",
    "sft_loss",
    "preference_loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "num_valid_samples",
}


def example(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference = -3 * torch.rand(2, len(SEQUENCE), generator=generator, dtype=torch.float64)
    valid_sequences = SAMPLE_MASK.sum() + 4  # four more are on other ranks
    return {
        "logprobs": logprobs,
        "reference_logprobs": reference,
        "mask": MASK,
        "sequence": SEQUENCE,
        "sample_mask": SAMPLE_MASK,
        "valid_sequences": valid_sequences,
    }


def with_gradient(e: dict[str, Tensor], options: DpoOptions) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logprobs = e["logprobs"].clone().requires_grad_()
    loss, metrics = dpo(**{**e, "logprobs": logprobs}, options=options)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, metrics


def close(a: Any, b: Any) -> bool:
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-13, atol=1e-14)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)


def one_pair(chosen: float, rejected: float) -> dict[str, Tensor]:
    """Makes a pair with one trained token in each sequence, with these log-ratios."""
    return {
        "logprobs": torch.tensor([chosen - 1, 0, rejected - 2, 0], dtype=torch.float64),
        "reference_logprobs": torch.tensor([-1, 0, -2, 0], dtype=torch.float64),
        "mask": torch.tensor([True, False, True, False]),
        "sequence": torch.tensor([0, 0, 1, 1]),
        "sample_mask": torch.tensor([True, True]),
        "valid_sequences": torch.tensor(2),
    }


def in_layout(next_aligned: Tensor, layout: str, garbage: float = math.nan) -> Tensor:
    """Lays values out sequence by sequence, with garbage where the layout has no value."""
    values: list[float] = []
    for tokens in TOKENS_OF:
        row = next_aligned[tokens].tolist()
        values += {"next": row, "token": [garbage, *row[:-1]], "rolled": [*row[:-1], garbage]}[layout]
    return torch.tensor(values, dtype=torch.float64)


# Gradients


@with_options
def test_gradients_by_a_closed_form(options: DpoOptions) -> None:
    """The gradient of a token is +-L'(margin) m_t g_p / pairs, minus the SFT term if it is chosen.

    For means it is divided by the number of trained tokens of the sequence.
    """
    e = example()
    beta, pairs = options.reference_policy_kl_penalty, float(e["valid_sequences"]) / 2 + options.epsilon
    ratio = (e["logprobs"] - align_reference(e["reference_logprobs"], SEQUENCE, options.reference_layout)).masked_fill(
        ~MASK, 0
    )
    counts = [max(1, int(MASK[tokens].sum())) for tokens in TOKENS_OF]
    rewards = [
        float(ratio[TOKENS_OF[i]].sum()) / (counts[i] if options.preference_average_log_probs else 1)
        for i in range(len(LENGTHS))
    ]
    derived = torch.zeros_like(ratio)
    for t, i in enumerate(SEQUENCE.tolist()):
        if not MASK[t] or not SAMPLE_MASK[i - i % 2]:
            continue
        margin = rewards[i - i % 2] - rewards[i - i % 2 + 1]
        slope = 2 * (margin - 0.5 / beta) if options.loss_type == "ipo" else -beta / (1 + math.exp(beta * margin))
        sign = -1 if i % 2 else 1
        derived[t] = (
            options.preference_loss_weight
            * sign
            * slope
            / pairs
            / (counts[i] if options.preference_average_log_probs else 1)
        )
        if sign == 1:
            derived[t] -= options.sft_loss_weight / pairs / (counts[i] if options.sft_average_log_probs else 1)
    assert bool(derived.any()) == (beta > 0)
    assert close(with_gradient(e, options)[1], derived)


@pytest.mark.parametrize("chosen", [800.0, -800.0])
def test_a_large_margin_saturates(chosen: float) -> None:
    """-log sigmoid(x) is 0 or -x where a quotient of exponentials would overflow."""
    loss, gradient, _ = with_gradient(one_pair(chosen, 0.0), DpoOptions(reference_policy_kl_penalty=1.0))
    assert loss == max(0.0, -chosen)
    assert gradient.tolist() == ([0, 0, 0, 0] if chosen > 0 else [-1, 0, 1, 0])


# Values


@with_options
def test_values_by_mpmath(options: DpoOptions) -> None:
    """Computes everything token by token in thirty digits, with the reference in its layout."""
    e = example()
    next_aligned = e["reference_logprobs"]
    e["reference_logprobs"] = in_layout(next_aligned, options.reference_layout)
    with mpmath.workdps(30):
        rewards, nlls = [], []
        for i in range(len(LENGTHS)):
            reward, nll, count = mpmath.mpf(0), mpmath.mpf(0), 0
            for t in range(len(SEQUENCE)):
                if SEQUENCE[t] == i and MASK[t]:
                    reward += mpmath.mpf(float(e["logprobs"][t])) - mpmath.mpf(float(next_aligned[t]))
                    nll -= mpmath.mpf(float(e["logprobs"][t]))
                    count += 1
            rewards.append(reward / max(count, 1) if options.preference_average_log_probs else reward)
            nlls.append(nll / max(count, 1) if options.sft_average_log_probs else nll)
        pairs = mpmath.mpf(int(e["valid_sequences"])) / 2 + options.epsilon
        beta = mpmath.mpf(options.reference_policy_kl_penalty)
        sums = dict.fromkeys(METRICS, mpmath.mpf(0))
        for c, r, nll, valid in zip(rewards[::2], rewards[1::2], nlls[::2], SAMPLE_MASK[::2].tolist(), strict=True):
            if not valid:
                continue
            part = (
                (c - r - 1 / (2 * beta)) ** 2
                if options.loss_type == "ipo"
                else mpmath.log(1 + mpmath.exp(-beta * (c - r)))
            )
            sums["preference_loss"] += part / pairs
            sums["sft_loss"] += nll / pairs if options.sft_loss_weight else 0
            sums["accuracy"] += int(c > r) / pairs
            sums["rewards_chosen_mean"] += c / pairs
            sums["rewards_rejected_mean"] += r / pairs
        sums["loss"] = (
            options.preference_loss_weight * sums["preference_loss"] + options.sft_loss_weight * sums["sft_loss"]
        )
        sums["num_valid_samples"] = mpmath.mpf(3)
    loss, _, metrics = with_gradient(e, options)
    assert same(metrics, {name: torch.tensor(float(value), dtype=torch.float64) for name, value in sums.items()})
    assert loss == metrics["loss"]


def test_by_hand() -> None:
    """The rewards are r_chosen = 1.5 and r_rejected = -0.5, with a margin of 2."""
    e = one_pair(1.5, -0.5)
    loss, metrics = dpo(**e, options=DpoOptions(reference_policy_kl_penalty=0.5))
    assert float(loss) == pytest.approx(0.31326168751822286, rel=1e-15)  # log(1 + 1/e)
    assert {name: float(metrics[name]) for name in METRICS - {"loss", "preference_loss"}} == {
        "sft_loss": 0,
        "accuracy": 1,
        "rewards_chosen_mean": 1.5,
        "rewards_rejected_mean": -0.5,
        "num_valid_samples": 1,
    }
    assert dpo(**e, options=DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.5))[0] == 1  # (2 - 1)^2
    assert dpo(**e, options=DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.125))[0] == 4  # (2 - 4)^2
    assert dpo(**e, options=DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.25))[0] == 0  # at the target
    assert dpo(**e, options=DpoOptions(preference_loss_weight=0.0, sft_loss_weight=2.0))[0] == -1  # 2 * -(1.5 - 1)
    assert (
        dpo(
            **{**e, "valid_sequences": torch.tensor(8)},
            options=DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.5),
        )[0]
        == 0.25
    )


def test_means_by_hand() -> None:
    """The chosen sequence has two trained tokens, with log-ratios 1 and 3 and log-probs -1 and -3.

    The rejected sequence has one, with log-ratio 1.
    """
    e = {
        "logprobs": torch.tensor([-1, -3, 0, -2, 0], dtype=torch.float64),
        "reference_logprobs": torch.tensor([-2, -6, 0, -3, 0], dtype=torch.float64),
        "mask": torch.tensor([True, True, False, True, False]),
        "sequence": torch.tensor([0, 0, 0, 1, 1]),
        "sample_mask": torch.tensor([True, True]),
        "valid_sequences": torch.tensor(2),
    }
    ipo = DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.5)
    assert dpo(**e, options=ipo)[0] == 4  # (4 - 1 - 1)^2
    assert dpo(**e, options=replace(ipo, preference_average_log_probs=True))[0] == 0  # (2 - 1 - 1)^2
    sft = DpoOptions(preference_loss_weight=0.0, sft_loss_weight=1.0)
    assert dpo(**e, options=sft)[0] == 4
    assert dpo(**e, options=replace(sft, sft_average_log_probs=True))[0] == 2
    assert dpo(**e, options=replace(sft, preference_average_log_probs=True))[0] == 4


def test_epsilon_counts_even_where_it_is_small() -> None:
    """NeMo-RL's 1e-8 would vanish beside a count in float32."""
    e, options = one_pair(1.5, -0.5), DpoOptions(loss_type="ipo", reference_policy_kl_penalty=0.5, epsilon=1e-8)
    assert float(dpo(**e, options=options)[0]) == pytest.approx(1 / (1 + 1e-8), rel=1e-15)


# The reference's layouts


@pytest.mark.parametrize(
    ("layout", "aligned"),
    [
        ("next", [10, 11, 12, 20, 21, 30]),
        ("token", [11, 12, 0, 21, 0, 0]),
        ("rolled", [10, 11, 0, 20, 0, 0]),
    ],
)
def test_alignment_by_hand(layout: Any, aligned: list[float]) -> None:
    """The pack has three sequences, of 3, 2 and 1 tokens."""
    values = torch.tensor([10, 11, 12, 20, 21, 30], dtype=torch.float64)
    assert align_reference(values, torch.tensor([0, 0, 0, 1, 1, 2]), layout).tolist() == aligned


def test_alignment_ends_at_the_end_of_the_pack() -> None:
    """A roll puts the first token behind the last one, here in the same sequence; it is dropped."""
    values = torch.tensor([1, 2, 3], dtype=torch.float64)
    assert align_reference(values, torch.tensor([0, 0, 0]), "token").tolist() == [2, 3, 0]
    assert align_reference(values, torch.tensor([0, 0, 0]), "rolled").tolist() == [1, 2, 0]


def test_alignment_of_an_empty_pack() -> None:
    for layout in ("next", "token", "rolled"):
        assert align_reference(torch.zeros(0), torch.zeros(0, dtype=torch.long), layout).shape == (0,)


@pytest.mark.parametrize("layout", ["token", "rolled"])
def test_layouts_give_equal_results(layout: Any) -> None:
    """Garbage where a layout has no value has no effect; nor has a roll over the whole pack."""
    e, options = example(), DpoOptions(sft_loss_weight=0.5, reference_layout=layout)
    expected = with_gradient(e, replace(options, reference_layout="next"))
    over_the_pack = in_layout(e["reference_logprobs"], "token", 0.0).roll(-1 if layout == "rolled" else 0)
    for reference in (
        in_layout(e["reference_logprobs"], layout, garbage) for garbage in (math.nan, math.inf, 0.0, -7.0)
    ):
        found = with_gradient({**e, "reference_logprobs": reference}, options)
        assert torch.equal(found[1], expected[1])
        assert same(found[2], expected[2])
    assert torch.equal(with_gradient({**e, "reference_logprobs": over_the_pack}, options)[1], expected[1])


# Identities


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05, 3.0])
def test_a_policy_equal_to_its_reference_has_loss_ln_2(beta: float, average: bool) -> None:
    e = example()
    e["reference_logprobs"], e["valid_sequences"] = e["logprobs"], SAMPLE_MASK.sum()
    loss, metrics = dpo(**e, options=DpoOptions(reference_policy_kl_penalty=beta, preference_average_log_probs=average))
    assert close(loss, torch.tensor(2.0, dtype=torch.float64).log())
    assert metrics["accuracy"] == metrics["rewards_chosen_mean"] == metrics["rewards_rejected_mean"] == 0


@settings(max_examples=20, deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(0, 5))
def test_swapping_chosen_and_rejected_adds_the_margin(chosen: float, rejected: float, beta: float) -> None:
    options = DpoOptions(reference_policy_kl_penalty=beta)
    there, back = (
        float(dpo(**one_pair(*pair), options=options)[0]) for pair in ((chosen, rejected), (rejected, chosen))
    )
    assert back == pytest.approx(there + beta * (chosen - rejected), rel=1e-12, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(0.05, 5))
def test_swapping_under_ipo_adds_two_margins_over_beta(chosen: float, rejected: float, beta: float) -> None:
    options = DpoOptions(loss_type="ipo", reference_policy_kl_penalty=beta)
    there, back = (
        float(dpo(**one_pair(*pair), options=options)[0]) for pair in ((chosen, rejected), (rejected, chosen))
    )
    assert back == pytest.approx(there + 2 * (chosen - rejected) / beta, rel=1e-12, abs=1e-10)


def test_an_offset_common_to_policy_and_reference_changes_no_preference() -> None:
    """An offset cancels, such as one that the prompt adds to both."""
    e, offset = example(), example(seed=1)["logprobs"]
    moved = {**e, "logprobs": e["logprobs"] + offset, "reference_logprobs": e["reference_logprobs"] + offset}
    assert close(dpo(**moved, options=DpoOptions())[0], dpo(**e, options=DpoOptions())[0])


def test_bradley_terry_is_dpo_of_one_token_at_beta_1() -> None:
    rewards = torch.tensor([0.3, -1.0, 2.0, 2.5, -0.5, -0.5], dtype=torch.float64)
    common = {"sample_mask": torch.tensor([1, 1, 1, 1, 1, 1]).bool(), "valid_sequences": torch.tensor(6)}
    tokens = {
        "reference_logprobs": torch.zeros(6, dtype=torch.float64),
        "mask": torch.ones(6).bool(),
        "sequence": torch.arange(6),
    }
    loss, metrics = dpo(logprobs=rewards, **tokens, **common, options=DpoOptions(reference_policy_kl_penalty=1.0))
    found, found_metrics = preference(rewards=rewards, **common)
    assert found == loss
    assert found_metrics == {name: metrics[name] for name in METRICS - {"sft_loss", "preference_loss"}}


# Options


def test_the_rolled_layout_differs_from_next_at_last_positions() -> None:
    """A correct mask drops the last position of each sequence, which has no reference there."""
    e = example()
    e["mask"] = torch.ones_like(MASK)
    assert dpo(**e, options=DpoOptions())[0] != dpo(**e, options=DpoOptions(reference_layout="rolled"))[0]


def test_the_sft_loss_is_not_evaluated_at_weight_0() -> None:
    assert dpo(**example(), options=DpoOptions())[1]["sft_loss"] == 0
    assert dpo(**example(), options=DpoOptions(sft_loss_weight=0.1))[1]["sft_loss"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference_policy_kl_penalty": -0.1}, "reference_policy_kl_penalty is -0.1"),
        ({"reference_policy_kl_penalty": math.nan}, "reference_policy_kl_penalty is nan"),
        ({"preference_loss_weight": -1.0}, "preference_loss_weight is -1.0"),
        ({"sft_loss_weight": math.inf}, "sft_loss_weight is inf"),
        ({"epsilon": -1e-8}, "epsilon is -1e-08"),
        ({"loss_type": "hinge"}, "loss_type is 'hinge'; expected one of sigmoid, ipo"),
        ({"reference_layout": "left"}, "reference_layout is 'left'; expected one of next, token, rolled"),
        ({"loss_type": "ipo", "reference_policy_kl_penalty": 0.0}, "reference_policy_kl_penalty is 0"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    made = DpoOptions()
    for name, value in options.items():
        object.__setattr__(made, name, value)  # bypasses the type checks of the test run
    with pytest.raises(ValueError, match=message):
        made.__post_init__()


def test_pairs_need_an_even_number_of_sequences() -> None:
    with pytest.raises(ValueError, match="3 sequences; expected an even number"):
        preference(
            rewards=torch.zeros(3, dtype=torch.float64),
            sample_mask=torch.ones(3).bool(),
            valid_sequences=torch.tensor(3),
        )
    with pytest.raises(ValueError, match="1 sequences; expected an even number"):
        dpo(
            **{**one_pair(0.0, 0.0), "sequence": torch.zeros(4, dtype=torch.long), "sample_mask": torch.ones(1).bool()},
            options=DpoOptions(),
        )


# Masks, counts and parts


def test_pairs_without_a_trained_token_count_but_have_no_gradient() -> None:
    e = example()
    e["mask"], e["valid_sequences"] = torch.zeros_like(MASK), SAMPLE_MASK.sum()
    loss, gradient, _ = with_gradient(
        e, DpoOptions(sft_loss_weight=1.0, sft_average_log_probs=True, preference_average_log_probs=True)
    )
    assert close(loss, torch.tensor(2.0, dtype=torch.float64).log())
    assert not gradient.any()


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_the_chosen_sequence_gates_its_pair(chosen: bool, rejected: bool) -> None:
    """Where the masks of a pair differ, the chosen one decides for loss, gradient and metrics.

    The count of samples counts both.
    """
    e, options = example(), DpoOptions(sft_loss_weight=1.0)
    e["sample_mask"] = torch.tensor([1, 1, chosen, chosen, 1, 1, 0, 0]).bool()
    alike = with_gradient(e, options)
    e["sample_mask"] = torch.tensor([1, 1, chosen, rejected, 1, 1, 0, 0]).bool()
    found = with_gradient(e, options)
    assert found[2].pop("num_valid_samples") == 2 + (chosen + rejected) / 2
    assert alike[2].pop("num_valid_samples") == 2 + chosen
    assert found[2] == alike[2]
    assert torch.equal(found[1], alike[1])
    assert bool(found[1][(SEQUENCE == 2) | (SEQUENCE == 3)].any()) == chosen


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_the_chosen_reward_gates_its_pair(chosen: bool, rejected: bool) -> None:
    alike, found = (
        preference(
            rewards=REWARDS,
            sample_mask=torch.tensor([1, 1, chosen, other, 1, 1]).bool(),
            valid_sequences=torch.tensor(6),
        )[1]
        for other in (chosen, rejected)
    )
    assert found.pop("num_valid_samples") == 2 + (chosen + rejected) / 2
    assert alike.pop("num_valid_samples") == 2 + chosen
    assert found == alike


def test_padding_changes_nothing() -> None:
    """Padding is masked tokens at the end of a sequence, also with a shifted reference."""
    e = one_pair(1.5, -0.5)
    at = torch.tensor([0, 1, 1, 1, 2, 3, 3])
    padded = {**e, **{name: e[name][at] for name in ("logprobs", "reference_logprobs", "mask", "sequence")}}
    for layout in ("next", "rolled"):
        assert (
            dpo(**padded, options=DpoOptions(reference_layout=layout))[1]
            == dpo(**e, options=DpoOptions(reference_layout=layout))[1]
        )


# Transforms


def test_metrics_carry_no_gradient() -> None:
    e = example()
    e["logprobs"].requires_grad_()
    metrics = (
        dpo(**e, options=DpoOptions(sft_loss_weight=1.0))[1]
        | preference(
            rewards=REWARDS.clone().requires_grad_(), sample_mask=torch.ones(6).bool(), valid_sequences=torch.tensor(6)
        )[1]
    )
    assert not any(x.requires_grad for x in metrics.values())


# Bradley-Terry


def test_preference_by_hand() -> None:
    """The margins are 1, -4 and 0, where a tie is not accurate; then the third pair is dropped."""
    softplus = [0.31326168751822286, 4.0181499279178094, 0.6931471805599453]
    all_pairs = torch.ones(6).bool()
    loss, metrics = preference(rewards=REWARDS, sample_mask=all_pairs, valid_sequences=torch.tensor(6))
    assert float(loss) == pytest.approx(sum(softplus) / 3, rel=1e-15)
    assert metrics.pop("loss") == loss
    assert same(
        metrics,
        {name: torch.tensor(x, dtype=torch.float64) for name, x in zip(metrics, [1 / 3, 0.5, 1.5, 3], strict=True)},
    )
    two = torch.tensor([1, 1, 1, 1, 0, 0]).bool()
    loss, metrics = preference(rewards=REWARDS, sample_mask=two, valid_sequences=torch.tensor(4))
    assert float(loss) == pytest.approx(sum(softplus[:2]) / 2, rel=1e-15)
    assert list(metrics) == ["loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "num_valid_samples"]
    assert [float(x) for x in metrics.values()][1:] == [0.5, 0.5, 2, 2]
    loss, _ = preference(rewards=REWARDS, sample_mask=two, valid_sequences=torch.tensor(4), epsilon=0.5)
    assert float(loss) == pytest.approx(sum(softplus[:2]) / 2.5, rel=1e-15)


@pytest.mark.parametrize("fast", [True, False])
def test_preference_gradients(fast: bool) -> None:
    common = {"sample_mask": torch.tensor([1, 1, 1, 1, 0, 0]).bool(), "valid_sequences": torch.tensor(8)}
    rewards = REWARDS.clone().requires_grad_()
    assert gradcheck(lambda x: preference(rewards=x, **common)[0], (rewards,), fast_mode=fast)
    (found,) = torch.autograd.grad(preference(rewards=rewards, **common)[0], rewards)
    slopes = [-1 / (1 + math.exp(margin)) / 4 for margin in (1.0, -4.0)]
    assert close(found, torch.tensor([slopes[0], -slopes[0], slopes[1], -slopes[1], 0, 0], dtype=torch.float64))


def test_preference_of_equal_rewards_is_ln_2() -> None:
    loss, metrics = preference(
        rewards=torch.ones(4, dtype=torch.float64), sample_mask=torch.ones(4).bool(), valid_sequences=torch.tensor(4)
    )
    assert loss == torch.tensor(2.0, dtype=torch.float64).log()
    assert metrics["accuracy"] == 0


def test_shapes_are_checked() -> None:
    with pytest.raises(Exception, match="reference_logprobs"):
        dpo(**{**example(), "reference_logprobs": torch.zeros(3, dtype=torch.float64)}, options=DpoOptions())
