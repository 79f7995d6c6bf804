# SPDX-License-Identifier: Apache-2.0
"""Tests of the search: it finds bugs, and makes the problem that shows one small."""

import gc
import re
import weakref
from itertools import count
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from kernel_bank.bugs import cross_entropy_with
from kernel_bank.cross_entropy import FLOAT32, STYLES, Style, make
from lossgate import ANY, Batch, Candidate, Layout, Outputs, Problem, TokenValues, candidate, spec
from lossgate.base.shape import Shape
from lossgate.cases.case import Case
from lossgate.cases.drawing import Draws
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.engine.trials import _DisagreementError
from lossgate.inputs import NllHidden
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld

RIGHT = make(STYLES["float32"][1])


def search(kernel: Candidate, layout: str = "single", examples: int = 200, **settings: float) -> Search:
    world = SimulatedWorld(Layout.parse(layout), settings.pop("timeout", 60.0))
    found = Search(Cell(kernel, world.layout, "float32"), world, Settings(examples=examples, **settings))  # type: ignore[arg-type]
    try:
        found.run()
    finally:
        world.close()
    return found


def right_loss(inputs: NllHidden, options: object, mesh: object) -> torch.Tensor:
    outputs = RIGHT(inputs, options, mesh)  # type: ignore[arg-type]
    assert isinstance(outputs, Outputs)
    assert outputs.loss is not None
    return outputs.loss


def last_row_is_wrong(inputs: NllHidden, options: object, mesh: object) -> Outputs:
    """Returns the right loss, but for labels on the last row of the vocabulary."""
    wrong = inputs.mask & (inputs.labels == inputs.vocab_size - 1)
    return Outputs(loss=right_loss(inputs, options, mesh) + 0.1 * wrong.sum())


@pytest.mark.parametrize("layout", ["single", "tp=2", "dp=2,cp=2"])
def test_a_bug_at_the_last_row_of_the_vocabulary_shrinks_to_a_handful_of_tokens(layout: str) -> None:
    declare = candidate(
        "nll", head="hidden", axes=("dp", "cp", "tp"), supports={"temperature": ANY, "reduction": ANY, "bias": ANY}
    )
    found = search(declare(last_row_is_wrong), layout)
    assert found.failure is not None
    problem = found.failure.problem
    assert problem.tokens <= 4
    assert problem.vocab <= 3
    assert len(problem.lengths) <= 2
    assert not problem.bias
    assert not problem.options
    assert found.shrink_calls < 200


def test_a_right_kernel_is_run_on_every_problem() -> None:
    found = search(RIGHT, examples=30)
    assert found.failure is None
    assert len(found.cases) == 30


def test_what_was_run_stays_known_when_the_deck_lets_it_go() -> None:
    """A problem that is drawn later must not get the identity of one that was freed."""
    world = SimulatedWorld(Layout())
    found = Search(Cell(RIGHT, Layout(), "float32"), world, Settings())
    placed = found._on_layout(found._deck.of_shape(Shape.of_size("64x8x32")))
    found._run_all(placed)
    found._tried.clear()
    world.close()
    drawn = weakref.ref(placed[0].entry.drawn)
    del placed
    found.cases.clear()
    gc.collect()
    kept = drawn()
    assert kept is not None
    assert id(kept) in found._used


def test_shrinking_stops_at_its_limit_with_the_smallest_problem_so_far() -> None:
    found = search(cross_entropy_with(STYLES["float32"][1], "temperature missing in backward"), shrink_calls=5)
    assert found.failure is not None
    assert found.shrink_calls == 6
    assert not found.failure.agrees


