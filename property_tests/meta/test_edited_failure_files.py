# SPDX-License-Identifier: Apache-2.0
"""Failure files that somebody edited: each is a line and exit code 2, or a verdict that is right.

The kernels are right, so that no edit may give DISAGREE. Where the problem shows nothing, AGREE
would say too much.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernel_bank.right import KERNELS
from lossgate import Layout, UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.engine import judge_again
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell
from lossgate.engine.failure_files import read_failure
from lossgate.judge.comparison import Comparison
from lossgate.judge.statistics import SCALE
from lossgate.losses import find_spec
from lossgate.problems.problem import Problem
from lossgate.specs.outputs import LOSS
from property_tests.meta.command_line import Lossgate

NAMES = (
    "nll_hidden_parallel_trained",
    "token_logprobs_hidden_log_softmax_entropy_of_logprobs_trained",
    "grpo_logits_where_coarse_logits",
    "dpo_logprobs_by_index_add_by_logsigmoid_float32",
)


def file_of(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Returns a failure file of a right kernel."""
    example = {"problem": msgspec.to_builtins(problem), "statistics": {}, "findings": ["x"], "symptoms": ["loss"]}
    return {
        "candidate": candidate.source,
        "reasons": ["x"],
        "examples": [example],
        "pooled": False,
        "versions": {"torch": "1"},
        "property": "agreement",
        "world": "simulated",
        "device": "cpu",
        "symptoms": ["loss"],
        "causes": ["cause: x", "to do: x"],
        "earlier": [],
        "checksum": "",
    }


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays without a process for each, which takes a second to start."""
    monkeypatch.setattr(judge_again, "has_source", lambda candidate: False)


@pytest.fixture(params=NAMES)
def given(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A failure file of a right kernel, with a typical problem of it."""
    candidate = KERNELS[request.param]
    (problem,) = sample_problems(candidate, Layout(cp=2), "float32", 1, 7)
    return file_of(candidate, problem)


VALUES = (
    *(None, True, 0, 1, -1, 3, 1.5, 1e-9, 1001.0, 1e308, 2**31, 2**63, 10**30, "", "x", "none", "both", "logprobs"),
    *("float64", "bfloat16", "padded", "even", "gloo ", "cuda", "bad-inputs", [], [0], [-1], [[]], ["none"], [[0, 0]]),
    *([[10**9, 0]], [[0, 0, 1e30]], {}, {"x": 1}, {"dp": 65}, {"cp": 0}, {"temperature": 0.0}, {"temperature": "x"}),
)


