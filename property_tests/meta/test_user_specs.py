# SPDX-License-Identifier: Apache-2.0
"""A user's own spec, as ``docs/how-to/own-loss.md`` says, in a folder outside the repository.

The code is that of the page, and every command is a process of its own.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import lossgate
from lossgate import UsageError
from lossgate.cases.drawn_problem import DrawnProblem
from lossgate.declaration.loading import find_specs, is_name_of_a_spec, load_all_candidates, load_candidates
from lossgate.strategies import problems
from property_tests.docs.markdown import ROOT, blocks_of
from property_tests.warm_python import warm_commands

BLOCKS = list(blocks_of(ROOT / "docs/how-to/own-loss.md"))
FILES = {block.directives["file"]: block.text for block in BLOCKS if "file" in block.directives}
FOCAL, MARGIN = FILES["focal.py"], FILES["margin.py"]
SPEC, _, KERNELS = FOCAL.partition("@lossgate.candidate")
(NOTEBOOK,) = (block.text for block in BLOCKS if block.kind == "python" and "check()\n" in block.text)

SMALL = ("--dtype", "float32", "--examples", "4")
BOTH = {("AGREE", "right"), ("DISAGREE", "detached")}
EXACT = "it fails exactly as when the file was written"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns ``run(*arguments)``, which runs Python in the folder, by default as ``lossgate``."""

    def run(
        *arguments: str,
        program: tuple[str, ...] = ("-m", "lossgate"),
        at: Path = tmp_path,
        stdin: str = "",
        code: int = 0,
        path: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        given = [str(path)] if path else []
        environment = {
            **os.environ,
            "COLUMNS": "200",
            "PYTHONPATH": os.pathsep.join([*given, os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [warm_commands() / "python", *program, *arguments],
            cwd=at,
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    return run


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def kernels(of: str, imports: str = "") -> str:
    """Returns the kernels of the page without their spec, which they name or import."""
    text = f"import torch\n\nimport lossgate\n{imports}\n\n@lossgate.candidate{KERNELS}"
    return text.replace("candidate(focal, ", f"candidate({of}, ")


def outcomes(output: str) -> set[tuple[str, str]]:
    """Returns the verdict and the candidate of each cell."""
    return {(m[1], m[2]) for m in re.finditer(r"^(\w+)  (\w+)  float32  [\w=,]+(?::|$)", output, re.MULTILINE)}


def replay_of(output: str) -> list[str]:
    """Returns the arguments of the command that the output shows; twice, from pytest where CI is
    set.
    """
    (shown,) = set(re.findall(r"^ *replay: lossgate (replay \S+)", output, re.MULTILINE))
    return shown.split()


# Command line


@pytest.mark.slow
def test_a_wrong_kernel_is_caught_shrunk_and_replayed(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "focal.py", FOCAL)
    done = run("verify", "focal.py", "--layout", "single", *SMALL, "--evidence", "out.jsonl", code=1)
    assert outcomes(done.stdout) == BOTH
    assert re.search(r"^  on: [1-3] tokens? in 1 sequence ", done.stdout, re.MULTILINE), done.stdout
    (failure,) = (tmp_path / ".lossgate").iterdir()

    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    for at, file in ((tmp_path, [replay_of(done.stdout)[1]]), (elsewhere, [str(failure), "--trust"])):
        again = run("replay", *file, at=at, code=1)
        assert EXACT in again.stdout
        assert re.search(r"^  grad of hidden: got .*; greatest absolute difference", again.stdout, re.MULTILINE)

    side_by_side = run("verify", "focal.py", "--layout", "single", *SMALL, "--jobs", "2", code=1)
    assert outcomes(side_by_side.stdout) == BOTH
    assert [*(tmp_path / ".lossgate").iterdir()] == [failure]  # the same failure, to the last digit

    report = run("report", "out.jsonl", code=1)
    assert "DISAGREE  detached  float32  single" in report.stdout
    assert "2 cells: 1 AGREE, 1 DISAGREE" in report.stdout
    listed = run("list", "focal.py")
    assert re.search(r"right.*focal.*hidden.*dp, cp.*gamma any", listed.stdout), listed.stdout


@pytest.mark.slow
def test_a_failure_whose_kernel_is_gone_says_so(tmp_path: Path, run: Run) -> None:
    file = write(tmp_path / "focal.py", FOCAL)
    done = run("verify", "focal.py:detached", "--layout", "single", *SMALL, code=1)
    file.rename(tmp_path / "moved.py")
    refused = run(*replay_of(done.stdout), code=2)
    assert "focal.py: no such file, neither here nor above the failure file; replay it in the folder" in refused.stderr
    assert EXACT in run(*replay_of(done.stdout), "--candidate", "moved.py:detached", code=1).stdout


# pytest

TESTS = """
import lossgate
from focal import detached, right

test_right = lossgate.suite(right, layouts=["single", "dp=2"], dtypes=["float32"], examples=4)
test_detached = lossgate.suite(detached, layouts=["single"], dtypes=["float32"], examples=4)
"""


@pytest.mark.slow
def test_suite_under_xdist(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "focal.py", FOCAL)
    write(tmp_path / "test_focal.py", TESTS)
    done = run("-v", "-n", "2", "-p", "no:cacheprovider", program=("-m", "pytest"), code=1)
    for item, outcome in (
        ("test_right[agreement-single-float32]", "PASSED"),
        ("test_right[agreement-dp=2-float32]", "PASSED"),
        ("test_detached[agreement-single-float32]", "FAILED"),
    ):
        assert re.search(rf"{outcome} test_focal.py::{re.escape(item)}", done.stdout), done.stdout
    assert re.search(r"^  grad of hidden: got .*; greatest absolute difference", done.stdout, re.MULTILINE)
    assert EXACT in run(*replay_of(done.stdout), code=1).stdout


# Specs in modules of their own

ON_PROCESSES = ("--layout", "dp=2", *SMALL, "--jobs", "2", "--world", "gloo", "--ranks", "2")


@pytest.mark.slow
def test_a_spec_in_a_neighbour_file(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "losses.py", SPEC)
    write(tmp_path / "kernels.py", kernels("focal", "from losses import focal"))
    done = run("verify", "kernels.py", *ON_PROCESSES, code=1)
    assert outcomes(done.stdout) == BOTH
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _, file = replay_of(done.stdout)
    assert EXACT in run("replay", str(tmp_path / file), "--trust", at=elsewhere, code=1).stdout


@pytest.mark.slow
def test_a_spec_of_a_package_that_offers_it_by_an_entry_point(tmp_path: Path, run: Run) -> None:
    (entry,) = (block.text for block in BLOCKS if "entry-points" in block.text)
    name, value = re.findall(r'^(\w+) = "(.+)"$', entry, re.MULTILINE)[0]
    site, work = tmp_path / "site", tmp_path / "work"
    write(site / "my_package/__init__.py", "")
    write(site / "my_package/losses.py", SPEC)
    write(site / "my_package/kernels.py", kernels("focal", "from .losses import focal"))
    write(site / "my_package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    write(site / "my_package-1.0.dist-info/entry_points.txt", f"[lossgate.specs]\n{name} = {value}\n")
    write(work / "by_name.py", kernels('"focal"'))

    by_name = run("verify", "by_name.py", *ON_PROCESSES, at=work, path=site, code=1)
    assert outcomes(by_name.stdout) == BOTH
    as_module = run(
        "verify", "my_package.kernels", "--layout", "single", *SMALL, "--jobs", "2", at=tmp_path, path=site, code=1
    )
    assert outcomes(as_module.stdout) == BOTH
    assert re.search(r"^  focal  +The NLL of each trained token", run("list", at=work, path=site).stdout, re.MULTILINE)


ENTRY_POINTS = """[lossgate.specs]
focal-nll = my_specs:focal
broken = no_such_module:focal
exits = exits:focal
"""


def test_one_broken_package_breaks_nothing_else(tmp_path: Path, run: Run) -> None:
    site = tmp_path / "site"
    write(site / "my_specs.py", SPEC.replace('spec("focal"', 'spec("focal-nll"'))
    write(site / "exits.py", "raise SystemExit(0)")
    write(site / "my_specs-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: my_specs\nVersion: 1.0\n")
    write(site / "my_specs-1.0.dist-info/entry_points.txt", ENTRY_POINTS)
    listed = run("list", path=site).stdout
    assert re.search(r"^  focal-nll +The NLL of each", listed, re.MULTILINE), listed
    assert re.search(r"^  broken +entry point 'broken' .* can't be loaded: ModuleNotFoundError", listed, re.MULTILINE)
    assert re.search(r"^  exits +entry point 'exits' .* can't be loaded: SystemExit", listed, re.MULTILINE)
    assert "focal-nll: The NLL of each trained token" in run("list", "focal-nll", path=site).stdout
    assert "source: NeMo-RL" in run("list", "nll", path=site).stdout


def test_names_of_specs_and_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.py", SPEC)
    assert is_name_of_a_spec("nll")
    assert is_name_of_a_spec("nlll")
    with pytest.raises(UsageError, match="own lies in this folder, where Python does not look"):
        find_specs("own")
    with pytest.raises(UsageError, match=r"\./own: no such module; expected a file ending in \.py"):
        find_specs("./own")
    for nothing in ("", ":focal"):
        with pytest.raises(UsageError, match=f"'{nothing}' names nothing; expected FILE.py"):
            find_specs(nothing)
    assert [spec.name for spec in find_specs("lossgate.losses.nll")] == ["nll"]


def test_a_file_of_a_package_is_named_as_a_module(tmp_path: Path) -> None:
    write(tmp_path / "package/losses.py", SPEC)
    file = write(tmp_path / "package/kernels.py", kernels("focal", "from .losses import focal"))
    with pytest.raises(UsageError, match=r"kernels\.py: can't be imported: .* name the module, as package\.kernels"):
        load_candidates(str(file))


def test_a_module_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, unlike ``python -m lossgate``, does not look there for modules."""
    write(tmp_path / "own_package/kernels.py", FOCAL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        load_candidates("own_package.kernels")
    assert str(error.value).endswith(
        "own_package lies in this folder, where Python does not look: install it, or set PYTHONPATH=."
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [found.name for found in load_candidates("own_package.kernels")] == ["right", "detached"]


# Without a file

ATTEMPTS = """
from lossgate.engine.run import run
from lossgate.engine.settings import Settings

print([option.meaning for option in focal.options], focal.summary)
for changed in ({"jobs": 2}, {"world": "gloo"}):
    try:
        few = Settings(layouts=("dp=2",), dtypes=("float32",), examples=2, rounds=1, **changed)
        list(run([right, detached], few))
    except lossgate.UsageError as error:
        print(next(iter(changed)), error)
"""

CONSOLE = """
import code
console = code.InteractiveInterpreter(vars(__import__("__main__")))
for cell in {cells!r}:
    console.runcode(compile(cell, {name!r}, "exec"))
"""

PROCESSES: dict[str, tuple[Callable[[str], tuple[tuple[str, ...], str]], str]] = {
    "exec": (lambda text: (("-c", f"exec({text!r}, {{}})"), ""), "<string>"),
    "standard input": (lambda text: (("-",), text), "<stdin>"),
    "console": (lambda text: (("-c", CONSOLE.format(cells=[text], name="<console>")), ""), "<console>"),
    "notebook": (
        lambda text: (("-c", CONSOLE.format(cells=[text], name="/tmp/ipykernel_7/8.py")), ""),
        "/tmp/ipykernel_7/8.py",
    ),
}
"""How Python is given code that has no file, and how it calls the place."""


@pytest.mark.slow
@pytest.mark.parametrize("how", PROCESSES)
def test_code_without_a_file(how: str, run: Run) -> None:
    """What runs in this process works, and the rest says what to do."""
    start, place = PROCESSES[how]
    program, stdin = start(f"{FOCAL}\n{NOTEBOOK}\n{ATTEMPTS}")
    done = run(program=program, stdin=stdin)
    assert done.stderr == ""
    assert "DISAGREE  float32  single: they differ: detached is wrong" in done.stdout
    assert "['the power of 1 - p'] The NLL of each trained token times" in done.stdout
    for needs in ("jobs", "world"):
        assert (
            f"{needs} candidate 'right' was made in {place}, such as a notebook or standard input. Other "
            "processes can't load it from there; save it in a .py file, with its spec if you wrote that, "
            "or run in world 'simulated' with one job"
        ) in done.stdout


def test_verify_needs_a_file_that_ends_in_py(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"focal\.ipynb does not end in \.py; save the kernels, with their own spec,"):
        load_candidates(str(write(tmp_path / "focal.ipynb", "{}")))


# Specs that may be taken for one another


def cell(text: str) -> dict[str, Any]:
    """Runs code as a notebook does."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(text, namespace)
    return namespace


def drawn_from(candidate: lossgate.Candidate) -> DrawnProblem:
    found: list[DrawnProblem] = []

    @settings(database=None, max_examples=1)
    @given(problems(candidate))
    def draw(problem: DrawnProblem) -> None:
        found.append(problem)

    draw()
    return found[0]


def test_kernels_of_a_spec_that_was_made_twice_are_not_compared() -> None:
    """As in a notebook, where a spec is changed and only one kernel is made again."""
    before, after = cell(FOCAL), cell(FOCAL)
    with pytest.raises(UsageError) as error:
        lossgate.compare(after["detached"], before["right"])
    assert str(error.value) == (
        "compare: 'detached' and 'right' have two different specs, both named 'focal'; make the spec once and declare "
        "both kernels with it, or rename one of the specs"
    )


def test_a_problem_is_not_checked_against_a_spec_that_is_no_longer_the_kernels() -> None:
    before, after = cell(FOCAL), cell(FOCAL)
    problem = drawn_from(before["right"])
    problem.check(before["right"])
    with pytest.raises(UsageError, match="'right' and the problem have different specs, both named 'focal'; make"):
        problem.check(after["right"])


def test_a_problem_of_a_users_spec_is_shown_as_it_can_be_made_again() -> None:
    own = cell(FOCAL)
    problem = drawn_from(own["right"])
    assert repr(problem).endswith(", spec=focal)")
    again = eval(repr(problem), {"DrawnProblem": DrawnProblem, **own})
    assert again == problem
    again.check(own["right"])
    with pytest.raises(UsageError, match="unknown spec 'focal'"):
        DrawnProblem.from_json(problem.problem.to_json())


def test_a_spec_may_not_have_the_name_of_one_of_lossgate() -> None:
    """Evidence would say that a kernel of nll agrees."""
    with pytest.raises(UsageError) as error:
        cell(FOCAL.replace('spec("focal"', 'spec("nll"'))
    assert str(error.value) == "spec 'nll' has the same name as a built-in spec of lossgate; rename it"


def test_two_specs_of_one_name_in_a_file_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "twice.py", f"{FOCAL}\n{re.sub(r'def (?=right|detached)', 'def other_', FOCAL)}")
    with pytest.raises(UsageError, match=r"twice\.py: its candidates have two specs that are both named 'focal'; rena"):
        load_candidates(str(file))


@pytest.mark.slow
def test_two_specs_of_one_name_in_two_folders_are_kept_apart(tmp_path: Path, run: Run) -> None:
    """Each kernel is judged by the spec in its own folder, though both import it alike."""
    for folder, spec in (("a", SPEC), ("b", SPEC.replace("losses = -(", "losses = -1.5 * ("))):
        write(tmp_path / folder / "losses.py", spec)
        write(tmp_path / folder / "kernels.py", kernels("focal", "from losses import focal").replace("right", folder))
    found = [load_candidates(f"{tmp_path}/{folder}/kernels.py:{folder}")[0].spec for folder in "ab"]
    places = [Path(spec.reference.__code__.co_filename) for spec in found if spec.reference is not None]
    assert places == [tmp_path / folder / "losses.py" for folder in "ab"]
    targets = ("a/kernels.py:a", "b/kernels.py:b")
    done = run("verify", *targets, "--layout", "single", *SMALL, "--jobs", "2", code=1)
    assert outcomes(done.stdout) == {("AGREE", "a"), ("DISAGREE", "b")}
    got, want = map(float, re.findall(r"loss: got (\S+), want (\S+);", done.stdout)[0])
    assert got / want == pytest.approx(1 / 1.5)


def test_two_candidates_whose_verdicts_would_read_alike_are_refused(tmp_path: Path) -> None:
    files = [
        write(tmp_path / folder / "kernels.py", FOCAL.replace("losses = -(", f"losses = {factor}("))
        for folder, factor in (("a", "-"), ("b", "-1.5 * "), ("c", "-"))
    ]
    targets = [f"{file}:right" for file in files]
    with pytest.raises(
        UsageError, match=r"have the same name, and their specs differ but are both named 'focal'; rename a c"
    ):
        load_all_candidates(targets[:2])
    assert len(load_all_candidates([targets[0], targets[2]])) == 2


WITHOUT_LOSS = """
import lossgate

@lossgate.spec("{name}", outputs=("logprobs",))
def mine(values, batch, options):
    return None
"""


def test_a_spec_without_a_loss_may_not_have_the_name_of_one_of_lossgate() -> None:
    made = cell(WITHOUT_LOSS.format(name="token_logprobs"))["mine"]
    with pytest.raises(UsageError, match="spec 'token_logprobs' has the same name as a built-in spec"):
        lossgate.candidate(made, head="logits")(lambda inputs, options, mesh: None)  # pyright: ignore[reportArgumentType]


def test_two_specs_without_a_loss_are_two(tmp_path: Path) -> None:
    own = WITHOUT_LOSS.format(name="two")
    kernel = '@lossgate.candidate(mine, head="logits")\ndef {}(inputs, options, mesh): ...\n'
    file = write(tmp_path / "two.py", f"{own}{kernel.format('a')}{own}{kernel.format('b')}")
    with pytest.raises(UsageError, match="its candidates have two specs that are both named 'two'; rename one"):
        load_candidates(str(file))


def test_a_reference_that_exits_is_no_verdict(tmp_path: Path, run: Run) -> None:
    write(
        tmp_path / "exits.py",
        FOCAL.replace(
            "    logprobs = torch.where(batch", "    raise SystemExit(0)\n    logprobs = torch.where(batch", 1
        ),
    )
    for command in (("verify", "exits.py", "--layout", "single", *SMALL), ("spec", "check", "exits.py")):
        done = run(*command, code=2 if command[0] == "verify" else 1)
        assert "its reference raised SystemExit: 0 (exits.py, line " in done.stdout + done.stderr


@pytest.mark.slow
def test_a_spec_that_a_function_makes(tmp_path: Path, run: Run) -> None:
    spec = "\n".join(f"    {line}" if line else "" for line in SPEC.strip().splitlines())
    made = f"def make():\n{spec}\n    return focal\n\n\nfocal = make()\n"
    write(tmp_path / "made.py", f"{made}\n{kernels('focal')}")
    done = run("verify", "made.py", "--layout", "single", *SMALL, "--jobs", "2", code=1)
    assert outcomes(done.stdout) == BOTH


@pytest.mark.slow
def test_a_spec_that_has_changed_since_a_failure_was_written(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "focal.py", FOCAL)
    done = run("verify", "focal.py:detached", "--layout", "single", *SMALL, code=1)
    write(tmp_path / "focal.py", FOCAL.replace("losses = -(", "losses = -1.5 * (", 1))
    changed = run(*replay_of(done.stdout), code=1)
    assert ", relative difference 0.333\n" in changed.stdout
    assert (
        "  it disagrees differently than when the file was written: then in grad of hidden and grad of weight, now in "
        "grad of hidden, grad of weight and loss\n" in changed.stdout
    )


# The page's specs are short


def test_lines_of_the_pages_specs() -> None:
    focal = SPEC.strip().splitlines()
    margin = MARGIN.partition("supports = ")[0].strip().splitlines()
    written = [sum(bool(line.strip()) for line in lines) for lines in (focal, margin)]
    assert written[0] < 20, written
    assert written[1] < 60, written