def test_shrinking_stops_when_it_has_taken_as_long_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processes each try at a deadlock takes seconds."""
    clock = count(step=20)  # seconds
    monkeypatch.setattr("lossgate.engine.trials.monotonic", lambda: next(clock))
    found = search(cross_entropy_with(STYLES["float32"][1], "temperature missing in backward"))
    assert found.failure is not None
    assert found.shrink_calls <= 4  # of 20 seconds each, in a time-out of 60


def test_the_smallest_failure_is_kept_whatever_was_tried_last() -> None:
    world = SimulatedWorld(Layout())
    wrong = cross_entropy_with(STYLES["float32"][1], "loss x1.01")
    found = Search(Cell(wrong, Layout(), "float32"), world, Settings())
    for tokens in (8, 3, 5):
        with pytest.raises(_DisagreementError):
            found._check(
                Problem(
                    spec="nll", head="hidden", dtype="float32", lengths=(tokens,), masks=("all",), hidden=2, vocab=5
                )
            )
    world.close()
    assert found.failure is not None
    assert found.failure.problem.tokens == 3


def test_a_failure_is_not_made_smaller_into_another() -> None:
    """Small problems show a wrong loss, and larger ones ranks that do not call the same."""

    def kernel(inputs: NllHidden, options: object, mesh: DeviceMesh) -> Outputs:
        loss = right_loss(inputs, options, mesh)
        if inputs.vocab_size > 3 and mesh.get_local_rank("tp") == 0:
            torch.distributed.all_reduce(torch.zeros(1), group=mesh.get_group("tp"))
        return Outputs(loss=loss + 1)

    declare = candidate("nll", head="hidden", axes=("tp",))
    found = search(declare(kernel), "tp=2", timeout=20.0)
    assert found.failure is not None
    assert found.failure.symptoms == ("CollectiveMismatch",)
    assert found.failure.problem.vocab > 3
    first, beside = found.failure.findings
    assert first.startswith("collective mismatch ")
    assert re.fullmatch(
        r"another failure, met while the problem was made smaller: loss: .*\n  on: .* vocab [123],.*", beside
    )


def test_another_exception_is_another_failure() -> None:
    def kernel(inputs: NllHidden, options: object, mesh: object) -> Outputs:
        if inputs.vocab_size <= 5:
            raise IndexError("small")
        raise KeyError("large")

    found = search(candidate("nll", head="hidden")(kernel))
    assert found.failure is not None
    first, beside = found.failure.findings
    assert "rank 0 raised KeyError: 'large'" in first
    assert found.failure.problem.vocab > 5
    assert "rank 0 raised IndexError: small" in beside


def test_a_kernel_that_is_not_deterministic_disagrees_with_the_reason() -> None:
    calls = [0]

    @candidate("nll", head="hidden")
    def moody(inputs: NllHidden, options: object, mesh: object) -> Outputs:
        calls[0] += 1
        return Outputs(loss=right_loss(inputs, options, mesh) * (2 if calls[0] % 3 == 0 else 1))

    found = search(moody, examples=60)
    assert found.failure is not None
    assert "not deterministic" in found.failure.findings[-1]


def test_a_problem_that_is_not_drawn_again_is_no_lack_of_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deck that is kept may come from a version of Hypothesis that draws others."""
    declare = candidate("nll", head="hidden")
    each = Draws.each
    monkeypatch.setattr(Draws, "each", lambda self, check, *, shrink=False: None if shrink else each(self, check))
    found = search(declare(last_row_is_wrong))
    assert found.failure is not None
    assert not any("not deterministic" in finding for finding in found.failure.findings)
    assert not found.failure.unstable


def test_a_hang_is_not_shrunk() -> None:
    hung = list[int]()

    @candidate("nll", head="hidden")
    def hanging(inputs: NllHidden, options: object, mesh: object) -> Outputs:
        if len(inputs.labels) > 1:
            hung.append(len(inputs.labels))
        while len(inputs.labels) > 1:
            pass
        return RIGHT(inputs, options, mesh)  # type: ignore[arg-type,return-value]

    found = search(hanging, timeout=0.5)
    assert found.failure is not None
    assert found.failure.failure == "Hang"
    assert len(hung) == 1, "each further try costs a time-out"


def test_a_kernel_that_always_raises_is_shown_on_the_simplest_problem() -> None:
    @candidate("nll", head="hidden")
    def raising(inputs: NllHidden, options: object, mesh: object) -> Outputs:
        raise RuntimeError("always")

    found = search(raising)
    assert found.failure is not None
    problem = found.failure.problem
    assert (problem.tokens, problem.outliers, problem.forced_labels, problem.seed) == (1, (), (), 0)


