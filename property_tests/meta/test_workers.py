# SPDX-License-Identifier: Apache-2.0
"""Cells that are verified side by side, in other processes."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_bank.bugs import BUGS
from lossgate import UsageError, candidate
from lossgate.adequacy.deck import deck_of
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.base.fork_server import _environment, _no_interrupts, worker_context
from lossgate.declaration.loading import load_candidate, load_candidates
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.events import CellFinished, RunFinished, RunStarted
from lossgate.engine.run import run
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS

SETTINGS = Settings(layouts=("single",), dtypes=("float32",), examples=2, rounds=1, jobs=2)

ONE_WORKER = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from lossgate.base.fork_server import load_and_fork, start_worker, worker_context

def pool():
    return ProcessPoolExecutor(1, mp_context=worker_context(), initializer=start_worker, initargs=(dict(os.environ),))

workers = pool()
print(workers.submit(str, "ready").result(), flush=True)
time.sleep(600)
"""
COPIED = ONE_WORKER.replace("workers =", "load_and_fork()\nworkers =")
BOTH_SERVERS = pytest.mark.parametrize("one_worker", [ONE_WORKER, COPIED], ids=["afresh", "copied"])

KERNEL = """
import lossgate

@lossgate.candidate("nll", head="logprobs")
def {name}(inputs, options, mesh):
    return -inputs.logprobs.masked_fill(~inputs.mask, 0).sum() / inputs.valid_tokens.clamp(min=1)
"""


