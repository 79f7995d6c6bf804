# SPDX-License-Identifier: Apache-2.0
"""A file is imported, or refused in a line with exit code 2; none of its candidates is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lossgate import UsageError
from lossgate.declaration.loading import load_all_candidates, load_candidate, load_candidates
from lossgate.engine import first_import
from property_tests.meta.command_line import KERNELS, Lossgate

K = "import os, sys, lossgate\n@lossgate.candidate('nll', head='logits')\ndef k(inputs, options, mesh): ...\n"
DECLARE = "lossgate.candidate('nll', head='logits'"
F = "def f(inputs, options, mesh): ...\n"

REFUSED = {
    "os._exit": (K + "os._exit(0)", "can't be imported: it calls os._exit(0), on line 4; put that under if __name__"),
    "sys.exit": (K + "sys.exit('no\\ngpu')", "can't be imported: it calls sys.exit('no\\ngpu'), on line 4; put that"),
    "BaseException": (K + "raise BaseException('mine')", "can't be imported: BaseException: mine, on line 4"),
    "skipped": (K + "import pytest\npytest.importorskip('not_there')", "can't be imported: Skipped: could not import"),
    "ImportError": (
        K + "import not_there",
        "can't be imported: ModuleNotFoundError: No module named 'not_there', on l",
    ),
    "SyntaxError": ("def (", "can't be imported: SyntaxError: invalid syntax (bad.py, line 1)"),
    "recursion": (K + "def g(): g()\ng()", "can't be imported: RecursionError: maximum recursion depth exceeded"),
    "two lines": (K + "raise ValueError('one\\ntwo')", "can't be imported: ValueError: one two, on line 4"),
    "zero byte": ("x = \0", "can't be imported: SyntaxError: source code string cannot contain null bytes"),
    "not UTF-8": (b"x = '\xe9'", "can't be imported: SyntaxError: (unicode error) 'utf-8' codec can't decode byte"),
    "no candidate": ("import lossgate", "no candidate in it; decorate a kernel with @lossgate.candidate(...)"),
    "under main": (
        f"import lossgate\nif __name__ == '__main__':\n    k = {DECLARE})(print)",
        "no candidate in it; decorate a kernel with @lossgate.candidate(...), outside of functions and of if",
    ),
    "in a function": (
        f"import lossgate\ndef make():\n    return {DECLARE})(print)",
        "no candidate in it; decorate a kernel with @lossgate.candidate(...), outside of functions and of if",
    ),
    "defined twice": (
        K + K,
        "two candidates are named 'k' (line 2 and line 5); tell them apart with candidate(name=...)",
    ),
    "named twice": (
        f"{K}{F}g = {DECLARE}, name='k')(f)",
        "two candidates are named 'k' (line 2 and line 5); tell them apart with candidate(name=...)",
    ),
    "a loop of one name": (
        f"{K}for n in range(2):\n    @{DECLARE})\n    def g(inputs, options, mesh): ...",
        "two candidates are named 'g' (line 5); tell them apart with candidate(name=...)",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_file_is_refused_in_a_line(which: str, tmp_path: Path) -> None:
    text, message = REFUSED[which]
    file = tmp_path / "bad.py"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    own_exit = os._exit
    with pytest.raises(UsageError) as error:
        load_candidates(str(file))
    said = str(error.value)
    assert said.startswith(f"{file}: {message}")
    assert said.isprintable()
    assert os._exit is own_exit


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "folder",
            "folder: no such module, and the folder of that name is no package; name the files in it, such as folder",
        ),
        ("bare", "bare: no such module, and the folder of that name is no package; it has no file that ends in .py"),
        ("folder.py", "folder.py: is a folder; name a file in it"),
        ("kernels.pyc", "kernels.pyc does not end in .py; save the kernels, with their own spec, in a file"),
        ("book.ipynb", "book.ipynb does not end in .py; save the kernels, with their own spec, in a file"),
        ("kernels.py:rigth", "kernels.py: no candidate named 'rigth'; did you mean 'right'?"),
        ("kernels.py:", "'kernels.py:' names nothing; expected FILE.py, FILE.py:NAME, a module, or MODULE:NAME"),
        ("kernels.PY", "kernels.PY: no such module; expected a file ending in .py or an importable module"),
    ],
)
def test_what_is_no_file_of_candidates(target: str, message: str, folder: Path, lossgate: Lossgate) -> None:
    for made in ("folder", "bare", "folder.py"):
        (folder / made).mkdir()
    (folder / "folder" / "mine.py").write_text(K)
    (folder / "kernels.pyc").write_text("")
    (folder / "book.ipynb").write_text("{}")
    done = lossgate("verify", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {message}")
    assert len(done.stderr.splitlines()) == 1


FOUND = {
    "list": (f"{F}ks = [{DECLARE}, name=n)(f) for n in ('a', 'b')]", ["k", "a", "b"]),
    "tuple": (f"{F}ks = tuple({DECLARE}, name=n)(f) for n in ('a', 'b'))", ["k", "a", "b"]),
    "mapping": (f"{F}ks = {{n: {DECLARE}, name=n)(f) for n in ('a', 'b')}}", ["k", "a", "b"]),
    "loop": (f"{F}for n in ('a', 'b'):\n    last = {DECLARE}, name=n)(f)", ["k", "a", "b"]),
    "class": (f"class Kernels:\n    @{DECLARE})\n    def a(inputs, options, mesh): ...", ["k", "a"]),
    "alias": ("again = k", ["k"]),
    "copy": ("import dataclasses\nk = dataclasses.replace(k, axes=('dp',))", ["k"]),
    "copy of another": (
        f"import dataclasses\n{F}other = dataclasses.replace({DECLARE})(f), name='other')",
        ["k", "other"],
    ),
    "deleted": (f"{F}other = {DECLARE})(f)\ndel k", ["k", "f"]),
    "a child that ends": ("child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)", ["k"]),
}


@pytest.mark.parametrize("which", FOUND)
def test_a_candidate_is_found_wherever_the_file_keeps_it(which: str, tmp_path: Path) -> None:
    text, names = FOUND[which]
    file = tmp_path / "good.py"
    file.write_text(K + text)
    found = load_candidates(str(file))
    assert [one.name for one in found] == names
    assert [load_candidate(one.source).name for one in found] == names


def test_a_list_of_another_module(tmp_path: Path) -> None:
    (tmp_path / "makes_them.py").write_text(f"{K}{F}several = [k, {DECLARE}, name='a')(f)]")
    (tmp_path / "takes_them.py").write_text("from makes_them import several")
    assert [one.name for one in load_candidates(str(tmp_path / "takes_them.py"))] == ["k", "a"]


def test_a_candidate_is_loaded_once_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "named_often.py").write_text(KERNELS)
    (tmp_path / "a_link.py").symlink_to("named_often.py")
    targets = ("named_often.py:wrong", "./named_often.py", str(tmp_path / "named_often.py"), "named_often", "a_link.py")
    found = load_all_candidates(targets)
    assert [one.source for one in found] == [
        "named_often.py:wrong",
        "./named_often.py:right",
        "./named_often.py:shapeless",
    ]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder where packages are installed: ``wrapped``, which others wrap, and ``helper``."""
    for name in ("wrapped", "helper"):
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("WHERE = 'installed'")
    return tmp_path / "site"