def edited(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what was edited, and the file: each field left out, unknown, and with other values."""
    for place in ((), ("examples", 0), ("examples", 0, "problem")):
        fields = [*_at(given, place), "other"]
        for field in fields:
            for value in VALUES:
                changed = copy.deepcopy(given)
                _at(changed, place)[field] = value
                yield f"{'.'.join(map(str, place))} {field}={value!r}", changed
            if field != "other":
                changed = copy.deepcopy(given)
                del _at(changed, place)[field]
                yield f"{'.'.join(map(str, place))} without {field}", changed


def _at(values: Any, place: tuple[Any, ...]) -> dict[str, Any]:
    for part in place:
        values = values[part]
    return values


@pytest.mark.slow
def test_every_edit_is_a_line_or_no_disagreement(given: dict[str, Any], folder: Path, lossgate: Lossgate) -> None:
    codes = set[int]()
    for what, changed in edited(given):
        (folder / "edited.json").write_text(json.dumps(changed))
        done = lossgate("replay", "edited.json", "--trust", "--timeout", "30")
        codes.add(done.returncode)
        if done.returncode == 2:
            assert (done.stdout, done.stderr.count("\n")) == ("", 1), what
            assert done.stderr.startswith("lossgate: "), what
            assert len(done.stderr) < 800, what
        else:
            assert (done.returncode, done.stderr) in ((0, ""), (3, "")), f"{what}: {done.stdout}{done.stderr}"
            assert done.stdout.startswith("AGREE  " if done.returncode == 0 else "INCONCLUSIVE  "), what
    assert codes >= {0, 2}


PROBLEM = Problem(
    spec="nll",
    head="hidden",
    dtype="float32",
    layout=Layout(cp=2),
    lengths=(5, 3),
    masks=("all", "all"),
    hidden=4,
    vocab=7,
)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_std": 0.0}, "problem: logit_std=0.0; expected a number from 1e-09 to 1000"),
    ({"logit_std": 1e9}, "problem: logit_std=1000000000.0; expected a number from 1e-09 to 1000"),
    ({"label_boost": -1.0}, "problem: label_boost=-1.0; expected a number from 0 to 100"),
    ({"seed": -1}, "problem: seed=-1; expected a number from 0 to 4294967295"),
    ({"seed": 2**32}, "problem: seed=4294967296; expected a number from 0 to 4294967295"),
    ({"lengths": [], "masks": []}, "problem: lengths=(), hidden=4, vocab=7, pad_to_multiple=1, group_size=1; expected"),
    ({"lengths": [5, -3]}, "problem: lengths=(5, -3), hidden=4, vocab=7, pad_to_multiple=1, group_size=1; expected"),
    ({"lengths": [0, 0]}, "expected at least one token, no negative length, and positive sizes"),
    (
        {"lengths": [10**12, 3]},
        "expected sizes of at most 16,777,216, at most 131,072 sequences, and at most",
    ),
    (
        {"pad_to_multiple": 10**9},
        "expected sizes of at most 16,777,216, at most 131,072 sequences, and at most",
    ),
    (
        {"vocab": 10**9},
        "expected sizes of at most 16,777,216, at most 131,072 sequences, and at most",
    ),
    ({"vocab": 2**24, "lengths": [2**10, 0]}, "a tensor of 17,179,869,184 numbers; expected 8,589,934,592"),
    ({"vocab": 0}, "expected at least one token, no negative length, and positive sizes"),
    ({"hidden": -4}, "expected at least one token, no negative length, and positive sizes"),
    ({"masks": ["all"]}, "problem: 1 masks for 2 sequences; give one for each"),
    ({"masks": ["all", "some"]}, "Invalid enum value 'some'"),
    (
        {"dtype": "float64"},
        "problem: unknown dtype 'float64'; that is the dtype of the reference, and of",
    ),
    ({"dtype": "bfloat16", "rounded_to": "tf32"}, "problem: rounded_to='tf32'; expected None, or a format that is"),
    ({"layout": {"dp": 65}}, "layout dp=65 has 65 ranks; at most 64 can be simulated"),
    ({"layout": {"cp": 2, "pp": 2}}, "problem: its layout has the unknown axis 'pp'; expected one of dp, cp, tp"),
    ({"layout": {"tp": 8}}, "layout larger than the problem: a vocabulary of 7 has too few rows for tp=8 ranks"),
    ({"layout": {"tp": 2}, "vocab_split": "even"}, "a vocabulary of 7 does not split evenly over tp=2 ranks"),
    ({"forced_labels": [[8, 0]]}, "problem: forced_labels has (8, 0); expected a token below 8 and a row below 7"),
    ({"forced_labels": [[0, 7]]}, "problem: forced_labels has (0, 7); expected a token below 8 and a row below 7"),
    ({"outliers": [[0, 4, 1.0]]}, "problem: outliers has (0, 4); expected a token below 8 and a column below 4"),
    ({"outliers": [[0, 0, 1e30]]}, "problem: outliers has the value 1e+30; expected a number from -1000 to 1000"),
    ({"bias": True, "vocab": 1}, "problem: bias=True with vocab=1; expected vocab=2 or more"),
    ({"group_size": 2}, "problem: spec 'nll' has sequences in groups of 1, but the problem has group_size=2"),
    ({"head": "nose"}, "has head 'hidden', but the problem has 'nose'; choose a candidate of head 'nose'"),
    ({"spec": "nul"}, "has spec 'nll', but the problem has 'nul'; choose a candidate of spec 'nul'"),
    ({"cotangent": "token_entropy"}, "has gradients of loss, but the problem has cotangent='token_entropy'"),
    ({"cotangent": "both"}, "has gradients of loss, but the problem has cotangent='both'"),
    ({"scenario": {"old": "new"}}, "problem: spec 'nll' has no scenario 'old'; there are none"),
    ({"options": {"temprature": 2.0}}, "problem: spec 'nll' has no option 'temprature'; did you mean 'temperature'?"),
    ({"options": {"temperature": -1.0}}, "problem: option temperature is -1.0; spec 'nll' allows"),
    ({"seeds": 3}, "problem: unknown field 'seeds'; did you mean 'seed'?"),
]
"""Fields of a problem, and what is said of them."""


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_said_of_a_problem(folder: Path, lossgate: Lossgate, changes: dict[str, Any], said: str) -> None:
    given = file_of(KERNELS[NAMES[0]], PROBLEM)
    given["examples"][0]["problem"] |= changes
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json", "--trust")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"lossgate: .*\n\Z", done.stderr)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("kernel", "changes", "said"),
    [
        ("nll_logits_log_softmax_float32", {"bias": True}, "does not support bias=True, but the problem has it"),
        (
            "nll_logprobs_selected_float32",
            {"outliers": [[0, 0, 8.0]]},
            "problem: head 'logprobs' has no logits, so no outliers; expected outliers=()",
        ),
        (
            "grpo_logits_where_coarse_logits",
            {"rounded_to": None},
            "(rounded_to=None), so its tokens may lie too near to a kink of the loss; run verify to get a problem for",
        ),
        (
            "grpo_logits_where_coarse_logits",
            {"scenario": {"ratios": "odd"}},
            "problem: scenario ratios is 'odd'; ",
        ),
        (
            "nll_logits_log_softmax_float32",
            {"layout": {"tp": 2}},
            "is not sharded over tp, but the problem's",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_said_of_a_problem_of_another_kernel(
    folder: Path, lossgate: Lossgate, kernel: str, changes: dict[str, Any], said: str
) -> None:
    (problem,) = sample_problems(KERNELS[kernel], Layout(), "float32", 1, 7)
    given = file_of(KERNELS[kernel], problem)
    given["examples"][0]["problem"] |= changes
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json", "--trust")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout
    assert said in done.stderr


def test_a_problem_that_does_not_suit_its_spec_is_refused_without_a_candidate() -> None:
    with pytest.raises(UsageError, match="problem: head 'logits' has no bias; expected bias=False"):
        BoundProblem(find_spec("nll"), dataclasses.replace(PROBLEM, head="logits", bias=True))
    with pytest.raises(UsageError, match="problem: spec 'nll' has no head 'values'; expected one of hidden"):
        BoundProblem(find_spec("nll"), dataclasses.replace(PROBLEM, head="values"))


@pytest.mark.parametrize(
    ("excluded", "changes"),
    [("sequence", {"lengths": [5, 0]}), ("rank", {"lengths": [8, 0], "layout": {"dp": 2}})],
)
def test_a_kernel_is_not_given_what_it_excludes(
    folder: Path, lossgate: Lossgate, excluded: str, changes: dict[str, Any]
) -> None:
    """Its verdict would be about what its caller never has."""
    never = f"supports={{'empty': lossgate.Excluded('{excluded}', because='never seen')}}, axes=('dp',), name='never'"
    with (folder / "kernels.py").open("a") as kernels:
        kernels.write(f"\nnever = lossgate.candidate('nll', head='logits', {never})(right.kernel)\n")
    given = file_of(KERNELS[NAMES[0]], PROBLEM) | {"candidate": "kernels.py:never"}
    given["examples"][0]["problem"] |= {"head": "logits", "layout": {}, **changes}
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json")
    assert (done.returncode, done.stdout) == (2, "")
    said = f"candidate 'never' declares that it is never given empty '{excluded}', but the problem has it"
    assert said in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}", "Object missing required field `candidate`"),
        (b"\xff\xfe{\x00", "JSON is malformed"),
        (b'{"candidate": "\xff"}', "no UTF-8"),
        (b"[" * 100_000, "its values are nested too deeply"),
        (b'{"candidate": NaN}', "JSON is malformed"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_failure_file(folder: Path, lossgate: Lossgate, content: bytes, said: str) -> None:
    (folder / "edited.json").write_bytes(content)
    done = lossgate("replay", "edited.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lossgate: edited.json is no failure file of this version of lossgate: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("causes", "said"),
    [
        ([3], "Expected `str`, got `int` - at `$.causes["),
        ([["x"]], "Expected `str`, got `array` - at `$.causes["),
        ("x", "Expected `array`, got `str` - at `$.causes"),
        (["x" * 2001], "Expected `str` of length <= 2000 - at `$.causes["),
        (["x"] * 11, "Expected `array` of length <= 10 - at `$.causes"),
        (["\x1b[2J"], r"field causes has the line '\x1b[2J'; expected printable characters only"),
        (["x", "x\ny"], r"field causes has the line 'x\ny'; expected printable characters only"),
        (["\u202ex"], r"field causes has the line '\u202ex'; expected printable characters only"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_causes_are_a_few_lines_of_text(folder: Path, lossgate: Lossgate, causes: Any, said: str) -> None:
    given = file_of(KERNELS[NAMES[0]], PROBLEM) | {"causes": causes}
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json", "--trust")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_a_file_without_causes_is_read(folder: Path) -> None:
    """Files of earlier versions have none."""
    given = file_of(KERNELS[NAMES[0]], PROBLEM)
    del given["causes"]
    (folder / "old.json").write_text(json.dumps(given))
    assert read_failure(folder / "old.json").causes == ()


@pytest.mark.parametrize("cut", [1, 40, 200, 900])
def test_a_file_that_was_cut_is_one_line(folder: Path, lossgate: Lossgate, cut: int) -> None:
    (folder / "edited.json").write_text(json.dumps(file_of(KERNELS[NAMES[0]], PROBLEM))[:-cut])
    done = lossgate("replay", "edited.json")
    assert done.returncode == 2
    assert "edited.json is no failure file of this version of lossgate: " in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"masks": ["none", "none"]}, "every output is 0 in the reference, for example because no token is trained"),
        ({"lengths": [1, 1]}, "every output is 0 in the reference, for example because no token is trained"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_problem_that_shows_nothing_is_inconclusive(
    folder: Path, lossgate: Lossgate, changes: dict[str, Any], said: str
) -> None:
    coarse = "nll_hidden_log_softmax_coarse_logits"
    given = file_of(KERNELS[coarse], PROBLEM)
    given["examples"][0]["problem"] |= changes
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json", "--trust")
    assert (done.returncode, done.stderr) == (3, ""), done.stdout
    assert done.stdout.startswith(f"INCONCLUSIVE  {coarse}  ")
    assert said in done.stdout
    assert "mended" not in done.stdout


@pytest.mark.parametrize(
    ("held_to", "changes", "said"),
    [
        ("gradients-add-up", {"masks": ["none", "none"]}, "INCONCLUSIVE"),
        ("gradients-add-up", {}, "AGREE"),
        ("microbatches", {"masks": ["none", "none"]}, "INCONCLUSIVE"),
    ],
)
def test_a_problem_that_shows_nothing_of_a_property_is_inconclusive(
    folder: Path, lossgate: Lossgate, held_to: str, changes: dict[str, Any], said: str
) -> None:
    given = file_of(KERNELS[NAMES[0]], PROBLEM) | {"property": held_to}
    given["examples"][0]["problem"] |= changes
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json", "--trust")
    assert done.stdout.startswith(f"{said}  "), done.stdout


def test_a_problem_of_which_rounding_explains_anything_shows_nothing() -> None:
    cell = Cell(KERNELS[NAMES[0]], Layout(), "float32")
    one = Comparison(output=LOSS, values={SCALE: 0.0}, limits={SCALE: 2.0})
    silent = CaseResult(problem=PROBLEM, comparisons=(one,))
    assert judge_again.why_it_shows_nothing(cell, [silent]) == (
        "rounding explains even a result of zero, so this problem shows nothing"
    )
    telling = CaseResult(problem=PROBLEM, comparisons=(dataclasses.replace(one, limits={SCALE: 0.1}),))
    assert judge_again.why_it_shows_nothing(cell, [silent, telling]) == ""
    unfit = CaseResult(problem=PROBLEM, fits=False)
    assert judge_again.why_it_shows_nothing(cell, [unfit]) == "this problem says nothing about property agreement"


def test_a_property_that_does_not_apply_is_one_line(folder: Path, lossgate: Lossgate) -> None:
    given = file_of(KERNELS[NAMES[0]], PROBLEM) | {"property": "bad-inputs"}
    (folder / "edited.json").write_text(json.dumps(given))
    done = lossgate("replay", "edited.json", "--trust")
    assert (done.returncode, done.stdout) == (2, "")
    assert "property 'bad-inputs' does not apply to candidate " in done.stderr


def test_a_problem_that_is_too_large_for_the_machine_is_refused(
    folder: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process would be ended by the system, as if the kernel had crashed."""
    monkeypatch.setattr(judge_again.os, "sysconf", lambda name: 16)
    (folder / "edited.json").write_text(json.dumps(file_of(KERNELS[NAMES[0]], PROBLEM)))
    done = lossgate("replay", "edited.json", "--trust")
    assert done.returncode == 2
    assert "the problem has tensors of 56 numbers, which need about 0 GiB" in done.stderr
