# SPDX-License-Identifier: Apache-2.0
"""Problems that a candidate says it is never given: ``lossgate.Excluded`` in ``supports``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from lossgate import Candidate, Excluded, Layout, Option, Problem, UsageError, candidate
from lossgate.adequacy.set_cover import required_goals
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.drawing import Draws
from lossgate.cases.large import LARGE_VOCABULARY, MANY_SEQUENCES, MANY_TOKENS, large_shapes
from lossgate.cases.placement import sample_problems
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.engine.shared_declaration import able_alike
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.specs.option import LARGE_SIZES
from lossgate.strategies import DrawnProblem
from lossgate.worlds import SimulatedWorld
from property_tests.meta.command_line import Lossgate
from property_tests.meta.evidence_lines import cells_in

SETTINGS = Settings(examples=12, rounds=8, shrink_calls=4)
OF_SEQUENCES = Excluded("token", because="the trainer has one for each answer")
CLAMPED = Excluded("extreme", because="the trainer clamps log-ratios")
FULL = Excluded("rank", "sequence", because="the sampler fills every rank")
PLAIN: dict[str, Any] = {"use_rho_correction": False}


def grpo_of_rows(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """GRPO with one advantage for each sequence, of padded rows."""

    def rows(field: Tensor) -> Tensor:
        return inputs.to_rows(torch.where(inputs.mask, field, 0.0))

    logprobs, mask = rows(inputs.logprobs), inputs.to_rows(inputs.mask)
    advantages = inputs.per_sequence(inputs.advantages)[:, None]
    ratio = (logprobs - rows(inputs.old_logprobs)).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.272))
    distance = (logprobs - rows(inputs.reference_logprobs)).clamp(-40, 40)
    token = policy + 0.05 * (torch.expm1(-distance) + distance)
    return torch.where(mask, token, 0).sum() / inputs.valid_tokens.clamp(min=1)


def declared(kernel: Callable[..., Any] = grpo_of_rows, **supports: Any) -> Candidate:
    options: dict[str, Any] = {"head": "logprobs", "axes": ("dp",), "dtypes": ("float32",), "name": "kernel"}
    return candidate("grpo", supports=PLAIN | supports, **options)(kernel)


def verify(kernel: Candidate, layout: str = "single") -> CellResult:
    also = tuple(one for one in PROPERTIES.values() if not one.needs_adequacy and one.applies(kernel))
    return run_cell(Cell(kernel, Layout.parse(layout), "float32", also=also), SETTINGS)


# Declarations

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: Excluded(because="so"), "Excluded(because='so'): expected the choices that are left out"),
    "no name": (lambda: Excluded(3, because="so"), "Excluded(3, because='so'): expected the choices"),  # pyright: ignore[reportArgumentType]
    "no reason": (
        lambda: Excluded("far", because=" "),
        "Excluded('far', because=' '): expected the reason in one line",
    ),
    "two lines": (
        lambda: Excluded("far", because="a\nb"),
        "expected the reason in one line, such as lossgate.",
    ),
    "a value": (
        lambda: declared(ratios="inside"),
        "candidate(supports['ratios']='inside'): expected lossgate.Excluded(..., because='...') with one of inside",
    ),
    "unknown choice": (
        lambda: declared(ratios=Excluded("extrem", because="so")),
        "the scenario has no choice 'extrem'; did you mean 'extreme'?",
    ),
    "unknown scenario": (
        lambda: declared(ratio=CLAMPED),
        "'ratio' is no scenario of spec 'grpo'; did you mean 'ratios'? (expected one of empty, large, ratios, ",
    ),
    "an option": (
        lambda: declared(beta=CLAMPED),
        "For an option, name the supported values",
    ),
    "all": (
        lambda: declared(generation=Excluded("near", "everywhere", "equal", because="so")),
        "no choice is left; keep one of near, everywhere, equal",
    ),
    "nothing, as others are left": (
        lambda: declared(generation_everywhere=Excluded("far", because="so")),
        "it leaves out nothing: problems have 'far' only if both is left out; name that, too",
    ),
    "all of those on request": (
        lambda: declared(advantages_per=Excluded("token", "sequence", because="so")),
        "no choice is left; keep one of token, sequence",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_a_declaration(wrong: str) -> None:
    call, message = WRONG[wrong]
    with pytest.raises(UsageError) as raised:
        call()
    assert message in str(raised.value)


def test_specs_have_no_option_or_scenario_of_a_name_that_every_spec_has() -> None:
    for spec in SPECS.values():
        names = [*spec.supported_options, *spec.situations]
        assert len(names) == len(set(names)), spec.name


# Which problems are drawn


def drawn(kernel: Candidate) -> list[Problem]:
    return Draws(kernel, "float32", "some", 300).all()


def chosen(problem: Problem, scenario: str) -> str:
    (own,) = (one for one in SPECS["grpo"].scenarios if one.name == scenario)
    return problem.scenario.get(scenario, own.default)


def test_no_problem_has_what_is_excluded() -> None:
    assert {chosen(one, "ratios") for one in drawn(declared())} == {"inside", "everywhere", "on-policy", "extreme"}
    assert {chosen(one, "ratios") for one in drawn(declared(ratios=CLAMPED))} == {"inside", "everywhere", "on-policy"}


def test_what_is_on_request_is_drawn_when_all_else_is_excluded() -> None:
    assert {chosen(one, "advantages_per") for one in drawn(declared())} == {"token"}
    assert {chosen(one, "advantages_per") for one in drawn(declared(advantages_per=OF_SEQUENCES))} == {"sequence"}


@pytest.mark.parametrize("spec", ["grpo", "dpo"])
def test_no_sequence_is_empty(spec: str) -> None:
    def named(**supports: Any) -> Candidate:
        return candidate(spec, head="logprobs", axes=("dp",), supports=supports)(grpo_of_rows)

    assert any(0 in one.lengths for one in drawn(named()))
    full = drawn(named(empty=Excluded("sequence", because="so")))
    assert all(min(one.lengths) > 0 for one in full)
    assert len({len(one.lengths) for one in full}) > 3
    assert min(one.tokens for one in full) == SPECS[spec].group_size


@pytest.mark.parametrize("layout", ["dp=2", "dp=8"])
def test_no_rank_is_empty(layout: str) -> None:
    def idle(problem: Problem) -> bool:
        parts = problem.partition
        return any(not sum(problem.lengths[s] for s in parts.sequences(dp)) for dp in range(parts.layout.dp))

    given = {name: declared(empty=Excluded(name, because="so")) for name in ("sequence", "rank")}
    found = {name: sample_problems(one, Layout.parse(layout), "float32", 200, 0) for name, one in given.items()}
    assert any(map(idle, found["sequence"]))
    assert not any(map(idle, found["rank"]))
    assert any(0 in one.lengths for one in found["rank"])
    assert len(found["rank"]) > 40  # enough of them fit


def test_nothing_changes_for_candidates_that_exclude_nothing() -> None:
    """A scenario with one choice takes no draw."""
    spec = SPECS["grpo"]
    assert any(len(set(one.choices)) == 1 for one in spec.scenarios)
    names = {name for name in spec.all_goals if name.startswith("advantages_per")}
    assert names == set()
    assert "advantages_per" not in {name for one in drawn(declared()) for name in one.scenario}


def of_sampler(problem: Problem) -> tuple[bool, bool]:
    """Returns whether a log-probability of the sampler is not known, and whether a ratio is far."""
    fields = BoundProblem(SPECS["grpo"], problem).batch.fields
    ratios = fields["old_logprobs"] - fields["vllm_logprobs"]
    return bool(ratios.isnan().any()), bool((ratios.abs() > 10).any())


@pytest.mark.parametrize(
    ("gone", "there"),
    [(("not known",), (False, True)), (("far",), (True, False)), (("far", "not known"), (False, False))],
)
def test_what_is_not_known_of_the_sampler_and_far_ratios_are_left_out_apart(
    gone: tuple[str, ...], there: tuple[bool, bool]
) -> None:
    def parted(**supports: Any) -> Candidate:
        return candidate("grpo", head="logprobs", supports=supports)(grpo_of_rows)

    apart = parted(generation_everywhere=Excluded("both", *gone, because="so"))
    seen = [of_sampler(one) for one in drawn(apart)[:60]]
    assert (any(unknown for unknown, _ in seen), any(far for _, far in seen)) == there
    lost = set(required_goals(parted(), Layout(), "float32")) - set(required_goals(apart, Layout(), "float32"))
    assert ("sampler's log-prob not known" in lost, "rho beyond 10 nats" in lost) == tuple(not one for one in there)
    assert len(lost) == 2 - sum(there)


@pytest.mark.parametrize("spec", ["grpo", "clipped_pg"])
@pytest.mark.parametrize(("gone", "low", "high"), [("above", True, False), ("below", False, True)])
def test_extreme_ratios_are_left_out_one_side_at_a_time(spec: str, gone: str, low: bool, high: bool) -> None:
    parted = Excluded("both", gone, because="so")
    kernel = candidate(spec, head="logprobs", supports={"ratios_extreme": parted})(grpo_of_rows)
    before = {"grpo": "old_logprobs", "clipped_pg": "prev_logprobs"}[spec]
    ratios = []
    for problem in (one for one in drawn(kernel) if one.scenario.get("ratios") == "extreme"):
        batch = BoundProblem(SPECS[spec], problem).batch
        ratios.append(batch.policy - batch.fields[before])
    every = torch.cat(ratios)
    assert (bool((every < -19).any()), bool((every > 9).any())) == (low, high)


@pytest.mark.parametrize("layout", ["tp=3", "tp=8"])
def test_no_shard_is_empty(layout: str) -> None:
    def empty(kernel: Candidate) -> list[bool]:
        problems = sample_problems(kernel, on, "float32", 200, 0)
        return [0 in {shard.rows for shard in one.partition.vocab_shards} for one in problems]

    def named(**supports: Any) -> Candidate:
        return candidate("nll", head="logits", axes=("tp",), supports=supports | {"vocab_split": lossgate.ANY})(
            grpo_of_rows
        )

    on, full = Layout.parse(layout), named(empty=Excluded("shard", because="so"))
    assert any(empty(named()))
    assert not any(empty(full))
    assert len(empty(full)) > 100
    every, without = (set(required_goals(one, on, "float32")) for one in (named(), full))
    assert every - without == {"shard without a row"}


def test_large_problems_are_left_out_apart() -> None:
    left = {gone: large_shapes(declared(large=Excluded(gone, because="so"))) for gone in LARGE_SIZES.choices}
    assert left == {
        "tokens": [MANY_SEQUENCES],
        "sequences": [MANY_TOKENS],
        "vocabulary": [MANY_TOKENS, MANY_SEQUENCES],
    }
    of_logits = candidate("nll", head="logits", supports={"large": Excluded("tokens", because="so")})(grpo_of_rows)
    assert large_shapes(of_logits) == [MANY_SEQUENCES, LARGE_VOCABULARY]


def test_advantages_are_those_of_sequences() -> None:
    for problem in drawn(declared(advantages_per=OF_SEQUENCES))[:20]:
        fields = BoundProblem(SPECS["grpo"], problem).batch.fields
        own = [fields["advantages"][fields["sequence"] == s].unique() for s in range(len(problem.lengths))]
        assert all(len(one) <= 1 for one in own)


def test_goals_that_are_out_of_reach_are_not_asked_for() -> None:
    layout = Layout(dp=2)
    every = set(required_goals(declared(), layout, "float32"))
    narrow = declared(empty=FULL, ratios=Excluded("extreme", "everywhere", because="so"))
    gone = every - set(required_goals(narrow, layout, "float32"))
    of_clips = {f"token {side} the clip, A {sign} 0" for side in ("below", "above") for sign in "<>"}
    assert gone == {"rank without a sequence", "ratios: extreme", "ratios: everywhere", *of_clips}


# Verdicts


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "dp=4"])
def test_a_kernel_that_needs_what_it_says_agrees(layout: str) -> None:
    def strict(inputs: Any, options: Any, mesh: Any) -> Tensor:
        assert inputs.sequences > 0
        assert int(inputs.lengths.min()) > 0
        assert len(inputs.labels) < 200
        return grpo_of_rows(inputs, options, mesh)

    slow = Excluded(*LARGE_SIZES.choices, because="it takes minutes")
    found = verify(declared(strict, advantages_per=OF_SEQUENCES, empty=FULL, large=slow), layout)
    assert found.verdict is Verdict.AGREE, found.reasons
    assert found.record.excluded["large tokens"] == "it takes minutes"
    assert "microbatches" in {one.name for one in found.record.properties}


NEEDS = {"advantages_per": OF_SEQUENCES, "empty": FULL}


@pytest.mark.slow
@pytest.mark.parametrize("without", NEEDS)
def test_a_kernel_that_does_not_say_it_disagrees(without: str) -> None:
    def strict(inputs: Any, options: Any, mesh: Any) -> Tensor:
        assert int(inputs.lengths.min()) > 0, "an empty sequence"
        return grpo_of_rows(inputs, options, mesh)

    said = {name: one for name, one in NEEDS.items() if name != without}
    found = verify(declared(strict, **said), "dp=2")
    assert found.verdict is Verdict.DISAGREE
    assert {"empty": "min()", "advantages_per": "Excluded('token', because='...')"}[without] in " ".join(found.reasons)


@pytest.mark.slow
def test_a_mistake_beside_what_is_excluded_is_found() -> None:
    """Advantages of sequences are not those of their neighbours."""

    def wrong(inputs: Any, options: Any, mesh: Any) -> Tensor:
        return grpo_of_rows(replace(inputs, advantages=inputs.advantages.roll(1)), options, mesh)

    assert verify(declared(wrong, advantages_per=OF_SEQUENCES)).verdict is Verdict.DISAGREE


@pytest.mark.slow
def test_who_excludes_too_much_is_inconclusive() -> None:
    """Without clipped ratios nothing tells DAPO from CISPO."""
    narrow = Excluded("everywhere", "extreme", because="so")
    found = verify(declared(advantages_per=OF_SEQUENCES, ratios=narrow))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "loss_fn=dapo as cispo" in found.reasons[0]


@pytest.mark.slow
def test_options_that_only_excluded_problems_tell_apart_are_not_verified() -> None:
    """If the reference policy is always the policy, every penalty is 0, whatever its weight."""
    equal = Excluded("near", "far", because="so")
    kernel = declared(dense_candidate(SPECS["grpo"], "logprobs").kernel, reference=equal, beta=lossgate.ANY)
    found = run_cell(Cell(kernel, Layout(), "float32"), replace(SETTINGS, rounds=1))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "computes beta=0.05 as 0.0" in found.reasons[0]
    assert (
        "without what supports excludes, reference far and reference near: exclude less, or drop beta"
        in (found.reasons[0])
    )


def test_a_problem_that_a_candidate_is_not_given_is_refused() -> None:
    problem = Draws(declared(), "float32", "some", 1).all()[0]
    with pytest.raises(UsageError, match=r"'kernel' declares that it is never given advantages_per 'token', but the"):
        DrawnProblem(problem, SPECS["grpo"]).check(declared(advantages_per=OF_SEQUENCES))


def test_two_kernels_are_compared_on_what_both_are_given() -> None:
    a, b = able_alike(declared(ratios=CLAMPED, empty=FULL), declared(ratios=Excluded("inside", because="so")))
    assert a.excludes == b.excludes
    assert a.exclusions == {
        "empty rank": FULL.because,
        "empty sequence": FULL.because,
        "ratios extreme": "the trainer clamps log-ratios; so",
        "ratios inside": "the trainer clamps log-ratios; so",
    }


def test_a_scenario_of_a_spec_may_not_be_called_empty() -> None:
    empty = Option(name="empty", meaning="what is empty", default="a", choices=("a", "b"))
    with pytest.raises(UsageError, match="an option or another scenario has this name; rename one"):
        lossgate.spec("mine", scenarios=(empty,))


# What people and programs read

FILE = """
import lossgate