NAMED_LIKE = "import wrapped, helper, beside\nassert (wrapped.WHERE, helper.WHERE) == ('installed', 'here')\n"


def test_a_file_named_like_the_package_that_it_wraps(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And helpers of the file go before packages, as if the file were run."""
    monkeypatch.syspath_prepend(installed)
    (tmp_path / "wrapped.py").write_text(NAMED_LIKE + K)
    (tmp_path / "helper.py").write_text("WHERE = 'here'")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "another.py").write_text(NAMED_LIKE + K)
    for name in ("wrapped.py", "another.py"):
        assert [one.name for one in load_candidates(str(tmp_path / name))] == ["k"]
        for module in ("wrapped", "helper", "beside"):
            sys.modules.pop(module)


def test_a_file_named_like_a_package_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "not_installed.py").write_text("import not_installed.losses\n" + K)
    with pytest.raises(UsageError, match=r"; not_installed is this file itself, because no package of that name is in"):
        load_candidates(str(tmp_path / "not_installed.py"))


PYTHON_M = [sys.executable, "-m", "lossgate"]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=1", "-m", "lossgate"]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "world"), [(PYTHON_M, "simulated"), (PYTHON_M, "gloo"), (TORCHRUN, "torchrun")])
def test_a_file_named_like_torch_in_the_working_folder(start: list[str], world: str, tmp_path: Path) -> None:
    for name in ("torch.py", "rich.py"):
        (tmp_path / name).write_text(KERNELS)
    done = _run(tmp_path, *start, "verify", "torch.py:right", "rich.py:right", *SMALL, "--world", world)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 cells\n")


SMALL = ("--ranks=1", "--dtype=float32")


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


ENDS = {
    "os._exit(0)": "it calls os._exit(0), on line 4; put that under if __name__",
    "import posix; posix._exit(0)": "the process that tried ended with exit code 0; see what python ends.py does",
    "import ctypes; ctypes.string_at(0)": "the process that tried was ended by SIGSEGV, on line 4; see what python",
    "os.abort()": "the process that tried was ended by SIGABRT, on line 4; see what python ends.py does",
    "os.kill(os.getpid(), 9)": "the process that tried was ended by SIGKILL, as the system does with a process that",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_an_import_is_no_verdict(end: str, folder: Path, lossgate: Lossgate) -> None:
    (folder / "ends.py").write_text(K + end)
    done = lossgate("verify", "kernels.py:right", "ends.py:k")
    assert done.stderr.startswith(f"lossgate: ends.py: can't be imported: {ENDS[end]}")
    assert len(done.stderr.splitlines()) == 1
    assert (done.returncode, done.stdout) == (2, "")


COMMANDS = {
    "list": ["list", "ends.py"],
    "a module": ["list", "ends"],
    "audit": ["audit", "kernels.py:right", "ends.py:k"],
    "spec check": ["spec", "check", "ends.py"],
    "replay": ["replay", "failure.json"],
    "replay --candidate": ["replay", "failure.json", "--candidate", "ends.py:k"],
    "replay --script": ["replay", "failure.json", "--script", "script.py"],
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("end", ["import posix; posix._exit(0)", "os.abort()"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_survives_an_import(
    command: str, end: str, folder: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a line for it here: whatever imports a file does so in another process first."""
    monkeypatch.syspath_prepend(folder)
    if command.startswith("replay"):
        assert lossgate("verify", "kernels.py:wrong", "--layout=single", "--dtype=float32").returncode == 1
        (file,) = (folder / ".lossgate").glob("*.json")
        (folder / "failure.json").write_text(file.read_text().replace("kernels.py:wrong", "ends.py:k"))
    (folder / "ends.py").write_text(K + end)
    done = lossgate(*COMMANDS[command])
    named, by_hand = ("ends", "-c 'import ends'") if command == "a module" else ("ends.py", "ends.py")
    said = ENDS[end].replace("python ends.py", f"python {by_hand}")
    assert done.stderr.startswith(f"lossgate: {named}: can't be imported: {said}")
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (2, "")
    assert first_import._ready == []


def test_a_file_is_imported_no_more_often_than_it_would_be(folder: Path, lossgate: Lossgate) -> None:
    """The process that imports it verifies the cells. This one is told of the candidates."""
    with (folder / "kernels.py").open("a") as file:
        file.write("\nimport os\nwith open(__file__ + '.imports', 'a') as file: file.write(f'{os.getpid()} ')\n")
    assert lossgate("verify", "kernels.py:right", *SMALL).returncode == 0
    assert len((folder / "kernels.py.imports").read_text().split()) == 1


def test_an_import_that_takes_long_is_named(folder: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.engine.first_import._PATIENCE", 0.01)
    (folder / "slow.py").write_text("import time; time.sleep(0.5)")
    done = lossgate("verify", "slow.py")
    assert done.stderr.splitlines()[0] == "lossgate: slow.py is still being imported after 0 s"
    assert "slow.py: no candidate in it" in done.stderr


@pytest.mark.slow
def test_a_layout_or_dtype_that_a_candidate_cannot_do_is_reported(folder: Path, lossgate: Lossgate) -> None:
    named = ("--layout=single", "--layout=tp=2", "--layout=single", "--dtype=float32", "--dtype=float16")
    done = lossgate("verify", "kernels.py:right", *named)
    assert done.stdout.startswith(
        "1 cell\n"
        "right: tp=2 is left out, because its axes are dp, cp\n"
        "right: float16 is left out, because its dtypes are float32, bfloat16\n"
    )
    assert done.returncode == 0
    done = lossgate("verify", "kernels.py:shapeless", "--layout=tp=2")
    assert done.returncode == 2
    assert "nothing to verify; it has no axes" in done.stderr


@pytest.mark.slow
def test_a_layout_or_dtype_that_a_known_failure_is_not_frozen_on_is_reported(folder: Path, lossgate: Lossgate) -> None:
    """Its one cell is judged, whatever the run names."""
    assert lossgate("verify", "kernels.py:wrong", "--layout=cp=2", "--dtype=float32").returncode == 1
    (file,) = (folder / ".lossgate").glob("*.json")
    known = f"from pathlib import Path\nknown = lossgate.KnownFailure(name='too large', example=Path({str(file)!r}))\n"
    (folder / "known.py").write_text(
        f"{known}{KERNELS}".replace("from pathlib", "import lossgate\nfrom pathlib", 1).replace(
            '"cp"))\ndef wrong', '"cp"), known_failure=known)\ndef wrong'
        )
    )
    named = (
        "--layout=cp=2",
        "--layout=single",
        "--layout=tp=2",
        "--dtype=float32",
        "--dtype=bfloat16",
        "--dtype=float16",
    )
    done = lossgate("verify", "known.py:wrong", *named)
    assert done.stdout.startswith(
        "1 cell\n"
        "wrong: single is left out, because its known failure too large is frozen on cp=2\n"
        "wrong: tp=2 is left out, because its axes are dp, cp\n"
        "wrong: bfloat16 is left out, because its known failure too large is frozen in float32\n"
        "wrong: float16 is left out, because its dtypes are float32, bfloat16\n"
    )
    assert done.returncode == 0
    assert lossgate("verify", "known.py:wrong", "--layout=cp=2").stdout.startswith("1 cell\nDISAGREE")
