# SPDX-License-Identifier: Apache-2.0
"""Tests of what becomes of failure files: replayed after the kernel has changed, one or all of
them, trusted or not, and removed once their cell agrees.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lossgate import Problem
from lossgate.engine.judge_again import listed
from property_tests.meta.command_line import KERNELS, Done, Lossgate, in_a_process
from property_tests.meta.evidence_lines import cells_in

FEW = ("--layout", "single", "--dtype", "float32", "--examples", "8")
MENDED = "  the failure is mended: the kernel agrees on this problem now"
EXACT = "  it fails exactly as when the file was written"


def change(folder: Path, factor: str) -> None:
    """Writes the kernels with another mistake in ``wrong``; with factor 1.0 it has none."""
    (folder / "kernels.py").write_text(KERNELS.replace("1.01 if", f"{factor} if"))
    (folder / ".lossgate").mkdir(exist_ok=True)


def failure_in(folder: Path) -> Path:
    (file,) = (folder / ".lossgate").glob("*.json")
    return file


def replayed(folder: Path, *flags: str, file: str | None = None) -> Done:
    """Replays in a process of its own: this one has the kernels as they were."""
    done = in_a_process(folder, "replay", file or str(failure_in(folder).relative_to(folder)), *flags)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def failed(folder: Path, lossgate: Lossgate) -> Path:
    """A folder in which ``wrong`` was verified, and has a failure file."""
    assert lossgate("verify", "kernels.py:wrong", *FEW).returncode == 1
    return folder


@pytest.mark.slow
def test_a_mended_kernel_is_said_to_be_mended(failed: Path) -> None:
    assert replayed(failed).stdout.endswith(f"{EXACT}\n")
    change(failed, "1.0")
    done = replayed(failed)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("AGREE  wrong  float32  single\n  on: ")
    assert done.stdout.endswith(f"{MENDED}\n")


@pytest.mark.slow
def test_a_kernel_with_other_numbers_still_disagrees(failed: Path) -> None:
    change(failed, "1.02")
    done = replayed(failed)
    assert done.returncode == 1
    assert done.stdout.endswith(
        "  it still disagrees in grad of logits and loss, with other numbers than in the file: the kernel, its spec or "
        "the machine has changed\n"
    )


# What verify said of the cause


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.slow
def test_a_replay_shows_the_cause_that_verify_named(failed: Path, lossgate: Lossgate) -> None:
    """To whoever gets the file: only verify looks for it."""
    verified = lossgate("verify", "kernels.py:wrong", *FEW).stdout
    (cause,) = re.findall(r"^  cause: (.*)$", verified, re.MULTILINE)
    kept = json.loads(failure_in(failed).read_text())["causes"]
    assert kept[0].startswith(f"cause: {cause}")
    edit(failure_in(failed), causes=[kept[0], "to do: multiply by nothing"])
    lines = lossgate("replay", str(failure_in(failed))).stdout.splitlines()
    at = lines.index("  to do: multiply by nothing")
    assert lines[at - 1] == f"  verify said of the {kept[0]}"
    assert lines[at + 1].startswith("  loss: got ")
    assert lines[-1] == EXACT


@pytest.mark.slow
def test_what_was_the_cause_is_not_said_of_another_failure(failed: Path, lossgate: Lossgate) -> None:
    """Nor of another kernel or problem, nor where the failure is gone."""
    file = failure_in(failed)
    (failed / "others.py").write_text(KERNELS)
    assert "verify said of the cause: " in lossgate("replay", str(file)).stdout
    assert "verify said" not in lossgate("replay", str(file), "--candidate", "others.py:wrong").stdout
    change(failed, "1.0")
    assert "verify said" not in replayed(failed).stdout
    change(failed, "1.02")
    assert "verify said of the cause: " in replayed(failed).stdout
    (failed / "kernels.py").write_text(
        KERNELS.replace("return cross_entropy(inputs, options) *", "return None or 0.0 *")
    )
    assert "it disagrees differently than when the file was written" in (other := replayed(failed).stdout)
    assert "verify said" not in other
    change(failed, "1.01")
    text = json.loads(file.read_text())
    text["examples"][0]["problem"]["seed"] += 1
    file.write_text(json.dumps(text))
    assert (again := replayed(failed)).returncode == 1
    assert "verify said" not in again.stdout


@pytest.mark.slow
def test_a_kernel_that_fails_otherwise_says_so(failed: Path) -> None:
    file = failed / "kernels.py"
    file.write_text(file.read_text() + "\nwrong = lossgate.candidate('nll', head='logits', name='wrong')(shapeless)\n")
    file.write_text(
        file.read_text().replace("def wrong(", "def _other(").replace('@lossgate.candidate("nll", head=', "", 0)
    )
    done = replayed(failed)
    assert done.returncode == 1
    assert (
        "it disagrees differently than when the file was written: then in grad of logits and loss, now in "
        "CandidateError" in done.stdout
    )


@pytest.mark.slow
def test_other_versions_are_named_where_the_failure_is_gone(
    failed: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel need not be what has changed."""
    file = failure_in(failed)
    values = json.loads(file.read_text())
    values["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(values))
    again = lossgate("replay", str(file), "--candidate", "kernels.py:right")
    assert (again.returncode, again.stdout.count("\n")) == (0, 2)
    change(failed, "1.0")
    done = replayed(failed)
    assert re.search(
        r"  the failure is gone: .*; but torch went from 1\.0 to \S+ since the file was written\n\Z", done.stdout
    )


@pytest.mark.slow
def test_nothing_is_said_to_be_mended_on_another_problem(failed: Path) -> None:
    file = failure_in(failed)
    values = json.loads(file.read_text())
    values["examples"][0]["problem"] |= {"lengths": [2], "seed": 3}
    file.write_text(json.dumps(values))
    change(failed, "1.0")
    assert "the problems may have been edited since the file was written" in replayed(failed).stdout


@pytest.mark.slow
def test_a_kernel_that_failed_where_nothing_is_trained_is_mended(folder: Path, lossgate: Lossgate) -> None:
    """The reference is 0 there. That a problem says little does not hide that its failure is
    gone.
    """
    dividing = KERNELS.replace(".clamp(min=1)", "")
    (folder / "kernels.py").write_text(dividing)
    assert lossgate("verify", "kernels.py:right", *FEW).returncode == 1
    assert json.loads(failure_in(folder).read_text())["examples"][0]["problem"]["lengths"] == [1]
    (folder / "kernels.py").write_text(KERNELS)
    done = replayed(folder)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, MENDED)


