# SPDX-License-Identifier: Apache-2.0
"""Every known mistake changes an output of some problem. Those that never do are listed."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from lossgate import Candidate, Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import PlacedProblem
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.seams import same
from lossgate.counterfactuals.setting import Setting
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.specs.spec import Spec
from lossgate.worlds import make_world

TOKEN_BY_TOKEN = ("distill", "divergence", "label_smoothing", "softcap", "value", "z_loss")
NOTHING = {
    "no field has a NaN": {
        "NaN of *": ("clipped_pg", "dpo", "distill", "divergence", "value"),
        "NaN of [!v]*": ("grpo",),  # vllm_logprobs has some
    },
    "each token counts by itself: nothing is summed over a sequence": {
        "counts of sequences: *": TOKEN_BY_TOKEN,
        "means of the parts of sequences over cp*": TOKEN_BY_TOKEN,
        "* of each rank's own part": ("value",),
        "* over sequences where the * belongs": ("value",),
        "one sequence on each rank": TOKEN_BY_TOKEN,
        "sequences begin one token late": TOKEN_BY_TOKEN,
        "0 / 0 where a sequence *": TOKEN_BY_TOKEN,
        "parts of own tokens over *": TOKEN_BY_TOKEN,
        "metrics: parts of own tokens*": ("distill", "value", "z_loss"),
    },
    "some token is trained in each of these problems": {"0 / 0 where the batch *": ("clipped_pg", "grpo")},
    "the loss takes the mean over sequences once": {
        "means of the parts of sequences over cp, the *": ("grpo", "nll"),
    },
    "no gradient goes through a sum over a sequence, or only through its own tokens": {
        "sums over sequences reduced in forward alone": (
            *("distill", "divergence", "dpo", "grpo", "label_smoothing", "nll", "softcap", "value", "z_loss"),
        )
    },
    "no model gives a log-probability above 0": {"reference_logprobs where positive dropped": ("dpo",)},
    "the loss uses no labels": {"labels *": ("distill", "divergence")},
    "the number is there against a division by 0, or is a bound: it weighs no term": {
        "term of epsilon*": ("clipped_pg", "distill", "dpo", "nll", "preference", "value"),
        "term of rho_*": ("grpo",),
    },
    "the loss is divided by pairs, not by tokens": {
        "valid_tokens *": ("dpo", "preference"),
        "every count local over *": ("dpo", "preference"),
    },
    "sequences come in pairs": {
        "valid_sequences rounded down to a multiple of 2": ("dpo", "preference"),
        "valid_sequences rounded down to a multiple of dp": ("dpo", "preference"),
        "valid_sequences at least 1 on each rank of [cd]p": ("dpo", "preference"),
    },
    "no other option forbids it, or what it is about is switched off there": {
        "disable_ppo_ratio as False, all else kept": ("clipped_pg",),
        "force_on_policy_ratio as False, all else kept": ("clipped_pg",),
        "use_cispo as False, all else kept": ("clipped_pg",),
        "use_importance_sampling_correction as True, all else kept": ("clipped_pg",),
        "truncated_importance_sampling_* as [!N]*, all else kept": ("clipped_pg",),
    },
    "sequences are not split over cp": {"valid_sequences local over cp*": ("clipped_pg", "dpo", "preference")},
    "every token is real where there is no padding": {
        **{f"real {what}": ("nll",) for what in ("ignored", "ignored, counted so", "not shifted")},
        **{f"real one token {what}": ("nll",) for what in ("early", "late", "* on each rank*", "*, counted so")},
        "real true at the last token of each sequence*": ("nll",),
        "real true between the trained tokens of each sequence*": ("nll",),
        "real true at the * run of trained tokens of each sequence alone*": ("nll",),
        "metrics: real ignored": ("nll",),
        "real_tokens is the number of all tokens": ("nll",),
    },
    "rewards are centred and divided by their spread": {
        "rewards doubled": ("clipped_pg",),
        "rewards halved": ("clipped_pg",),
        "rewards where negative dropped": ("clipped_pg",),
    },
    "the function is even, or the same at 1 / x": {
        "softcap negated": ("softcap",),
        "beta inverted": ("divergence",),
        "beta negated": ("divergence",),
    },
    "the reference refuses such a weight": {"beta so large that it bounds nothing": ("divergence",)},
    "the entropy is a metric, without a gradient": {"entropy detached": ("nll",)},
    "the other choice is not valid, or the default says the same": {
        "positive_nll_normaliser as global": ("clipped_pg",),
        "truncated_importance_sampling_ratio_min taken from 1": ("clipped_pg",),
        "rho_clamp_lower_bound taken from 1": ("grpo",),
    },
    "where a sample is left out, these problems have their KL in the reward": {
        "term of reference_policy_kl_penalty: sample_mask is ignored": ("clipped_pg",),
    },
    "the term reads nothing of it": {
        "term of sft_loss_weight: counts are those of one rank of cp": ("dpo",),
        "term of z_loss_weight: labels are shifted twice": ("z_loss",),
    },
    "its metric counts tokens": {
        "metrics: masked tokens as 0": ("z_loss",),
        "metrics: means of chunks added up": ("distill",),
    },
    "the other model's logits have no padding rows": {"padding rows in the softmax": ("divergence",)},
    "the gradient of each token has another size": {"all above the sum ignored": ("clipped_pg", "grpo")},
    "fields of this loss are not shifted": {
        "mask not shifted": ("value",),
        "old_values not shifted": ("value",),
        "returns not shifted": ("value",),
        "reference_logprobs not shifted": ("dpo",),
    },
    "a kernel that returns the loss has no upstream gradients of two outputs of tokens": {
        "upstream gradient of logprobs of two columns, read as if dense": (
            *("clipped_pg", "dpo", "grpo", "label_smoothing", "nll", "z_loss"),
        )
    },
    "ranks of dp seldom have as many tokens as each other": {
        "softmax reduced over dp*": ("clipped_pg", "dpo", "grpo", "token_logprobs"),
        "sum of exponentials reduced over dp*": ("clipped_pg", "dpo", "grpo", "token_logprobs"),
    },
    "the largest is above 0, and the smallest below": {
        "vocab_max_logits_max: 0 of ranks without a token": ("nll",),
        "vocab_min_logits_min: 0 of ranks without a token": ("nll",),
        "rho_max: 0 of ranks without a token": ("grpo",),
    },
}
"""Why mistakes change nothing on the problems that are tried: their names, and the specs."""

FEW = 5
"""Problems on which a mistake is tried that is listed: if one of them changes, it should not be."""


def asked(candidate: Candidate, *layouts: str) -> Iterator[Setting]:
    """Yields the problems that a cell tries first, with all metrics that its options give."""
    for layout in map(Layout.parse, layouts):
        world = make_world("simulated", layout, 60.0)
        placed = Search(Cell(candidate, layout, "float32"), world, Settings()).first_problems()
        world.close()
        for one in placed:
            yield setting_of(candidate, PlacedProblem(one.entry.bound, one.problem))


def setting_of(candidate: Candidate, placed: PlacedProblem) -> Setting:
    """Returns the setting of a problem, with all metrics that its options give."""
    returned = [o for o in placed.bound.dense.outputs(placed.bound.bound_spec) if o.kind != "gradient"]
    return Setting(placed, returned, candidate.tokens, candidate.tiles)


def with_one_trained(candidate: Candidate, settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yields problems with the options of others, and with one trained token in a group."""
    for one in settings:
        problem, size = one.placed.problem, candidate.spec.group_size
        changed = {"lengths": (2,) * size, "masks": ("all", *("none",) * (size - 1)), "layout": Layout(dp=2, cp=2)}
        problem = replace(problem, **changed, forced_labels=(), outliers=(), vocab_split="balanced")
        yield setting_of(candidate, PlacedProblem(BoundProblem(candidate.spec, problem), problem))


