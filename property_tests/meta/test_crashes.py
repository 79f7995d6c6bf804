# SPDX-License-Identifier: Apache-2.0
"""A candidate that ends its process is a CRASH, and no other candidate has anything of it."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lossgate import Layout, Problem
from lossgate.cases import current_case
from lossgate.cases.current_case import Phase, Ran
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.child import ChildDied
from lossgate.engine.crash import result_of_crash
from lossgate.engine.events import CellFinished
from lossgate.engine.run import run
from lossgate.engine.settings import Settings
from lossgate.evidence.redo import redo
from property_tests.meta.command_line import KERNELS, Lossgate

pytestmark = pytest.mark.xdist_group("crashes")  # one worker makes what its tests share

ABUSES = """
import ctypes, os, random, signal, sys, threading, time
import numpy, torch, lossgate
from lossgate.dense_candidates import dense_nll_logprobs as dense

STATE = {"folder": os.getcwd(), "handler": signal.getsignal(signal.SIGUSR1), "output": sys.stdout}

def abuse(name, act):
    @lossgate.candidate("nll", head="logprobs", name=name, dtypes=("float32",))
    def kernel(inputs, options, mesh):
        act()
        return dense.kernel(inputs, options, mesh)
    return kernel

def leave_changed():
    os.chdir("/")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.setrecursionlimit(5000)
    numpy.random.seed(5)
    random.seed(5)
    sys.stdout = None
    os.close(1)

def find_unchanged():
    assert os.getcwd() == STATE["folder"]
    assert signal.getsignal(signal.SIGUSR1) == STATE["handler"]
    assert sys.getrecursionlimit() != 5000
    assert sys.stdout is STATE["output"]
    os.fstat(1)
    numbers = numpy.random.random(), random.random()
    numpy.random.seed(5)
    random.seed(5)
    assert numbers != (numpy.random.random(), random.random())

def leave_a_thread():
    threading.Thread(target=time.sleep, args=(600,), name="left", daemon=True).start()

def find_no_thread():
    assert "left" not in [thread.name for thread in threading.enumerate()]

CALLS = [0]

def be_wrong_in_call(wrong):
    CALLS[0] += 1
    if wrong(CALLS[0]):
        raise RuntimeError("wrong")

def be_killed_once():
    if not os.path.exists(__file__ + " killed"):
        open(__file__ + " killed", "w").close()
        os.kill(os.getpid(), 9)

def hold_the_lock():
    ctypes.PyDLL(None).sleep(600)