@lossgate.candidate(
    "nll", head="logprobs", dtypes=("float32",), axes=("dp",),
    supports={"empty": lossgate.Excluded("rank", because="the sampler fills every rank")},
)
def kernel(inputs, options, mesh):
    if not len(inputs.labels):
        raise ValueError("no token")
    return -inputs.logprobs[inputs.mask].sum() / inputs.valid_tokens.clamp(min=1)
"""


def test_sequences_in_the_opposite_order_leave_no_rank_empty() -> None:
    """Then the second of two ranks has what the first had."""
    given = {"lengths": (0, 4, 3), "masks": ("all",) * 3, "layout": Layout(dp=2)}
    problem = Problem(spec="grpo", head="logprobs", dtype="float32", hidden=1, vocab=5, options=PLAIN, **given)
    world = SimulatedWorld(Layout(dp=2))
    fits = [
        PROPERTIES["sequence-order"].fits(Case(kernel, one, world))
        for kernel in (declared(), declared(empty=Excluded("rank", because="so")))
        for one in (problem, replace(problem, lengths=(2, 4, 3)))
    ]
    world.close()
    assert fits == [True, True, False, True]


@pytest.mark.slow
def test_what_is_excluded_stands_in_the_verdict_and_in_evidence(folder: Path, lossgate: Lossgate) -> None:
    (folder / "kernels.py").write_text(FILE)
    given = "verify", "kernels.py", "--layout", "dp=2", "--evidence", "out.jsonl"
    done = lossgate(*given)
    assert done.returncode == 0
    remark = [
        "Not verified, because the candidates leave out such problems:",
        "  empty rank: the sampler fills every rank: 1 cell of kernel",
        "",
    ]
    assert done.stdout.splitlines()[-4:-1] == remark
    (record,) = cells_in(folder / "out.jsonl")
    assert record.excluded == {"empty rank": "the sampler fills every rank"}
    assert remark[1] in lossgate("report", "out.jsonl").stdout.splitlines()
    shown = lossgate("report", "out.jsonl", "--cell", "kernel").stdout.splitlines()
    assert "  not given: empty rank, the sampler fills every rank" in shown