def changes(one: Counterfactual, setting: Setting) -> bool:
    wrong, right = one.run(setting) or {}, setting.bound.reference(setting.returned)
    return any(not same(x, right[output]) for output, x in wrong.items() if output in right)


def reason(name: str, spec: str) -> str | None:
    for why, listed in NOTHING.items():
        if any(spec in specs and fnmatchcase(name, pattern) for pattern, specs in listed.items()):
            return why
    return None


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_every_mistake_changes_something(spec: Spec) -> None:
    torch.set_num_threads(1)
    head = next(iter(spec.inputs))
    plain = replace(dense_candidate(spec, head), differentiable=spec.outputs, tiles={"token": (4,), "vocab": (5,)})
    packed = replace(plain, tokens="packed")
    problems = [*asked(plain, "dp=2,cp=2,tp=2", "single", "cp=3", "tp=3"), *asked(packed, "cp=2", "dp=2")]
    bank = counterfactuals_of(spec, head)
    listed = {name for name in bank if reason(name, spec.name)}
    dead = [name for name, one in bank.items() if name not in listed and not any(changes(one, s) for s in problems)]
    few = [*with_one_trained(plain, problems)] if dead else []
    assert [name for name in dead if not any(changes(bank[name], s) for s in few)] == []
    # Where the loss is 0, a bound looks like a weight, and a mistake in its term may change it.
    seldom = {name for name in listed if name.startswith("term of rho_")}
    alive = [name for name in listed - seldom if any(changes(bank[name], s) for s in problems[:FEW])]
    assert alive == []


def test_every_reason_has_a_mistake() -> None:
    known = {spec.name: counterfactuals_of(spec, next(iter(spec.inputs))) for spec in SPECS.values()}
    for listed in NOTHING.values():
        for pattern, specs in listed.items():
            for spec in specs:
                assert any(fnmatchcase(name, pattern) for name in known[spec]), (pattern, spec)
