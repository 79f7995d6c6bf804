# SPDX-License-Identifier: Apache-2.0
"""Tests of the references of specs ``z_loss``, ``label_smoothing``, ``softcap`` and ``divergence``,
from logits to the loss.

Each is compared with a function of the logits that shares no code with it: torch's fused losses,
and sums of exponentials.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from lossgate import candidate
from lossgate.base.errors import UsageError
from lossgate.losses import SPECS
from lossgate.specs.terms import Terms

TOKENS, VOCAB = 7, 6
MASK = torch.tensor([True, False, True, True, False, True, False])
N = 4


def example(spec: str, std: float = 2.0, seed: int = 0, mask: Tensor = MASK) -> dict[str, Any]:
    """Returns the fields of a batch and the logits."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = std * torch.randn(2, TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    fields = {"labels": labels, "mask": mask, "valid_tokens": mask.sum()}
    added = {"teacher_logits": teacher} if spec == "divergence" else {}
    return {"logits": student, **fields, **added}


def of(spec: str, given: dict[str, Any], **options: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns the loss of a spec's reference, its metrics and the gradient of the logits."""
    bound = SPECS[spec].bind(options).returning(())
    fields = {name: value for name, value in given.items() if name != "logits"}
    logits = given["logits"].clone().requires_grad_()
    loss, metrics = bound.loss(bound.token_values("logits", {"logits": logits}, fields), fields)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), metrics, gradient


def mean(losses: Tensor) -> Tensor:
    return losses[MASK].sum() / N


def z_loss(e: dict[str, Tensor], weight: float) -> Tensor:
    z = e["logits"]
    return mean(cross_entropy(z, e["labels"], reduction="none") + weight * z.exp().sum(1).log() ** 2)


def smoothed(e: dict[str, Tensor], smoothing: float) -> Tensor:
    return cross_entropy(e["logits"][MASK], e["labels"][MASK], label_smoothing=smoothing)


def capped(e: dict[str, Tensor], cap: float) -> Tensor:
    ratio = (2 * e["logits"] / cap).exp()
    return cross_entropy((cap * (ratio - 1) / (ratio + 1))[MASK], e["labels"][MASK])


def divergence(e: dict[str, Tensor], kind: str, beta: float, tau: float) -> Tensor:
    q, p = (torch.softmax(z[MASK] / tau, -1) for z in (e["logits"], e["teacher_logits"]))
    r = beta * p + (1 - beta) * q

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return kl_div(b.log(), a, reduction="sum") / N

    return {"forward": kl(p, q), "reverse": kl(q, p), "jsd": beta * kl(p, r) + (1 - beta) * kl(q, r)}[kind]


INDEPENDENT: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], Tensor]]] = {
    "z-loss 0": ("z_loss", {"z_loss_weight": 0.0}, lambda e: z_loss(e, 0.0)),
    "z-loss": ("z_loss", {"z_loss_weight": 0.125}, lambda e: z_loss(e, 0.125)),
    "z-loss of PaLM": ("z_loss", {}, lambda e: z_loss(e, 1e-4)),
    "smoothing": ("label_smoothing", {}, lambda e: smoothed(e, 0.1)),
    "no smoothing": ("label_smoothing", {"smoothing": 0.0}, lambda e: smoothed(e, 0.0)),
    "all smoothed": ("label_smoothing", {"smoothing": 1.0}, lambda e: smoothed(e, 1.0)),
    "softcap": ("softcap", {}, lambda e: capped(e, 30.0)),
    "softcap 2": ("softcap", {"softcap": 2.0}, lambda e: capped(e, 2.0)),
    **{
        f"{kind} {tau}": (
            "divergence",
            {"divergence_type": kind, "beta": 0.1, "temperature": tau},
            lambda e, kind=kind, tau=tau: divergence(e, kind, 0.1, tau),
        )
        for kind in ("forward", "reverse", "jsd")
        for tau in (1.0, 0.3, 3.0)
    },
}

