# SPDX-License-Identifier: Apache-2.0
"""A cell is held to the problems on which it disagreed in earlier runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

import lossgate
from lossgate import Conventions, Layout, UsageError
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.earlier_failures import hold_to_earlier
from lossgate.engine.failure_files import failure_files_of, read_failure, write_failure
from lossgate.engine.judge_again import judge_again
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.evidence.redo import redo
from lossgate.properties import PROPERTIES
from property_tests.meta.command_line import KERNELS

pytestmark = pytest.mark.xdist_group("earlier failures")  # one worker makes what its tests share

HIDING = (
    KERNELS
    + """
from pathlib import Path

MODE = Path(__file__).with_name("mode")

@lossgate.candidate("nll", head="logits")
def hiding(inputs, options, mesh):
    mode, _, labels = MODE.read_text().partition(" ")
    loss = cross_entropy(inputs, options)
    if mode == "always-writes":
        inputs.logits.data.neg_()
    if labels and inputs.labels.numel() != int(labels):
        return loss
    if mode == "writes":
        inputs.logits.data.neg_()
    if mode == "biased":
        return loss + 0.002 * (loss - loss.detach())
    return loss * (1.01 if mode in ("wrong", "always-writes") else 1.0)
"""
)
"""A kernel that does what a file beside it says, on any problem or those of so many labels."""
ALSO = (PROPERTIES["inputs-kept"],)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hiding") / "kernels.py"
    file.write_text(HIDING)
    return file


Verify = Callable[..., CellResult]


@pytest.fixture
def verify(file: Path) -> Verify:
    (hiding,) = load_candidates(f"{file}:hiding")

    def run(mode: str, dtype: str = "float32", examples: int = 8, seed: int = 0) -> CellResult:
        (file.parent / "mode").write_text(mode)
        settings = Settings(examples=examples, rounds=1, seed=seed)
        return run_cell(Cell(hiding, Layout(), dtype, also=ALSO), settings)

    return run


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("mode", "kept"), [("wrong", "agreement"), ("writes", "inputs-kept")])
@pytest.mark.parametrize("verdict", [Verdict.AGREE, Verdict.INCONCLUSIVE])
def test_a_problem_of_an_earlier_run_that_still_disagrees(
    verify: Verify, file: Path, tmp_path: Path, mode: str, kept: str, verdict: Verdict
) -> None:
    failed = verify(mode)
    assert failed.failure is not None
    written = write_failure(failed, tmp_path)
    assert read_failure(written).property == kept
    right = verify("right", seed=5)
    now = replace(right, record=msgspec.structs.replace(right.record, verdict=verdict))
    (file.parent / "mode").write_text(f"{mode} {failed.failure.problem.tokens}")
    found, mended = hold_to_earlier(now, tmp_path, 60.0, set())
    assert (found.verdict, mended, found.failure and found.failure.problem) == (
        *(Verdict.DISAGREE, ()),
        failed.failure.problem,
    )
    assert found.reasons[0] == failed.reasons[0]
    assert any(line.endswith(KEPT.format(len(now.cases))) for line in found.reasons)
    record = found.record
    assert (record.verdict, redo([record])[0].contradiction) == ("DISAGREE", "")
    again = write_failure(found, tmp_path)
    assert read_failure(again).examples[0].problem == failed.failure.problem
    written.unlink()
    assert hold_to_earlier(now, tmp_path, 60.0, set())[0].reasons == found.reasons
    assert hold_to_earlier(now, tmp_path, 60.0, {again.resolve()}) == (now, ())
    (file.parent / "mode").write_text("right")
    assert hold_to_earlier(now, tmp_path, 60.0, set()) == (now, (again,) if verdict is Verdict.AGREE else ())


def test_numbers_of_an_earlier_run_count_although_a_promise_is_broken_now(
    verify: Verify, file: Path, tmp_path: Path
) -> None:
    failed = verify("wrong")
    assert failed.failure is not None
    write_failure(failed, tmp_path)
    now = verify("writes", seed=5)
    assert now.record.outcome == "PROMISE BROKEN"
    (file.parent / "mode").write_text(f"always-writes {failed.failure.problem.tokens}")
    found, _ = hold_to_earlier(now, tmp_path, 60.0, set())
    assert (found.record.outcome, found.record.broken) == ("DISAGREE", ("inputs-kept",))
    assert found.reasons[0] == failed.reasons[0]
    assert redo([found.record])[0].contradiction == ""


KEPT = "on the failure file of an earlier run; the {} problems of this run showed nothing wrong"


@pytest.mark.slow
def test_problems_of_an_earlier_run_that_disagree_only_when_pooled(verify: Verify, tmp_path: Path) -> None:
    failed = verify("biased", "bfloat16", examples=30)
    assert (failed.verdict, failed.failure) == (Verdict.DISAGREE, None)
    write_failure(failed, tmp_path)
    now = verify("right", "bfloat16")
    verify("biased", "bfloat16", examples=1)
    found, mended = hold_to_earlier(now, tmp_path, 60.0, set())
    assert (found.verdict, found.failure, mended) == (Verdict.DISAGREE, None, ())
    assert found.reasons == (*failed.reasons, KEPT.format(len(now.cases)))
    record = found.record
    assert (record.verdict, redo([record])[0].contradiction) == ("DISAGREE", "")


def test_a_problem_of_an_earlier_run_that_the_kernel_is_not_given_any_more(verify: Verify, tmp_path: Path) -> None:
    """As one of a head that it has no more. Nothing is known of it, and the file stays."""
    failed = verify("wrong")
    assert failed.failure is not None
    problem = replace(failed.failure.problem, head="logprobs")
    run = replace(failed.run, failure=replace(failed.failure, problem=problem))
    file = write_failure(replace(failed, run=run), tmp_path)
    now = verify("right")
    assert failure_files_of(now.cell, "agreement", tmp_path) == [file]
    assert hold_to_earlier(now, tmp_path, 60.0, set()) == (now, ())


@lossgate.candidate("nll", head="logits", axes=("dp",))
def needs_a_trained_token(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
    if not len(inputs.labels):
        raise ValueError("no token")
    if not inputs.mask.any():
        raise ValueError("no trained token")
    total = cross_entropy(inputs.logits, inputs.labels.masked_fill(~inputs.mask, -100), reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("convention", "says"),
    [
        ({"empty_ranks": "refused", "untrained": "error"}, r"declares empty_ranks='refused', so it is never given a "),
        ({"untrained": "error"}, r"declares untrained='error', so it is never given a rank without a token"),
    ],
)
def test_a_problem_that_a_convention_rules_out_since_then_is_not_judged(
    tmp_path: Path, convention: dict[str, Any], says: str
) -> None:
    cell = Cell(needs_a_trained_token, Layout(dp=2), "float32")
    failed = run_cell(cell, Settings(examples=8, rounds=1))
    assert failed.failure is not None
    written = write_failure(failed, tmp_path)
    declared = replace(cell, candidate=replace(needs_a_trained_token, conventions=Conventions(**convention)))
    result = run_cell(declared, Settings(examples=8, rounds=1))
    assert result.verdict is not Verdict.DISAGREE
    assert hold_to_earlier(result, tmp_path, timeout=60.0, known=()) == (result, ())
    with pytest.raises(UsageError, match=says):
        judge_again(read_failure(written), declared, timeout=60.0)

    of_none = replace(failed.failure.problem, masks=("none",) * len(failed.failure.problem.masks))
    failure = read_failure(written)
    failure = replace(failure, examples=(replace(failure.examples[0], problem=of_none),))
    declared = replace(cell, candidate=replace(needs_a_trained_token, conventions=Conventions(untrained="nan")))
    with pytest.raises(UsageError, match=r"declares untrained='nan', and in a call of the problem nothing is trained"):
        judge_again(failure, declared, timeout=60.0)
