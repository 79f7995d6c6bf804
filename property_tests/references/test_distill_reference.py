# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference of distillation.

The methods are loops over tokens with closed-form gradients, hand computation and
properties.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense_losses.distill import (
    distill,
    distill_token_kl,
    student_tail_kl,
    student_topk_logprobs,
    teacher_topk_logprobs,
)
from lossgate.losses.distill import DistillOptions

SEQUENCE = [0, 0, 0, 1, 1, 2]
MASK = [True, False, True, True, True, False]  # the last sequence has no trained token
TOKENS, VOCAB, K = len(SEQUENCE), 7, 3

KINDS = ("forward", "reverse", "mixed")
EVERY_OPTION = [
    DistillOptions(
        kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=outside, temperature=temperature, log_infinitesimal=-5.0
    )
    for kind, outside, temperature in product(KINDS, (False, True), (1.0, 0.6))
]
few = settings(max_examples=30, deadline=None)
# These have temperature 0.6.
every_kind = pytest.mark.parametrize("options", EVERY_OPTION[1::2], ids=lambda o: f"{o.kl_type}-{o.zero_outside_topk}")
every_option = pytest.mark.parametrize(
    "options", EVERY_OPTION, ids=lambda o: f"{o.kl_type}-{o.zero_outside_topk}-{o.temperature}"
)


def example(seed: int = 0, k: int = K, logit_std: float = 2.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) * logit_std,
        "teacher_logits": torch.randn(TOKENS, k, generator=generator, dtype=torch.float64) * logit_std,
        "teacher_indices": torch.stack([torch.randperm(VOCAB, generator=generator)[:k] for _ in range(TOKENS)]),
        "mask": torch.tensor(MASK),
        "valid_tokens": torch.tensor(sum(MASK)),
    }


def loss_of(e: dict[str, Any], options: DistillOptions = DistillOptions(), **changed: Any) -> Tensor:  # noqa: B008
    return distill(**{**e, **changed}, options=options)[0]


def gradient_of(e: dict[str, Any], options: DistillOptions = DistillOptions(), **changed: Any) -> Tensor:  # noqa: B008
    logits = {**e, **changed}["logits"].detach().clone().requires_grad_()
    return torch.autograd.grad(loss_of(e, options, **{**changed, "logits": logits}), logits)[0]


def softmax(x: list[float]) -> list[float]:
    exps = [math.exp(v - max(x)) for v in x]
    return [v / math.fsum(exps) for v in exps]


def by_loops(e: dict[str, Any], o: DistillOptions) -> tuple[list[float], list[list[float]]]:
    """Computes the divergence of each token and its gradient in plain Python, derived by hand.

    dF/dz_v = (q_v - p_v) / tau and dR/dz_v = q_v (log(q_v / r_v) - R) / tau, for v in the
    vocabulary that q is normalised over. p is 0 outside the top-k. r is p in the top-k, and
    exp(log_infinitesimal) outside of it. Probabilities are quotients of exponentials.
    """
    values, gradients = [], []
    for z, u, indices in zip(
        e["logits"].tolist(), e["teacher_logits"].tolist(), e["teacher_indices"].tolist(), strict=True
    ):
        support = list(range(VOCAB)) if o.zero_outside_topk else indices
        q = dict(zip(support, softmax([z[v] / o.temperature for v in support]), strict=True))
        p = dict(zip(indices, softmax([x / o.temperature for x in u]), strict=True))
        r = {v: p.get(v, math.exp(o.log_infinitesimal)) for v in support}
        forward = math.fsum(p[v] * math.log(p[v] / q[v]) for v in indices)
        reverse = math.fsum(q[v] * math.log(q[v] / r[v]) for v in support)
        w = {"forward": 1.0, "reverse": 0.0, "mixed": o.mixed_kl_weight}[o.kl_type]
        values.append(w * forward + (1 - w) * reverse)
        row = [0.0] * VOCAB
        for v in support:
            row[v] = (w * (q[v] - p.get(v, 0.0)) + (1 - w) * q[v] * (math.log(q[v] / r[v]) - reverse)) / o.temperature
        gradients.append(row)
    return values, gradients