@pytest.mark.slow
def test_all_failure_files_of_a_folder(failed: Path, lossgate: Lossgate) -> None:
    assert lossgate("verify", "kernels.py:shapeless", *FEW).returncode == 1
    (failed / ".lossgate/broken.json").write_text("{}")
    (failed / ".lossgate/notes.txt").write_text("no failure file")
    change(failed, "1.0")
    done = in_a_process(failed, "replay", "--all")
    assert done.returncode == 1
    first, second, summary = done.stdout.splitlines()
    assert re.fullmatch(r"DISAGREE  shapeless  float32  single  \.lossgate/failure-shapeless-.*\.json: .*", first)
    assert re.fullmatch(
        r"AGREE  wrong  float32  single  \.lossgate/failure-wrong-.*\.json: the failure is mended: .*", second
    )
    assert summary == "3 failure files in .lossgate: 1 AGREE, 1 not replayed, 1 DISAGREE"
    assert re.fullmatch(r"lossgate: \.lossgate/broken\.json is no failure file of this version.*\n", done.stderr)


@pytest.mark.slow
def test_several_failure_files(failed: Path, lossgate: Lossgate) -> None:
    """As a shell names them: ``lossgate replay .lossgate/*.json``."""
    file = failure_in(failed).relative_to(failed)
    (failed / "again.json").write_text(file.read_text())
    done = lossgate("replay", str(file), "again.json")
    first, second, summary = done.stdout.splitlines()
    assert (first.partition(": ")[0], second.partition(": ")[0]) == (
        f"DISAGREE  wrong  float32  single  {file}",
        "DISAGREE  wrong  float32  single  again.json",
    )
    assert (done.returncode, summary) == (1, "2 failure files: 2 DISAGREE")


