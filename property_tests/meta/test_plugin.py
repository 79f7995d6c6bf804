# SPDX-License-Identifier: Apache-2.0
"""Tests of the pytest plugin: ``lossgate.suite`` in a user's test file."""

import importlib
from pathlib import Path

import pytest

from lossgate.engine.cell import Verdict
from lossgate.evidence.records import EndRecord, RunRecord
from lossgate.evidence.writer import EvidenceError
from property_tests.meta.evidence_lines import cells_in, records_in
from property_tests.meta.made_results import made_result

importlib.import_module("torch._dynamo")  # else pytester forgets it after a test, and it can be loaded only once

pytest_plugins = ["pytester"]

TESTS = """
import pytest, torch, lossgate

def cross_entropy(inputs):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)

@lossgate.candidate("nll", head="logits", axes=("dp",))
def right(inputs, options, mesh):
    return cross_entropy(inputs)

@lossgate.candidate("nll", head="logits")
def wrong(inputs, options, mesh):
    return cross_entropy(inputs) * 1.01

test_right = lossgate.suite(right, layouts=["single", "dp=2"])
test_wrong = lossgate.suite(wrong, dtypes=["float32"])
test_few = lossgate.suite(right, layouts=["single"], dtypes=["bfloat16"], profile="few")

@pytest.fixture(autouse=True)
def _few_problems(request, monkeypatch):
    if request.node.originalname == "test_few":  # only one in each round, beside what is looked for
        monkeypatch.setattr("lossgate.engine.search.choose", lambda placed, *_: placed[:1])
        monkeypatch.setattr("lossgate.engine.search.Search.asks_mistakes", False)
"""


