# SPDX-License-Identifier: Apache-2.0
"""Every spec, end to end: an honest dense candidate agrees at every head and layout, a wrong one does not, nor one that ignores an option."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_candidates import Spoil, dense_candidate

import lossgate
from lossgate import ANY, Layout, Problem
from lossgate.cases.examine import examine
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.specs.spec import FEATURES, Option
from lossgate.worlds import SimulatedWorld

LAYOUTS = ("single", "dp=2", "cp=2", "tp=2", "dp=2,cp=2,tp=2")


def has_every_option(name: str, head: str, layout: str) -> bool:
    """At every head on one rank, and at one on many; default options elsewhere, to save minutes."""
    return layout == "single" or (layout == LAYOUTS[-1] and head == next(iter(SPECS[name].inputs)))


SETTINGS = Settings(examples=12, rounds=12)
IDLE = {
    f"reference_layout={a} told from {b} by {side}"
    for a, b in (("next", "rolled"), ("rolled", "next"))
    for side in ("its value", "a gradient")
}
"""They differ at last tokens of sequences alone, which are never trained."""

FAMILIES = [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "head"), FAMILIES)
def test_an_honest_candidate_agrees(name: str, head: str, layout: str) -> None:
    """Conclusively: every branch that the spec declares is visited, and every planted error seen."""
    candidate = dense_candidate(name, head)
    if not has_every_option(name, head, layout):
        candidate = replace(
            candidate,
            supports={feature: values for feature, values in candidate.supports.items() if feature in FEATURES},
        )
    result = run_cell(Cell(candidate, Layout.parse(layout), "float32"), SETTINGS)
    assert result.verdict is Verdict.AGREE, result.reasons
    assert not result.missing_branches
    assert not result.untold
    idle = {told for told in result.idle if head in ("hidden", "logits") or not told.startswith("temperature=")}
    assert idle <= IDLE or not has_every_option(name, head, layout)


def shifted_mask(batch: dict[str, Any], options: Any) -> Any:
    batch["mask"] = batch["mask"].roll(1)
    return options


def every_sample(batch: dict[str, Any], options: Any) -> Any:
    batch["sample_mask"] = torch.ones_like(batch["sample_mask"])
    return options


def test_a_divergence_that_is_all_but_0_may_be_rounded() -> None:
    """The normaliser of a softmax is rounded however small a log-probability is; it spoils a divergence of 1e-5 by half a percent."""
    near = {
        "head": "hidden",
        "dtype": "float32",
        "layout": Layout(dp=2),
        "lengths": (2,),
        "masks": ("all",),
        "hidden": 1,
        "vocab": 2,
    }
    problem = Problem(spec="distill", **near, scenario={"teacher": "near"}, reduction_order="permuted")
    found = examine(dense_candidate("distill", "hidden"), problem, SimulatedWorld(problem.layout))
    assert found.agrees, found.findings


SPOILT: dict[str, Spoil] = {
    "nll": shifted_mask,
    "dpo": lambda _, o: replace(o, preference_average_log_probs=not o.preference_average_log_probs),
    "preference": every_sample,
    "clipped_pg": lambda _, o: replace(o, ratio_clip_max=10.0),
    "grpo": lambda _, o: replace(o, clip_lower=o.clip_lower + 0.05),
    "value": lambda _, o: replace(o, cliprange=None),
    "distill": lambda _, o: replace(o, kl_type="reverse" if o.kl_type == "forward" else "forward"),
    "token_logprobs": lambda _, o: replace(o, temperature=1.0),
}
"""One line changed in each."""


@pytest.mark.parametrize("name", SPECS)
def test_a_wrong_candidate_does_not(name: str) -> None:
    head = next(iter(SPECS[name].inputs))
    result = run_cell(
        Cell(dense_candidate(name, head, SPOILT[name]), Layout(), "float32"), replace(SETTINGS, shrink_calls=20)
    )
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None


def without(option: Option) -> Spoil:
    """A kernel that knows one choice of an option, its default, whatever it is told."""

    def spoil(batch: dict[str, Any], options: Any) -> Any:
        spec = next(
            spec for spec in SPECS.values() if option in spec.options and isinstance(options, spec.options_type)
        )
        values = {o.name: getattr(options, o.name) for o in spec.options}
        changed = spec.with_choice(values, option.name, option.default)
        return options if changed is None else spec.options_type(**changed)

    return spoil


def taken_for(name: str, value: Any, other: Any) -> Spoil:
    """A kernel that takes one choice of an option for another one."""
    return lambda _, o: replace(o, **{name: other}) if getattr(o, name) == value else o


DISAGREEING = Settings(shrink_calls=1)
"""What a user gets who sets nothing; but how small the example is does not matter here."""


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(n, o, id=f"{n}-{o.name}")
        for n, spec in SPECS.items()
        for o in spec.options
        if len(set(o.choices)) != 1
    ],
)
def test_an_option_that_is_ignored_is_found(name: str, option: Option) -> None:
    head = list(SPECS[name].inputs)[-1]
    result = run_cell(
        Cell(
            dense_candidate(name, head if option.name != "temperature" else "logits", without(option)),
            Layout(),
            "float32",
        ),
        DISAGREEING,
    )
    assert result.verdict is Verdict.DISAGREE


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("clipped_pg", taken_for("truncated_importance_sampling_type", "seq-mask-tis", "icepop")),
        ("clipped_pg", taken_for("truncated_importance_sampling_type", "icepop", "tis")),
        ("clipped_pg", taken_for("kl_input_clamp_value", None, 20.0)),
        ("clipped_pg", taken_for("ratio_clip_max", 0.2, 0.28)),
        ("clipped_pg", taken_for("reference_policy_kl_type", "k2", "k1")),
        ("grpo", taken_for("kl_estimator", 3, 2)),
        ("grpo", taken_for("rho_clamp_upper_bound", 0.0, 2.0)),
        ("distill", taken_for("kl_type", "mixed", "forward")),
    ],
)
def test_a_choice_that_is_taken_for_another_is_found(name: str, wrong: Spoil) -> None:
    head = list(SPECS[name].inputs)[-1]
    assert (
        run_cell(Cell(dense_candidate(name, head, wrong), Layout(), "float32"), DISAGREEING).verdict is Verdict.DISAGREE
    )


def rewards_of_differences(inputs: Any, options: Any, _mesh: Any) -> torch.Tensor:
    """NeMo-RL's order: log-ratios first, then their sum."""
    ratios = torch.where(inputs.mask, inputs.logprobs - inputs.reference_logprobs, 0.0)
    return dpo_of_rewards(sums(ratios, inputs), inputs, options)