@pytest.mark.slow
def test_no_gaps_are_filled_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(RIGHT)
    found.failure = found.cases[0]
    found.surviving |= found._deck.mutants
    monkeypatch.setattr(found, "_kill", pytest.fail)
    monkeypatch.setattr(found, "_reach", pytest.fail)
    found.fill_gaps(1)


def test_a_raising_kernel_disagrees_with_the_reason() -> None:
    @candidate("nll", head="hidden")
    def raising(inputs: NllHidden, options: object, mesh: object) -> Outputs:
        if len(inputs.labels) > 2:
            raise RuntimeError("too many")
        return RIGHT(inputs, options, mesh)  # type: ignore[arg-type,return-value]

    found = search(raising)
    assert found.failure is not None
    assert found.failure.problem.tokens == 3
    assert found.failure.findings[0].startswith("rank 0 raised RuntimeError: too many")


def test_a_broken_interface_is_a_failure_like_others_and_made_small() -> None:
    @candidate("nll", head="hidden")
    def shapeless(inputs: NllHidden, options: object, mesh: object) -> torch.Tensor:
        return inputs.hidden.sum(0) if len(inputs.labels) > 2 else RIGHT(inputs, options, mesh)  # type: ignore[arg-type,return-value]

    found = search(shapeless)
    assert found.failure is not None
    assert found.failure.problem.tokens == 3
    assert found.failure.symptoms == ("CandidateError",)
    assert found.failure.findings[0].startswith("candidate 'shapeless' on rank 0 returned loss of shape")


@pytest.mark.slow
def test_problems_depend_on_the_seed_and_the_round() -> None:
    def first_seeds(seed: int, round_: int) -> list[int]:
        world = SimulatedWorld(Layout())
        found = Search(Cell(make(Style("plain", FLOAT32)), Layout(), "float32"), world, Settings(examples=8, seed=seed))
        found.run(round_)
        world.close()
        return [case.problem.seed for case in found.cases]

    assert first_seeds(0, 0) == first_seeds(0, 0)
    assert first_seeds(0, 0) != first_seeds(1, 0)
    assert first_seeds(0, 0) != first_seeds(0, 1)


def test_the_smallest_failing_case_is_kept_for_a_second_look() -> None:
    """It holds what each rank returned, so that a diagnosis runs nothing again."""
    wrong = candidate("nll", head="hidden", name="last row")(last_row_is_wrong)
    found = search(wrong)
    assert found.failure is not None
    assert found.failing_case is not None
    assert found.failing_case.problem == found.failure.problem
    assert len(found.failing_case.ranks) == 1


def test_a_failure_is_not_made_smaller_into_one_of_right_kernels() -> None:
    """The loss is infinite where a label is sure, as all are in a vocabulary of one."""

    @spec("unlikelihood_of_labels", heads=("logits",))
    def unlikelihood(values: TokenValues, batch: Batch, options: Any) -> torch.Tensor:
        losses = -torch.log1p(-values.logprobs.exp())
        return torch.where(batch.mask, losses, 0.0).sum() / batch.valid_tokens.clamp(min=1)

    factor = 2.0

    @candidate(unlikelihood, head="logits", dtypes=("float32",))
    def twice(inputs: Any, options: Any, mesh: DeviceMesh) -> torch.Tensor:
        logprobs = inputs.logits.log_softmax(-1).gather(1, inputs.labels[:, None]).squeeze(1)
        losses = -torch.log((1 - logprobs.exp()).clamp(min=1e-30))
        return factor * torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    failure = search(twice).failure
    assert failure is not None
    assert failure.problem.vocab > 1
    assert failure.problem.tokens <= 3
    factor = 1.0
    world = SimulatedWorld(Layout())
    assert run_case(Case(twice, failure.problem, world), PROPERTIES["agreement"]).agrees
    world.close()