@every_option
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_by_loops(options: DistillOptions, seed: int) -> None:
    e = example(seed)
    values, gradients = by_loops(e, options)
    assert distill_token_kl(e["logits"], e["teacher_logits"], e["teacher_indices"], options).tolist() == pytest.approx(
        values, rel=1e-12
    )
    assert float(loss_of(e, options)) == pytest.approx(
        math.fsum(x for x, m in zip(values, MASK, strict=True) if m) / 4, rel=1e-12
    )
    expected = torch.tensor(gradients, dtype=torch.float64) * torch.tensor(MASK)[:, None] / 4
    assert (gradient_of(e, options) - expected).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The student has 1/2, 1/4, 1/4. The teacher has the tokens 0 and 1, with 1/2 each.
        # Renormalised, the student gives these 2/3 and 1/3.
        (DistillOptions(), math.log(9 / 8) / 2),
        (DistillOptions(kl_type="reverse"), (5 / 3) * math.log(2) - math.log(3)),
        (DistillOptions(kl_type="mixed"), (math.log(9 / 8) / 2 + (5 / 3) * math.log(2) - math.log(3)) / 2),
        (DistillOptions(zero_outside_topk=True), math.log(2) / 2),
        (DistillOptions(kl_type="reverse", zero_outside_topk=True), 25 - 0.75 * math.log(2)),
        (DistillOptions(kl_type="mixed", mixed_kl_weight=0.2, zero_outside_topk=True), 20 - 0.5 * math.log(2)),
        (DistillOptions(kl_type="reverse", zero_outside_topk=True, log_infinitesimal=-4.0), 1 - 0.75 * math.log(2)),
        (DistillOptions(temperature=0.5), math.log(25 / 16) / 2),  # squares the odds of 2 : 1
        (DistillOptions(epsilon=1e-8), math.log(9 / 8) / 2 / (1 + 1e-8)),
        (DistillOptions(epsilon=1.0), math.log(9 / 8) / 4),
    ],
)
def test_by_hand(options: DistillOptions, expected: float) -> None:
    e = {
        "logits": torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64).log(),
        "teacher_logits": torch.tensor([[5.0, 5.0]], dtype=torch.float64),
        "teacher_indices": torch.tensor([[0, 1]]),
        "mask": torch.tensor([True]),
        "valid_tokens": torch.tensor(1),
    }
    assert float(loss_of(e, options)) == pytest.approx(expected, rel=1e-13, abs=0)


@pytest.mark.parametrize("kind", ["reverse", "mixed"])
def test_the_tail_equals_that_of_nemo_rl(kind: Any) -> None:
    """NeMo-RL computes H_rest + 100 P_rest, with H_all = sum q log q.

    That is less accurate, because it subtracts the mass of the top-k from 1.
    """
    e, w = example(), 0.3
    q, p = (
        student_topk_logprobs(e["logits"], e["teacher_indices"], zero_outside_topk=True),
        teacher_topk_logprobs(e["teacher_logits"]),
    )
    everything = e["logits"].log_softmax(-1)
    tail = (everything.exp() * everything).sum(-1) - (q.exp() * q).sum(-1) + 100 * (1 - q.exp().sum(-1))
    assert (student_tail_kl(e["logits"], e["teacher_indices"]) - tail).abs().max() < 1e-12
    reverse = (q.exp() * (q - p)).sum(-1) + tail
    expected = reverse if kind == "reverse" else w * (p.exp() * (p - q)).sum(-1) + (1 - w) * reverse
    options = DistillOptions(kl_type=kind, mixed_kl_weight=w, zero_outside_topk=True)
    found = distill_token_kl(e["logits"], e["teacher_logits"], e["teacher_indices"], options)
    assert (found - expected).abs().max() < 1e-12


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.floats(0.3, 3.0))
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(seed: int, kind: Any, temperature: float) -> None:
    e = example(seed)
    options = DistillOptions(kl_type=kind, temperature=temperature)
    teacher = e["logits"].gather(-1, e["teacher_indices"])
    assert abs(loss_of(e, options, teacher_logits=teacher + 3)) < 1e-13
    assert gradient_of(e, options, teacher_logits=teacher + 3).abs().max() < 1e-13


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from(EVERY_OPTION))
def test_it_is_never_negative(seed: int, options: DistillOptions) -> None:
    """The reverse KL could be negative, because the teacher's mass exceeds 1.

    The excess is exp(log_infinitesimal) for each token outside the top-k; it is negligible here.
    """
    e, options = example(seed), replace(options, log_infinitesimal=-100.0)
    found = distill_token_kl(e["logits"], e["teacher_logits"], e["teacher_indices"], options)
    assert (found > 0).all()


