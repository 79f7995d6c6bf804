# SPDX-License-Identifier: Apache-2.0
"""Conventions: each has a kernel that keeps it, and one that breaks what it still promises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from lossgate import Candidate, Conventions, Layout, UsageError, candidate, strategies
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.own_counts import weights_of_calls
from lossgate.cases.placement import PlacedProblem, sample_problems
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.advice import remedy_of
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.specs.outputs import LOSS
from lossgate.specs.sharding_goals import NOTHING_ON_A_RANK
from lossgate.worlds.base import World

MakeWorld = Callable[[str], World]


def targets(inputs: Any) -> Tensor:
    return inputs.labels.masked_fill(~inputs.mask, -100)


def by_given_counts(inputs: Any, options: Any, mesh: Any) -> Tensor:
    total = F.cross_entropy(inputs.logits.float(), targets(inputs), reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)


def by_own_counts(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return F.cross_entropy(inputs.logits.float(), targets(inputs))


def refusing_nothing(inputs: Any, options: Any, mesh: Any) -> Tensor:
    if not bool(inputs.mask.any()):
        raise ValueError("nothing is trained")
    return by_given_counts(inputs, options, mesh)


def refusing_no_tokens(inputs: Any, options: Any, mesh: Any) -> Tensor:
    if not len(inputs.labels):
        raise ValueError("no token")
    return by_given_counts(inputs, options, mesh)


def refusing_hooks(inputs: Any, options: Any, mesh: Any) -> Tensor:
    with disable_saved_tensors_hooks("hooks are refused"):
        return by_given_counts(inputs, options, mesh)


CALLS = [0]


def wrong_when_called_again(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """Is wrong in the second forward of checkpointing, and nobody refuses it."""
    CALLS[0] += torch.is_grad_enabled()
    return by_given_counts(inputs, options, mesh) * (1 + CALLS[0] % 2)


def times_0(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """Multiplies logits of ids that are no label by 0."""
    return by_given_counts(inputs, options, mesh) + 0.0 * inputs.logits.sum()


def doubled_if_low(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return by_given_counts(inputs, options, mesh) * (1 + bool((inputs.logits < -1000).any()))


class WritesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        loss = -(logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1) * weight).sum()
        logits.copy_(logits.softmax(-1)).scatter_add_(1, labels[:, None], -torch.ones_like(logits[:, :1]))
        logits.mul_(weight[:, None])
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None


def writing(inputs: Any, options: Any, mesh: Any) -> Tensor:
    weight = inputs.mask / inputs.valid_tokens.clamp(min=1)
    return WritesItsInput.apply(inputs.logits, inputs.labels, weight)


def writing_too_much(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return 2 * writing(inputs, options, mesh)


def by_mask(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """Multiplies by the mask, as most libraries do: 0 * inf is NaN."""
    ratio = torch.exp(inputs.logprobs - inputs.prev_logprobs)
    clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    return (losses * (inputs.mask & inputs.sample_mask[inputs.sequence])).sum() / (inputs.valid_tokens + 1e-8)


def disturbed_by_twins(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """Is wrong if every masked token has the numbers of a trained one."""
    counts = inputs.mask & inputs.sample_mask[inputs.sequence]
    twins = torch.isin(inputs.logprobs[~counts], inputs.logprobs[counts]).all()
    return by_mask(inputs, options, mesh) + twins


def declared(kernel: Any, conventions: Conventions | None) -> Candidate:
    """Returns a kernel as a candidate for the loss that it computes."""
    if kernel in (by_mask, disturbed_by_twins):
        spec, head, supports = "clipped_pg", "logprobs", {"reference_policy_kl_penalty": 0.0}
    else:
        spec, head, supports = "nll", "logits", {}
    return candidate(spec, head=head, axes=("dp",), dtypes=("float32",), supports=supports, conventions=conventions)(
        kernel
    )


def found(kernel: Candidate, name: str, make_world: MakeWorld) -> CaseResult:
    """Checks a property on a problem that could show most of the mistakes that it looks for."""
    held_to, world = PROPERTIES[name], make_world("single")
    mistakes, drawn = held_to.mistakes(kernel), sample_problems(kernel, Layout(), "float32", 60, 3)
    cases = [
        Case(kernel, one, world) for one in drawn if 8 < one.tokens < 100 and one.vocab > 2 and "none" not in one.masks
    ]
    fitting = [case for case in cases if held_to.fits(case)]
    return run_case(max(fitting, key=lambda case: sum(own.can_show(case) for own in mistakes)), held_to)


KEPT: dict[str, tuple[Conventions, str, Any, Any, str]] = {
    "under_mask usual": (
        Conventions(under_mask="usual"),
        "masked-values",
        by_mask,
        disturbed_by_twins,
        "loss: ",
    ),
    "counts own": (
        Conventions(counts="own"),
        "microbatches",
        by_own_counts,
        by_given_counts,
        "loss, in 2 microbatches",
    ),
    "untrained nan": (
        Conventions(untrained="nan"),
        "nothing-trained",
        by_own_counts,
        by_given_counts,
        "with nothing trained the loss is 0, not NaN",
    ),
    "untrained error": (
        Conventions(untrained="error"),
        "nothing-trained",
        refusing_nothing,
        by_given_counts,
        "with nothing trained it raises no error",
    ),
    "empty_ranks refused": (
        Conventions(empty_ranks="refused"),
        "bad-inputs",
        refusing_no_tokens,
        by_given_counts,
        "a rank without a token raises no error",
    ),
    "hooks refused": (
        Conventions(hooks="refused"),
        "checkpointing",
        refusing_hooks,
        wrong_when_called_again,
        "grad of logits, with use_reentrant=True",
    ),
    "minus_inf never": (
        Conventions(minus_inf="never"),
        "suppressed-ids",
        times_0,
        doubled_if_low,
        "loss, with logits of -1e4: got",
    ),
    "inputs written": (Conventions(inputs="written"), "agreement", writing, writing_too_much, "loss: got"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_kernel_keeps_a_convention_and_another_breaks_it(name: str, make_world: MakeWorld) -> None:
    conventions, held_to, keeps, breaks, words = KEPT[name]
    assert found(declared(keeps, conventions), held_to, make_world).agrees
    CALLS[0] = 0
    assert words in " ".join(found(declared(breaks, conventions), held_to, make_world).findings)


@pytest.mark.parametrize("name", [name for name in KEPT if not name.startswith(("inputs", "untrained nan", "empty"))])
def test_without_the_convention_the_kernel_that_keeps_it_is_rejected(name: str, make_world: MakeWorld) -> None:
    _, held_to, keeps, _, _ = KEPT[name]
    assert not found(declared(keeps, None), held_to, make_world).agrees


def test_what_follows_from_a_convention_is_not_asked() -> None:
    written, finite = (
        declared(writing, Conventions(inputs="written")),
        declared(by_mask, Conventions(under_mask="finite")),
    )
    for name in ("inputs-kept", "gradients-add-up", "second-backward", "checkpointing"):
        assert not PROPERTIES[name].applies(written)
    assert not PROPERTIES["masked-nan"].applies(finite)
    assert PROPERTIES["masked-values"].applies(finite)


# Whole cells


AGREEING = {
    "own counts": (by_own_counts, Conventions(counts="own", untrained="nan")),
    "own counts, always trained": (by_own_counts, Conventions(counts="own", untrained="never")),
    "an error without training": (refusing_nothing, Conventions(untrained="error")),
    "multiplied by the mask": (by_mask, Conventions(under_mask="usual")),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", ["single", "dp=2"])
@pytest.mark.parametrize("name", AGREEING)
def test_a_kernel_agrees_under_its_conventions(name: str, layout: str) -> None:
    kernel, conventions = AGREEING[name]
    made = declared(kernel, conventions)
    also = tuple(held_to for held_to in PROPERTIES.values() if held_to.applies(made) and held_to.name != "agreement")
    result = run_cell(Cell(made, Layout.parse(layout), "float32", also=also), Settings(shrink_calls=0))
    assert not result.reasons
    assert result.record.conventions == conventions.declared


@pytest.mark.slow
def test_the_advice_names_the_nearest_convention() -> None:
    made = declared(by_mask, None)
    cell = Cell(made, Layout(), "float32", also=(PROPERTIES["masked-values"],))
    reasons = run_cell(cell, Settings(shrink_calls=0)).reasons
    assert "declare conventions=lossgate.Conventions(under_mask='usual')" in " ".join(reasons)


# Declarations


def test_a_convention_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Conventions\(under_mask='finit'\): did you mean 'finite'"):
        Conventions(under_mask="finit")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"conventions='own'\): expected lossgate.Conventions"):
        declared(by_own_counts, "own")  # type: ignore[arg-type]


def test_own_counts_weigh_nothing_but_a_loss(make_world: MakeWorld) -> None:
    with pytest.raises(UsageError, match="logprobs has gradients, too, which no count divides"):
        candidate("nll", head="logits", differentiable=("loss", "logprobs"), conventions=Conventions(counts="own"))(
            by_own_counts
        )
    dense = dense_candidate(SPECS["clipped_pg"], "logprobs")
    own = replace(dense, conventions=Conventions(counts="own"), supports={"positive_example_nll_weight": 0.1})
    cases = [Case(own, problem, make_world("single")) for problem in sample_problems(own, Layout(), "float32", 20, 0)]
    with pytest.raises(UsageError, match="depends on valid_tokens and on positive_tokens"):
        [run_case(case, PROPERTIES["agreement"]) for case in cases]


def test_users_draw_no_problem_that_a_convention_rules_out() -> None:
    kernel = declared(by_own_counts, Conventions(counts="own", untrained="never"))

    @settings(max_examples=30, database=None)
    @given(strategies.problems(kernel, layout="dp=2"))
    def every_rank_trains(drawn: Any) -> None:
        bound = BoundProblem(kernel.spec, drawn.problem)
        assert NOTHING_ON_A_RANK not in PlacedProblem(bound, drawn.problem).coverage
        assert bound.trained.sequence.size

    every_rank_trains()


@pytest.mark.slow
def test_advice_takes_no_convention_that_cannot_be_tried(make_world: MakeWorld) -> None:
    """A loss with two counts can't be weighed by its caller."""
    dense = dense_candidate(SPECS["clipped_pg"], "logprobs")

    def by_own(inputs: Any, options: Any, mesh: Any) -> Any:
        return dense.kernel(replace(inputs, valid_tokens=inputs.mask.sum()), options, mesh)

    wrong = replace(dense, kernel=by_own, name="wrong", supports={"positive_example_nll_weight": 0.1})
    world, held_to = make_world("single"), PROPERTIES["microbatches"]
    cell = Cell(wrong, Layout(), "float32", held_to)
    cases = (run_case(Case(wrong, one, world), held_to) for one in sample_problems(wrong, Layout(), "float32", 40, 0))
    advice = [remedy_of(cell, case, world) for case in cases if case.findings]
    assert advice
    assert all("divide by the counts that are given" in words for words in advice)


def test_a_loss_of_0_has_the_rounding_of_each_share() -> None:
    """The rounding of a rank with few tokens counts little, whatever it divides by."""
    of_own = candidate(
        "divergence", head="logits", axes=("dp",), conventions=Conventions(counts="own", untrained="nan")
    )
    kernel = of_own(by_own_counts)
    (drawn,) = sample_problems(kernel, Layout.parse("dp=2"), "float32", 1, 3)
    sizes = {
        "lengths": (10, 2),
        "masks": ("all",) * 2,
        "vocab": 7,
        "group_size": 1,
        "forced_labels": (),
        "outliers": (),
    }
    problem = replace(drawn, **sizes, scenario={"teacher": "equal"})
    bound = BoundProblem(kernel.spec, problem)
    (weights,) = weights_of_calls(kernel, bound, PlacedProblem(bound, problem).batch, [LOSS]).values()
    assert sorted(weights) == pytest.approx([0.1, 0.9])