acts = {
    "segv": lambda: ctypes.string_at(0), "abort": os.abort, "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3), "sys.exit": lambda: sys.exit(0), "killed": lambda: os.kill(os.getpid(), 9),
    "cuts": lambda: os.closerange(3, 100), "leaves": leave_changed, "finds": find_unchanged,
    "threads": leave_a_thread, "finds no thread": find_no_thread, "hold": hold_the_lock, "right": lambda: None,
    "once": lambda: be_wrong_in_call(lambda call: call == 30),
    "in every third": lambda: be_wrong_in_call(lambda call: call % 3 == 2),
    "killed once": be_killed_once,
    "after thirty": lambda: be_wrong_in_call(lambda call: call > 30),
}
kernels = {name: abuse(name, act) for name, act in acts.items()}
globals().update({f"kernel{i}": kernel for i, kernel in enumerate(kernels.values())})
"""

PROBLEM = Problem(spec="nll", head="logprobs", dtype="float32", lengths=(3,), masks=("all",), hidden=1, vocab=4)

SETTINGS = Settings(layouts=("single",), dtypes=("float32",), examples=2, rounds=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("abuses") / "abuses.py"
    file.write_text(ABUSES)
    return file


def results(file: Path, *names: str, settings: Settings = SETTINGS) -> Iterator[CellResult]:
    kernels = [load_candidates(f"{file}:{name}")[0] for name in names]
    with closing(run(kernels, settings)) as events:
        yield from (event.result for event in events if isinstance(event, CellFinished))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("segv", "was ended by SIGSEGV on this problem\n  File "),
        ("abort", "was ended by SIGABRT on this problem"),
        ("exit 0", "ended with exit code 0 on this problem"),
        ("exit 3", "ended with exit code 3 on this problem"),
        (
            "killed",
            (
                "was ended by SIGKILL, as the system does with a process that takes too much memory, on this problem, "
                "and so was the process before it"
            ),
        ),
        ("cuts", "(ended with exit code 0|cut its connection to lossgate) on this problem"),  # whichever comes first
    ],
)
def test_a_crash_is_the_verdict_of_its_cell_and_the_next_goes_on(file: Path, name: str, how: str) -> None:
    crashed, right = results(file, name, "right")
    assert crashed.verdict is Verdict.DISAGREE
    assert re.match(f"CRASH: the process that ran the candidate {how}", crashed.reasons[0])
    assert crashed.failure is not None
    assert crashed.failure.problem.tokens > 0
    assert right.verdict is not Verdict.DISAGREE
    assert len(right.cases) >= 2


def test_a_cell_whose_process_is_killed_from_outside_runs_again(file: Path) -> None:
    """A neighbour may have taken the memory. The second verdict stands, with a remark."""
    (result,) = results(file, "killed once")
    assert (result.failure, len(result.cases) > 1) == (None, True)
    how = "was ended by SIGKILL, as the system does with a process that takes too much memory"
    assert result.run.remark == f"ran again, because its first process {how}"


def test_two_processes_that_are_killed_at_different_points_say_nothing_of_the_kernel(file: Path) -> None:
    (kernel,) = load_candidates(f"{file}:right")
    cell, there = Cell(kernel, Layout(), "float32"), Ran(PROBLEM, "agreement", Phase.IN_CALL)
    elsewhere = replace(there, problem=replace(PROBLEM, seed=1))
    died = [ChildDied("was ended", ran, from_outside=True) for ran in (there, elsewhere, there)]
    verdicts = [result_of_crash(cell, died[0], 1.0, first).verdict for first in died[1:]]
    assert verdicts == [Verdict.INCONCLUSIVE, Verdict.DISAGREE]


@pytest.mark.slow
def test_crashes_are_told_side_by_side_too(file: Path) -> None:
    given = Settings(**{**vars(SETTINGS), "jobs": 2})
    first, right, last = results(file, "segv", "right", "exit 0", settings=given)
    assert ["CRASH" in " ".join(each.reasons) for each in (first, right, last)] == [True, False, True]


def test_an_exit_that_python_sees_is_an_exception_of_the_kernel(file: Path) -> None:
    (result,) = results(file, "sys.exit")
    assert result.reasons[0].startswith("rank 0 raised SystemExit: 0")


@pytest.mark.slow
def test_code_that_holds_the_lock_of_python_is_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.engine.child._GRACE", 2.0)
    held, right = results(file, "hold", "right", settings=Settings(**{**vars(SETTINGS), "timeout": 1.0}))
    assert "CRASH: the process that ran the candidate gave no sign of life for" in held.reasons[0]
    assert "CRASH" not in " ".join(right.reasons)


@pytest.mark.slow
def test_what_a_candidate_leaves_changed_reaches_no_other(file: Path) -> None:
    _, found, _, found_no_thread = results(file, "leaves", "finds", "threads", "finds no thread")
    assert (found.failure, found_no_thread.failure) == (None, None)


def test_a_process_that_dies_leaves_the_problem_that_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an earlier cell is none of the next, whose candidate is another."""
    monkeypatch.setattr(current_case, "_open", [])
    assert current_case.read(str(tmp_path)) is None
    current_case.open_in(str(tmp_path))
    current_case.none_yet()
    phases: list[Phase] = []

    def note() -> None:
        ran = current_case.read(str(tmp_path))
        assert ran is not None
        assert (ran.problem, ran.held_to) == (PROBLEM, "no-grad")
        phases.append(ran.phase)

    for _ in range(2):
        with current_case.running(PROBLEM, "no-grad"):
            note()
            with current_case.in_call():
                note()
            note()
        note()
    first, *others = [Phase.IN_CALL, Phase.BETWEEN, Phase.DONE], Phase.BETWEEN, Phase.IN_CALL, Phase.BETWEEN, Phase.DONE
    assert phases == [Phase.NOT_CALLED, *first, *others]
    current_case.none_yet()
    assert current_case.read(str(tmp_path)) is None


def test_a_process_that_dies_before_any_problem_says_nothing_of_its_candidate(file: Path) -> None:
    (kernel,) = load_candidates(f"{file}:right")
    result = result_of_crash(Cell(kernel, Layout(), "float32"), ChildDied("was ended by SIGKILL"), 1.0)
    assert (result.verdict, result.record.passes) == (Verdict.INCONCLUSIVE, False)
    lost = "CRASH: the process that was to run the candidate was ended by SIGKILL before it ran a problem"
    assert result.reasons[0] == lost
    assert redo([result.record])[0].contradiction == ""


@pytest.mark.parametrize(
    ("phase", "from_outside", "world", "blamed"),
    [
        (Phase.NOT_CALLED, False, "simulated", False),
        (Phase.NOT_CALLED, True, "simulated", False),
        (Phase.IN_CALL, False, "simulated", True),
        (Phase.IN_CALL, True, "simulated", True),
        (Phase.IN_CALL, False, "gloo", False),
        (Phase.BETWEEN, False, "simulated", True),
        (Phase.BETWEEN, True, "simulated", False),
        (Phase.DONE, False, "simulated", True),
        (Phase.DONE, True, "simulated", False),
    ],
)
def test_what_a_kernel_is_blamed_for(file: Path, phase: Phase, from_outside: bool, world: str, blamed: bool) -> None:
    """What it does in a call, and what may come of it later. The system may end a process at any
    time, for the memory that the reference takes, say.
    """
    (kernel,) = load_candidates(f"{file}:right")
    died = ChildDied("was ended", Ran(PROBLEM, "agreement", phase), from_outside=from_outside)
    result = result_of_crash(Cell(kernel, Layout(), "float32", world=world), died, 1.0)
    assert result.verdict is (Verdict.DISAGREE if blamed else Verdict.INCONCLUSIVE)
    who = "that ran the candidate" if blamed else "that was to run the candidate"
    assert result.reasons[0].startswith(f"CRASH: the process {who} was ended ")