@few
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(0, 1))
def test_mixed_is_the_weighted_mean(seed: int, outside: bool, weight: float) -> None:
    e = example(seed)
    forward, reverse, mixed = (
        loss_of(e, DistillOptions(kl_type=kind, mixed_kl_weight=weight, zero_outside_topk=outside)) for kind in KINDS
    )
    assert abs(forward - reverse) > 1e-9
    assert float(mixed) == pytest.approx(float(weight * forward + (1 - weight) * reverse), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outside", [False, True])
def test_with_the_whole_vocabulary_it_is_the_full_divergence(kind: Any, outside: bool) -> None:
    e = example(k=VOCAB)
    teacher = torch.empty_like(e["logits"]).scatter(-1, e["teacher_indices"], e["teacher_logits"]).log_softmax(-1)
    student = e["logits"].log_softmax(-1)
    forward = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    reverse = torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)
    expected = {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[kind]
    found = distill_token_kl(
        e["logits"], e["teacher_logits"], e["teacher_indices"], DistillOptions(kl_type=kind, zero_outside_topk=outside)
    )
    assert (found - expected).abs().max() < 1e-13


def test_forward_outside_the_topk_adds_the_mass_the_student_has_elsewhere() -> None:
    e = example()
    inside = student_topk_logprobs(e["logits"], e["teacher_indices"], zero_outside_topk=True).logsumexp(-1)
    renormalised, whole = (
        distill_token_kl(e["logits"], e["teacher_logits"], e["teacher_indices"], DistillOptions(zero_outside_topk=x))
        for x in (False, True)
    )
    assert (whole - renormalised + inside).abs().max() < 1e-13


@few
@given(st.sampled_from(EVERY_OPTION), st.integers(0, 2**32 - 1), st.floats(-50, 50))
def test_a_constant_added_to_a_row_of_logits_changes_nothing(
    options: DistillOptions, seed: int, constant: float
) -> None:
    e = example(seed)
    shift = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)[:, None] * constant
    before = loss_of(e, options)
    for name in ("logits", "teacher_logits"):
        assert float(loss_of(e, options, **{name: e[name] + shift})) == pytest.approx(float(before), rel=1e-12)
    assert (gradient_of(e, options).sum(-1)).abs().max() < 1e-14


@every_kind
def test_the_order_of_the_topk_and_of_the_vocabulary_does_not_matter(options: DistillOptions) -> None:
    e, order, k_order = example(), torch.randperm(VOCAB), torch.randperm(K)
    before = loss_of(e, options)
    turned = {"teacher_logits": e["teacher_logits"][:, k_order], "teacher_indices": e["teacher_indices"][:, k_order]}
    assert float(loss_of(e, options, **turned)) == pytest.approx(float(before), rel=1e-13)
    renamed = {"logits": e["logits"][:, order], "teacher_indices": order.argsort()[e["teacher_indices"]]}
    assert float(loss_of(e, options, **renamed)) == pytest.approx(float(before), rel=1e-13)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kl_type", "jeffreys"),
        ("mixed_kl_weight", -0.1),
        ("mixed_kl_weight", 1.1),
        ("log_infinitesimal", 0.0),
        ("log_infinitesimal", -math.inf),
        ("temperature", 0.0),
        ("epsilon", -1e-8),
    ],
)
def test_invalid_options_are_rejected(option: str, value: Any) -> None:
    options = DistillOptions()
    object.__setattr__(options, option, value)  # bypasses the type checks of the test run
    with pytest.raises(ValueError, match=f"{option} is '?{value}'?; expected"):
        options.__post_init__()


def test_metrics() -> None:
    e = example()
    e["logits"].requires_grad_()
    loss, metrics = distill(**e, options=DistillOptions())
    assert not any(x.requires_grad for x in metrics.values())
    assert {name: float(x) for name, x in metrics.items()} == {"loss": float(loss.detach()), "num_unmasked_tokens": 4}


def test_indices_out_of_range_at_masked_tokens_have_no_effect() -> None:
    e, options = example(), DistillOptions(kl_type="mixed", zero_outside_topk=True)
    dirty = torch.where(e["mask"][:, None], e["teacher_indices"], -100)
    assert loss_of(e, options, teacher_indices=dirty) == loss_of(e, options)


@every_kind
def test_a_padded_vocabulary_has_no_effect(options: DistillOptions) -> None:
    """Its logits are -inf, so that q = 0 and q log q = 0. NeMo-RL gives NaN there."""
    e = example()
    padded = torch.nn.functional.pad(e["logits"], (0, 2), value=-math.inf)
    assert float(loss_of(e, options, logits=padded)) == pytest.approx(float(loss_of(e, options)), rel=1e-14)
    gradient = gradient_of(e, options, logits=padded)
    assert (gradient[:, :VOCAB] - gradient_of(e, options)).abs().max() < 1e-15
    assert not gradient[:, VOCAB:].any()


def test_a_teacher_that_excludes_a_token() -> None:
    """The forward KL ignores the token, as 0 log 0 = 0. The reverse KL is infinite.

    It is infinite because the student gives the token some probability.
    """
    e = example()
    excluded = torch.cat([e["teacher_logits"][:, :-1], torch.full((TOKENS, 1), -math.inf, dtype=torch.float64)], -1)
    fewer = {"teacher_logits": e["teacher_logits"][:, :-1], "teacher_indices": e["teacher_indices"][:, :-1]}
    options = DistillOptions(zero_outside_topk=True)
    assert float(loss_of(e, options, teacher_logits=excluded)) == pytest.approx(
        float(loss_of(e, options, **fewer)), rel=1e-14
    )
    assert (gradient_of(e, options, teacher_logits=excluded) - gradient_of(e, options, **fewer)).abs().max() < 1e-15
    assert loss_of(e, DistillOptions(kl_type="reverse"), teacher_logits=excluded) == math.inf