def test_results_have_the_cells_of_the_plan(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(KERNEL.format(name=name))
    kernels = [load_candidates(str(tmp_path / f"{name}.py"))[0] for name in ("one", "two")]
    events = list(run(kernels, SETTINGS))
    assert isinstance(events[0], RunStarted)
    finished = [event.result.cell for event in events if isinstance(event, CellFinished)]
    assert all(cell is planned for cell, planned in zip(finished, events[0].cells, strict=True))


def test_a_candidate_that_no_source_holds_is_refused() -> None:
    """Another process could not load it, or would load another one of its file."""
    kernels = [
        candidate("nll", head="logprobs", name=f"local {i}")(lambda inputs, options, mesh: inputs.logprobs.sum())
        for i in range(2)
    ]
    with pytest.raises(UsageError, match=r"no candidate named 'local 0'|no candidate in it"):
        list(run(kernels, SETTINGS))


def test_a_wrong_copy_of_a_candidate_is_not_taken_for_it() -> None:
    """Its source holds the right one, which a worker would verify in its place."""
    (right,) = load_candidates("lossgate.dense_candidates:dense_nll_logprobs")
    wrong = BUGS["loss x1.01"].put_into(right)
    with pytest.raises(UsageError, match=r"holds 'dense_nll_logprobs', not 'dense_nll_logprobs; loss x1.01'; define"):
        list(run([wrong, right], SETTINGS))


@pytest.mark.parametrize(
    ("change", "what"),
    [({"kernel": lambda inputs, options, mesh: inputs.logprobs.sum()}, "kernel"), ({"supports": {}}, "supports")],
    ids=lambda change: "",
)
def test_a_changed_copy_of_the_same_name_is_not_taken_for_it(change: dict[str, Any], what: str) -> None:
    (right,) = load_candidates("lossgate.dense_candidates:dense_nll_logprobs")
    with pytest.raises(UsageError, match=f"differs in its {what} from the one in lossgate.dense_candidates:"):
        list(run([replace(right, **change), right], SETTINGS))


def test_workers_have_the_environment_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server from which they are forked has that of its start."""
    for name in ("one", "two"):
        text = KERNEL.format(name=name).replace("    return", "    assert os.environ['MARK'] == 'here'\n    return")
        (tmp_path / f"{name}.py").write_text(f"import os\n{text}")
    worker_context()
    monkeypatch.setenv("MARK", "here")
    kernels = [load_candidates(str(tmp_path / f"{name}.py"))[0] for name in ("one", "two")]
    *_, finished = run(kernels, SETTINGS)
    assert isinstance(finished, RunFinished)
    assert [result.failure for result in finished.results] == [None, None]


def test_the_server_looks_for_modules_where_the_parent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/a", "/b"])
    before = dict(os.environ)
    with _environment():
        assert (os.environ["PYTHONPATH"], os.environ["PYTHONSAFEPATH"]) == (f"/a{os.pathsep}/b", "1")
    assert dict(os.environ) == before


_OF_THREADS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a server")
@pytest.mark.parametrize("chosen", [None, "ACTIVE"])
@BOTH_SERVERS
def test_threads_of_workers_wait_asleep_unless_users_say_otherwise(one_worker: str, chosen: str | None) -> None:
    """OpenMP says how they wait when the server loads torch."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THREADS}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({} if chosen is None else {"OMP_WAIT_POLICY": chosen})
    with subprocess.Popen(
        [sys.executable, "-c", one_worker], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        _, printed = parent.communicate(timeout=20)
    assert set(re.findall("OMP_WAIT_POLICY = '(.*)'", printed)) == {chosen or "PASSIVE"}
    (spins,) = map(int, set(re.findall("GOMP_SPINCOUNT = '(.*)'", printed)))
    assert (spins == 500) if chosen is None else (spins > 500)


def test_the_server_starts_with_interrupts_blocked() -> None:
    """Else Ctrl-C prints the traceback of a server that is still loading."""
    with _no_interrupts():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow(but=1)
@BOTH_SERVERS
def test_workers_end_when_their_parent_is_killed(one_worker: str) -> None:
    """They have its output, which ends when the last of them does."""
    with subprocess.Popen([sys.executable, "-c", one_worker], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.communicate(timeout=20)


MARKS = """
sys.mark = "of the parent"
mark = 'getattr(__import__("sys"), "mark", "")'
load_and_fork()
assert "torch" in sys.modules
with pool() as workers:
    print([workers.submit(eval, code).result() for code in (mark, "__import__('gc').get_freeze_count() > 0")])
"""
NESTED = f"""
{ONE_WORKER.partition("workers =")[0]}
with pool() as workers:
    assert workers.submit(eval, 'getattr(__import__("sys"), "mark", "")').result() == ""
"""


def _printed(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a server")
def test_the_server_of_a_command_is_a_copy_of_it() -> None:
    """So torch is loaded once."""
    start = ONE_WORKER.partition("workers =")[0]
    assert _printed(start + MARKS) == "['of the parent', True]\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a server")
def test_where_torch_is_loaded_the_server_starts_afresh() -> None:
    """Kernels may have run there."""
    start = ONE_WORKER.partition("workers =")[0]
    assert _printed(f"import torch\n{start}{MARKS}") == "['', False]\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a server")
def test_a_server_that_a_worker_starts_is_no_copy_of_the_worker() -> None:
    """Kernels have run in it. And it is not kept waiting for the server's own start."""
    code = f"{ONE_WORKER.partition('workers =')[0]}{MARKS.partition('with')[0]}"
    _printed(f"{code}with pool() as workers:\n    workers.submit(exec, {NESTED!r}, {{}}).result()")


def test_sources_are_known_by_their_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel.py").write_text(KERNEL.format(name="same"))
    monkeypatch.chdir(tmp_path / "a")
    first = load_candidate("kernel.py:same")
    monkeypatch.chdir(tmp_path / "b")
    assert load_candidate("kernel.py:same") is not first


def test_specs_of_one_name_do_not_share_problems() -> None:
    """Else a mutant that is equivalent for one loss would not be asked for in the other."""
    real = dense_candidate(SPECS["nll"], "logprobs")
    flat_spec = replace(SPECS["nll"], function=lambda values, batch, options: 0 * values.logprobs.sum())
    name = next(name for name, mutant in option_mutants(real).items() if mutant.option == "reduction")
    flat = deck_of(replace(real, spec=flat_spec), "float32", 1)
    assert name in flat.equivalent
    assert name not in deck_of(real, "float32", 1).equivalent
