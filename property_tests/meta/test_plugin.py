# SPDX-License-Identifier: Apache-2.0
"""Tests of the pytest plugin: ``lossgate.suite`` in a user's test file."""

import json
from pathlib import Path

import pytest

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
"""


@pytest.fixture
def user(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_kernels=TESTS)
    pytester.makepyprojecttoml("[tool.lossgate.profiles.few]\nexamples = 1\nrounds = 1\n")
    return pytester


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_items_evidence_and_failures(user: pytest.Pytester, workers: tuple[str, ...]) -> None:
    result = user.runpytest_inprocess("-v", "-p", "no:cacheprovider", "--lossgate-evidence", "out.jsonl", *workers)
    result.assert_outcomes(passed=4, failed=2)
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
            "  loss: 1.01* times the reference, where rounding explains 1 +- *",
            "  on: * tokens in 1 sequence *",
            "  replay: lossgate replay .lossgate/failure-wrong-agreement-float32-single-*.json",
        ]
    )
    result.stdout.fnmatch_lines(["lossgate: 6 cells: *", "lossgate: evidence added to out.jsonl"])
    cells = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert sorted(cell["verdict"] for cell in cells) == ["AGREE"] * 4 + ["DISAGREE", "INCONCLUSIVE"]
    assert len(list(Path(".lossgate").iterdir())) == 1


def test_an_inconclusive_item_fails(user: pytest.Pytester) -> None:
    result = user.runpytest_inprocess("-p", "no:cacheprovider", "-k", "few")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["INCONCLUSIVE  right  bfloat16  single", "  a kernel that computes *; raise --examples*"]
    )


def test_a_known_failure_passes(pytester: pytest.Pytester) -> None:
    source = f"{Path(__file__).parents[2]}/ci/candidates/pytorch.py:torch_loss_parallel_uneven"
    pytester.makepyfile(
        "import lossgate\n"
        "from lossgate.declaration.loading import load_candidates\n"
        f"test_known = lossgate.suite(*load_candidates({source!r}))\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lossgate-evidence", "out.jsonl")
    result.assert_outcomes(passed=1)
    (cell,) = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert (cell["verdict"], cell["known_failure"]) == ("DISAGREE", "torch-4")


def test_the_profile_of_the_command_line_wins(user: pytest.Pytester) -> None:
    result = user.runpytest_inprocess("-p", "no:cacheprovider", "-k", "few", "--lossgate-profile", "dev")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lossgate-profile", "huge"), "unknown profile 'huge'; expected one of dev, ci, nightly, release"),
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