@pytest.fixture
def user(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_kernels=TESTS)
    pytester.makepyprojecttoml("[tool.lossgate.profiles.few]\nexamples = 1\nrounds = 1\n")
    return pytester


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_items_evidence_and_failures(
    user: pytest.Pytester, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # pytest cuts its summary to the terminal
    result = user.runpytest_inprocess("-v", "-p", "no:cacheprovider", "--lossgate-evidence", "out.jsonl", *workers)
    result.assert_outcomes(passed=4, failed=2)
    # Tests in this process look for no cause.
    first = "cause: loss and the gradient of logits: multiplied by 1.01" if workers else "loss: got *, want *"
    output = result.stdout.str()
    for item in (
        "test_right[agreement-single-float32]",
        "test_right[agreement-dp=2-bfloat16]",
        "test_wrong[agreement-single-float32]",
    ):
        assert item in output
    result.stdout.fnmatch_lines(
        [
            "DISAGREE  wrong  float32  single",
            "  loss: got *, want *; absolute difference *, relative difference 0.01",
            "  loss: 1.01* times the reference; rounding explains 1 +- *",
            "  on: * tokens in 1 sequence *",
            "  replay: lossgate replay .lossgate/failure-wrong-agreement-float32-single-*.json",
            f"FAILED test_kernels.py::test_wrong[[]agreement-single-float32[]] - Failed: DISAGREE: {first}*",
        ]
    )
    result.stdout.fnmatch_lines(
        [
            "lossgate: 6 cells: 4 AGREE, 1 DISAGREE, 1 INCONCLUSIVE; * comparisons",
            "lossgate: evidence added to out.jsonl",
        ]
    )
    cells = cells_in(Path("out.jsonl"))
    assert sorted(cell.verdict for cell in cells) == ["AGREE"] * 4 + ["DISAGREE", "INCONCLUSIVE"]
    run, *_, end = records_in(Path("out.jsonl"))
    assert isinstance(run, RunRecord)
    assert isinstance(end, EndRecord)
    assert {cell.run for cell in cells} == {run.run} == {end.run}
    assert end.planned is not None
    assert sorted(end.planned) == sorted(cell.key for cell in cells)
    (replay,) = [cell.replay for cell in cells if cell.replay]
    assert replay.startswith("lossgate replay .lossgate/failure-wrong-agreement-float32-single-")
    assert len(list(Path(".lossgate").iterdir())) == 1


def test_an_item_is_held_to_the_problems_of_earlier_runs(
    user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own problems may not show what those did."""
    chosen = ("-p", "no:cacheprovider", "-k", "test_wrong")
    user.runpytest_inprocess(*chosen).assert_outcomes(failed=1)
    monkeypatch.setattr(
        "lossgate.engine.run_cell.run_cell",
        lambda cell, _: made_result(cell, Verdict.AGREE),
    )
    result = user.runpytest_inprocess(*chosen)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  loss: got *, want *", "  on the failure file of an earlier run; *"])
    result.stdout.no_fnmatch_line("*rounding explains*")
    assert len([*Path(".lossgate").iterdir()]) == 1


def test_an_inconclusive_item_fails(user: pytest.Pytester) -> None:
    result = user.runpytest_inprocess("-p", "no:cacheprovider", "-k", "few")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["INCONCLUSIVE  right  bfloat16  single", "  * problems are too few for AGREE; raise --examples*"]
    )


@pytest.mark.slow
def test_a_known_failure_passes(pytester: pytest.Pytester) -> None:
    source = f"{Path(__file__).parents[2]}/ci/candidates/pytorch.py:torch_loss_parallel_uneven"
    pytester.makepyfile(
        "import lossgate\n"
        "from lossgate.declaration.loading import load_candidates\n"
        f"test_known = lossgate.suite(*load_candidates({source!r}))\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lossgate-evidence", "out.jsonl")
    result.assert_outcomes(passed=1)
    (cell,) = cells_in(Path("out.jsonl"))
    assert cell.known_failure is not None
    assert (cell.verdict, cell.known_failure.name, cell.known_failure.expected) == ("DISAGREE", "torch-4", True)


def test_cells_that_were_selected_and_not_verified_are_named_at_the_end(user: pytest.Pytester) -> None:
    user.runpytest_inprocess("-x", "-p", "no:cacheprovider", "-k", "wrong or few", "--lossgate-evidence", "out.jsonl")
    *_, end = records_in(Path("out.jsonl"))
    assert isinstance(end, EndRecord)
    assert end.planned is not None
    assert (end.cells, len(end.planned)) == (1, 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_evidence_that_cannot_be_written_ends_the_run_before_the_work(user: pytest.Pytester) -> None:
    result = user.runpytest_inprocess("-p", "no:cacheprovider", "--lossgate-evidence", "/dev/full")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--lossgate-evidence /dev/full: can't be written: No space left on device" in result.stderr.str()
    assert "wrong" not in result.stdout.str()


@pytest.mark.slow
def test_evidence_that_is_lost_on_the_way_is_no_success(user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EvidenceError("the disk is full")

    monkeypatch.setattr("lossgate.evidence.writer.EvidenceWriter.cell", fail)
    result = user.runpytest_inprocess("-p", "no:cacheprovider", "-k", "right and single", "--lossgate-evidence", "out")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["lossgate: the disk is full; this run leaves no evidence that a gate accepts"])


@pytest.mark.slow
def test_the_profile_of_the_command_line_wins(user: pytest.Pytester) -> None:
    result = user.runpytest_inprocess("-p", "no:cacheprovider", "-k", "few", "--lossgate-profile", "dev")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lossgate-profile", "huge"), "unknown profile 'huge'; expected one of dev, quick, ci, nightly, release"),
        (
            ("--lossgate-evidence", "no/such/folder"),
            "--lossgate-evidence no/such/folder: can't be written: No such file or directory",
        ),
    ],
)
def test_bad_options_end_the_run_with_a_message(
    user: pytest.Pytester, arguments: tuple[str, ...], message: str
) -> None:
    result = user.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert result.ret != 0
    assert message in result.stdout.str() + result.stderr.str()


def test_nothing_is_printed_and_torch_not_loaded_without_items(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_plain(): assert 'torch' not in sys.modules")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert "lossgate:" not in result.stdout.str()


def test_a_layout_that_a_candidate_cannot_do_is_a_warning(user: pytest.Pytester) -> None:
    user.makepyfile(test_kernels=f"{TESTS}\ntest_more = lossgate.suite(right, layouts=['single', 'tp=2'])")
    result = user.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", "-W", "default")
    result.stdout.fnmatch_lines(["*PytestWarning: right: tp=2 is left out, because its axes are dp"])
    assert "test_more[agreement-single-float32]" in result.stdout.str()
    assert "test_more[agreement-tp=2" not in result.stdout.str()


def test_a_suite_has_layouts_of_at_most_as_many_ranks_as_it_says(user: pytest.Pytester) -> None:
    user.makepyfile(test_kernels=f"{TESTS}\ntest_two = lossgate.suite(right, ranks=2, dtypes=['float32'])")
    result = user.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider")
    own = [line for line in result.stdout.lines if "test_two" in line]
    assert [line.rpartition("::")[2] for line in own] == [
        "test_two[agreement-single-float32]",
        "test_two[agreement-dp=2-float32]",
    ]


def test_a_suite_may_have_every_layout(user: pytest.Pytester) -> None:
    suites = "\n".join(
        f"test_{name} = lossgate.suite(right, ranks=8, matrix={name!r}, dtypes=['float32'])"
        for name in ("covering", "full")
    )
    user.makepyfile(test_kernels=f"{TESTS}\n{suites}")
    result = user.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider")
    counts = [sum(f"test_{name}[" in line for line in result.stdout.lines) for name in ("covering", "full")]
    assert counts == [4, 8]