DIES = """
import multiprocessing, os, lossgate.cases.oracle, lossgate.engine.jobs

@lossgate.candidate("nll", head="logits", dtypes=("float32",))
def k(inputs, options, mesh):
    return {factor} * cross_entropy(inputs, options)

if multiprocessing.parent_process() is not None:
    {place} = lambda *_: {end}
"""
"""A kernel in a process that something else ends."""
KILLED = "os.kill(os.getpid(), 9)"
BEFORE, BESIDE = "lossgate.engine.jobs.run_cases", "lossgate.cases.oracle.Oracle.compare"
LOST = "CRASH: the process that was to run the candidate was ended by SIGKILL, as the system does with a process that"


def test_a_process_that_dies_beside_the_kernel_says_nothing_of_it(tmp_path: Path) -> None:
    """But memory that the kernel wrote over may end it there, too."""
    for end, verdict in ((KILLED, Verdict.INCONCLUSIVE), ("os.abort()", Verdict.DISAGREE)):
        file = tmp_path / f"{verdict}.py"
        file.write_text(KERNELS + DIES.format(factor=1, place=BESIDE, end=end))
        (result,) = results(file, "k")
        assert result.verdict is verdict
        assert result.reasons[0].startswith(LOST) is (end == KILLED)


@pytest.mark.slow
def test_a_second_look_that_is_lost_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(KERNELS + DIES.format(factor=2, place=BEFORE, end=KILLED))
    (result,) = results(tmp_path / "dies.py", "k")
    assert result.verdict is Verdict.DISAGREE
    assert result.reasons[-1].startswith(f"a fresh process could not run this problem again: {LOST}")


@pytest.mark.slow
@pytest.mark.parametrize("place", [BEFORE, BESIDE])
def test_a_replay_whose_process_is_lost_is_no_verdict(folder: Path, lossgate: Lossgate, place: str) -> None:
    file = folder / "dies.py"
    file.write_text(KERNELS + DIES.format(factor=2, place="_", end=KILLED))
    done = lossgate("verify", "dies.py:k", "--layout", "single", "--examples", "8")
    replay = next(line for line in done.stdout.splitlines() if line.startswith("  replay: ")).split()[2:]
    assert lossgate(*replay).returncode == 1
    file.write_text(KERNELS + DIES.format(factor=2, place=place, end=KILLED))
    again = lossgate(*replay)
    assert (again.returncode, again.stdout) == (3, "")
    assert again.stderr.startswith(f"lossgate: {LOST}")
    assert again.stderr.count("\n") == 1


AGREED = "in a fresh process this problem agreed in 20 of 20 calls"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("once", f"{AGREED}: the candidate is wrong in few calls, or only after certain other calls"),
        ("in every third", "not wrong in every call: in a fresh process this problem disagreed in 7 of 20 calls"),
        (
            "after thirty",
            f"wrong only after other calls in the same process: {AGREED}; after 30 calls with other problems it ",
        ),
        ("sys.exit", "rank 0 raised SystemExit: 0"),
    ],
)
def test_how_often_a_candidate_is_wrong_is_reported(file: Path, name: str, reported: str) -> None:
    (result,) = results(file, name, settings=Settings(**{**vars(SETTINGS), "examples": 40}))
    assert result.verdict is Verdict.DISAGREE
    assert result.reasons[-1].startswith(reported)
    assert result.failure is not None
    assert result.failure.findings == result.reasons


@pytest.mark.slow
def test_a_crash_has_evidence_and_a_line_that_replays_it(file: Path, lossgate: Lossgate) -> None:
    targets = [f"{file}:{name}" for name in ("segv", "right")]
    done = lossgate("verify", *targets, "--layout", "single", "--examples", "2", "--evidence", "e")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "  CRASH: the process that ran the candidate was ended by SIGSEGV on this problem" in lines
    replay = next(line for line in lines if line.startswith("  replay: ")).split()[2:]
    again = lossgate(*replay)
    assert again.returncode == 1
    assert "CRASH: the process that ran the candidate was ended by SIGSEGV on this problem" in again.stdout
    (file.parent / "gate.toml").write_text('schema = 1\n[[require]]\ncandidates = ["segv"]\n')
    gate = lossgate("gate", "e", "--policy", str(file.parent / "gate.toml"))
    assert gate.returncode == 1
    assert "SIGSEGV" in gate.stdout


@pytest.mark.slow
def test_a_replay_makes_the_calls_that_the_failure_needs(file: Path, lossgate: Lossgate) -> None:
    done = lossgate("verify", f"{file}:after thirty", "--layout", "single", "--examples", "40")
    replay = next(line for line in done.stdout.splitlines() if line.startswith("  replay: ")).split()[2:]
    again = lossgate(*replay)
    assert again.returncode == 1
    assert "  rank 0 raised RuntimeError: wrong" in again.stdout
    assert "  after 30 calls with other problems, in the same process" in again.stdout.splitlines()