@pytest.mark.slow
def test_the_exit_code_of_all_is_that_of_the_worst(failed: Path, lossgate: Lossgate) -> None:
    folder = failed / "some"
    folder.mkdir()
    assert lossgate("replay", "--all", "some") == Done(0, "0 failure files in some\n", "")
    (folder / "broken.json").write_text("{}")
    assert lossgate("replay", "--all", "some").returncode == 2
    failure_in(failed).rename(folder / "a.json")
    assert lossgate("replay", "--all", "some", "--candidate", "kernels.py:right").returncode == 2
    assert lossgate("replay", "--all", "some").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay"], "replay: nothing named; expected a failure file, as verify writes it, or --all"),
        (
            ["replay", "--all"],
            ".lossgate: no such folder; verify writes failure files to .lossgate, or to the folder",
        ),
        (["replay", "--all", "kernels.py"], "kernels.py: no such folder; "),
        (["replay", "."], ". is a folder; replay all failure files in it: lossgate replay --all ."),
        (["replay", "--all", ".", "--script", "x.py"], "replay: --script writes one script of one failure file"),
        (["replay", "a.json", "b.json", "--script", "x.py"], "replay: --script writes one script of one failure file"),
        (["replay", "--all", ".", "other"], "replay: --all takes one folder, not 2; leave out --all to replay files"),
    ],
)
def test_bad_use_of_replay_is_one_line(lossgate: Lossgate, arguments: list[str], said: str) -> None:
    done = lossgate(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"lossgate: {said}")


# Trust

MARK = "\nfrom pathlib import Path\nPath({mark!r}).touch()\n"


def naming(file: Path, candidate: str) -> str:
    """Changes the candidate that a failure file names; returns the file."""
    values: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"candidate": candidate}))
    return str(file)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("flags", [(), ("--script", "script.py")], ids=["replay", "script"])
def test_code_outside_the_working_folder_is_not_run(
    failed: Path, lossgate: Lossgate, tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "evil.py").write_text(KERNELS + MARK.format(mark=str(other / "was-run")))
    (failed / "linked.py").symlink_to(other / "evil.py")
    for place in (str(other / "evil.py"), f"../{other.name}/evil.py", "linked.py"):
        file = naming(failure_in(failed), f"{place}:wrong")
        done = lossgate("replay", file, *flags)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"lossgate: {file} names the candidate ")
        assert f"whose code is in {other / 'evil.py'}, outside the working folder; " in done.stderr
        assert "add --trust if you trust the file, or name the candidate: --candidate file.py:name" in done.stderr
    assert not (other / "was-run").exists()
    assert lossgate("replay", file, "--candidate", "kernels.py:wrong").returncode == 1
    assert not (other / "was-run").exists()
    assert lossgate("replay", file, "--trust").returncode == 1
    assert (other / "was-run").exists()


def test_an_installed_module_is_run_only_if_trusted(failed: Path, lossgate: Lossgate) -> None:
    file = naming(failure_in(failed), "antigravity.kernels:wrong")
    done = lossgate("replay", file)
    assert done.returncode == 2
    assert re.search(r"whose code is in \S+antigravity\.py, outside the working folder", done.stderr)


@pytest.mark.slow
def test_kernels_that_come_along_are_trusted(failed: Path, lossgate: Lossgate) -> None:
    right = naming(failure_in(failed), "lossgate.dense_candidates:dense_nll_logits")
    assert lossgate("replay", right).returncode == 0


@pytest.mark.slow
def test_what_is_not_trusted_does_not_stop_the_others(failed: Path, lossgate: Lossgate) -> None:
    text = failure_in(failed).read_text()
    naming(failure_in(failed), "/elsewhere/kernels.py:wrong")
    (failed / ".lossgate/own.json").write_text(text)
    done = lossgate("replay", "--all")
    assert done.stdout.endswith("2 failure files in .lossgate: 1 not replayed, 1 DISAGREE\n")