def rewards_of_sums(inputs: Any, options: Any, _mesh: Any) -> torch.Tensor:
    """TRL's: the log-probabilities of whole sequences first."""
    policy, reference = (
        sums(torch.where(inputs.mask, x, 0.0), inputs) for x in (inputs.logprobs, inputs.reference_logprobs)
    )
    return dpo_of_rewards(policy - reference, inputs, options)


def sums(x: torch.Tensor, inputs: Any) -> torch.Tensor:
    return torch.zeros(len(inputs.cu_seqlens) - 1).index_add(0, inputs.sequence, x)


def dpo_of_rewards(rewards: torch.Tensor, inputs: Any, options: Any) -> torch.Tensor:
    losses = -torch.nn.functional.logsigmoid(options.reference_policy_kl_penalty * (rewards[0::2] - rewards[1::2]))
    return (losses * inputs.sample_mask[0::2]).sum() / (inputs.valid_sequences / 2).clamp(min=0.5)


@pytest.mark.parametrize("kernel", [rewards_of_differences, rewards_of_sums])
def test_either_order_of_sums_is_right(kernel: Any) -> None:
    """Log-probabilities of hundreds of nats that are summed apart lose digits that a sum of differences keeps."""
    declared = lossgate.candidate(
        "dpo", head="logprobs", dtypes=("float32",), supports={"reference_policy_kl_penalty": ANY}
    )(kernel)
    result = run_cell(Cell(declared, Layout(), "float32"), Settings(examples=75))
    assert result.verdict is Verdict.AGREE, result.reasons


@pytest.mark.parametrize("name", SPECS)
def test_options_say_what_they_mean(name: str) -> None:
    spec = SPECS[name]
    for option in spec.options:
        assert option.meaning
        assert option.name not in FEATURES
        assert option.allows(option.default)
    assert spec.allows({})