every_case = pytest.mark.parametrize("case", INDEPENDENT)


@every_case
@pytest.mark.parametrize("std", [0.1, 2.0, 8.0])
def test_loss_and_gradient(case: str, std: float) -> None:
    spec, options, independent = INDEPENDENT[case]
    e = example(spec, std)
    loss, _, gradient = of(spec, e, **options)
    logits = e["logits"].clone().requires_grad_()
    expected = independent({**e, "logits": logits})
    (of_logits,) = torch.autograd.grad(expected, logits)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-9, abs=1e-12)
    assert torch.allclose(gradient, of_logits, rtol=1e-8, atol=1e-12)


def test_the_metric_of_the_z_loss_is_without_its_weight() -> None:
    e = example("z_loss")
    squares = e["logits"].exp().sum(1).log() ** 2
    for weight in (0.0, 1e-4, 1.0):
        _, metrics, _ = of("z_loss", e, z_loss_weight=weight)
        assert float(metrics["z_loss"]) == pytest.approx(float(squares[MASK].sum() / N), rel=1e-13)
        assert not metrics["z_loss"].requires_grad


@pytest.mark.parametrize(("spec", "terms"), [("z_loss", {"nll", "z"}), ("label_smoothing", {"nll", "smoothing"})])
def test_terms(spec: str, terms: set[str]) -> None:
    """Each is a mean over trained tokens."""
    e, bound = example(spec), SPECS[spec].bind({})
    fields = {name: value for name, value in e.items() if name != "logits"}
    values = bound.token_values("logits", {"logits": e["logits"]}, fields)
    found = bound.spec(values, bound.spec.batch(fields), bound.options)
    assert isinstance(found, Terms)
    assert found.terms.keys() == terms
    assert {term.over for term in found.terms.values()} == {"trained tokens"}
    assert float(found.normalisers["trained tokens"]) == N
    assert all(bool((term.values[~MASK] == 0).all()) for term in found.terms.values())


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("divergence", {"beta": 0.0}, "beta is 0.0; expected a weight above 0 and below 1"),
        ("divergence", {"beta": 1.0}, "beta is 1.0; expected a weight above 0 and below 1"),
        ("label_smoothing", {"smoothing": -0.1}, "smoothing is -0.1; expected a weight in"),
        ("label_smoothing", {"smoothing": 1.5}, "smoothing is 1.5; expected a weight in"),
        ("softcap", {"softcap": 0.0}, "softcap is 0.0; expected a number above 0"),
    ],
)
def test_options_out_of_range_are_refused_where_they_are_named(
    spec: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        SPECS[spec].bind(options)
    with pytest.raises(UsageError, match=message):
        candidate(spec, head="logits", supports=options)(lambda inputs, options, mesh: None)


def test_softcap_is_that_of_nll() -> None:
    """Spec ``nll`` has it as an option of the logits; None there is the limit of large caps."""
    e = example("softcap")
    assert torch.allclose(of("softcap", e, softcap=2.0)[2], of("nll", e, softcap=2.0)[2], rtol=1e-12, atol=1e-15)
    uncapped = of("nll", e)
    for found, expected in zip(of("softcap", e, softcap=1e6)[::2], uncapped[::2], strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_temperature_flattens_both_models() -> None:
    """As it grows, tau^2 KL tends to half the variance of the difference of the logits."""
    e = example("divergence")
    differences = (e["logits"] - e["teacher_logits"])[MASK]
    expected = float(differences.var(1, correction=0).sum() / 2 / N)
    for kind in ("forward", "reverse"):
        loss, _, _ = of("divergence", e, divergence_type=kind, temperature=3.0)
        tempered = {n: x / 1e3 if "logits" in n else x for n, x in e.items()}
        limit, _, _ = of("divergence", tempered, divergence_type=kind)
        assert float(1e6 * limit) == pytest.approx(expected, rel=1e-2)
        assert float(loss) == pytest.approx(float(divergence(e, kind, 0.5, 3.0)), rel=1e-12)