def test_the_command_that_verify_shows_runs(failed: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever verified a kernel trusts it, wherever it lies."""
    work = failed / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    done = lossgate("verify", "../kernels.py:wrong", *FEW)
    (command,) = re.findall(r"^  replay: lossgate (.*)$", done.stdout, re.MULTILINE)
    assert command.endswith(".json --trust")
    assert lossgate(*command.split()).stdout.endswith(f"{EXACT}\n")


# Files of earlier runs


@pytest.mark.slow
def test_the_failure_files_of_a_cell_that_agrees_are_removed(failed: Path) -> None:
    """Those of other cells, of other candidates, and those that somebody edited or renamed stay."""
    text = failure_in(failed).read_text()
    others = [
        failed / ".lossgate" / name
        for name in ("renamed.json", "failure-wrong-agreement-float32-single-00000000.json", "failure-x.json")
    ]
    for other in others:
        other.write_text(text)
    change(failed, "1.0")
    for cell in (["kernels.py:right"], ["kernels.py:wrong", "--layout", "dp=2"], ["kernels.py:wrong", "--seed", "1"]):
        before = {*(failed / ".lossgate").iterdir()}
        done = in_a_process(failed, "verify", *cell, *(FEW[2:] if "dp=2" in cell else FEW))
        assert (done.returncode, done.stderr) == (3, "") or (done.returncode, done.stderr) == (0, ""), done.stdout
        if cell[-1] != "1":
            assert {*(failed / ".lossgate").iterdir()} == before
    assert {*(failed / ".lossgate").iterdir()} == {*others}


@pytest.mark.slow
def test_a_cell_that_still_fails_keeps_one_file(failed: Path) -> None:
    first = failure_in(failed)
    change(failed, "1.02")
    assert in_a_process(failed, "verify", "kernels.py:wrong", *FEW).returncode == 1
    assert failure_in(failed) != first


HIDING = KERNELS.replace("1.01 if inputs.labels.numel() > 2", "1.01 if {some}")


@pytest.mark.slow
def test_a_kernel_that_disagrees_on_the_problem_of_an_earlier_run_disagrees(folder: Path, lossgate: Lossgate) -> None:
    """A run with fewer problems, or another seed, need not find the failure again."""
    (folder / "kernels.py").write_text(HIDING.format(some="inputs.labels.numel() > 2"))
    assert lossgate("verify", "kernels.py:wrong", *FEW).returncode == 1
    problem = json.loads(failure_in(folder).read_text())["examples"][0]["problem"]
    shape = sum(problem["lengths"]), problem["vocab"]
    (folder / "kernels.py").write_text(HIDING.format(some=f"tuple(inputs.logits.shape) == {shape}"))
    again = ("verify", "kernels.py:wrong", *FEW, "--seed", "5")
    assert in_a_process(folder, *again, "--failures", "x").returncode == 0, "this seed finds it again; choose another"
    done = in_a_process(folder, *again, "--evidence", "out.jsonl")
    assert (done.returncode, done.stderr) == (1, "")
    said = done.stdout.split("DISAGREE  wrong  float32  single\n")[1].splitlines()
    assert re.match(r"  loss: got \S+, want \S+; absolute difference \S+, relative difference 0\.01$", said[0])
    line = "  on the failure file of an earlier run; the [0-9]+ problems of this run showed nothing wrong"
    assert any(re.fullmatch(line, one) for one in said)
    (cell,) = cells_in(folder / "out.jsonl")
    assert cell.failure is not None
    assert cell.verdict == "DISAGREE"
    for kept in (cell.failure.problem, json.loads(failure_in(folder).read_text())["examples"][0]["problem"]):
        assert Problem.from_builtins(kept) == Problem.from_builtins(problem)


@pytest.mark.slow
def test_known_failures_stay(failed: Path) -> None:
    """Also where another candidate declares the file its own, in the folder of failures."""
    file = failure_in(failed)
    change(failed, "1.0")
    known = f"KnownFailure(name='x', example=__import__('pathlib').Path({str(file)!r}))"
    with (failed / "kernels.py").open("a") as kernels:
        kernels.write(
            f"\nfrom dataclasses import replace\nkept = replace(wrong, name='kept', known_failure=lossgate.{known})\n"
        )
    assert in_a_process(failed, "verify", "kernels.py:wrong", "kernels.py:kept", *FEW).returncode == 1
    assert file.exists()


@pytest.mark.slow
def test_nothing_but_failure_files_appears_in_the_folder_of_the_user(folder: Path) -> None:
    """Making a problem smaller had Hypothesis write a folder of its own."""
    assert in_a_process(folder, "verify", "kernels.py:wrong", *FEW).returncode == 1
    assert {file.name for file in folder.iterdir()} - {"__pycache__"} == {"kernels.py", ".lossgate"}
    assert in_a_process(folder, "replay", "--all").returncode == 1
    assert {file.name for file in folder.iterdir()} - {"__pycache__"} == {"kernels.py", ".lossgate"}


def test_words_for_what_has_changed() -> None:
    assert listed(["b", "a", "c", "a"]) == "a, b and c"
    assert listed(["a"]) == "a"
