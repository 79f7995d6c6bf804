# SPDX-License-Identifier: Apache-2.0
"""``lossgate init``, ``--version`` and completion: how a user begins."""

import subprocess
import sys
from pathlib import Path

import pytest

import lossgate as package
from lossgate.losses import SPECS
from property_tests.meta.command_line import Lossgate

EVERY = [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


@pytest.mark.slow
def test_a_first_candidate_agrees_and_so_does_its_test(folder: Path, lossgate: Lossgate) -> None:
    done = lossgate("init", "grpo", "--head", "hidden")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "wrote my_grpo.py: put your kernel into it, and run: lossgate verify my_grpo.py",
        "wrote test_my_grpo.py: the same in pytest",
    ]
    assert lossgate("verify", "my_grpo.py", "--ranks", "2", "--dtype", "float32").returncode == 0
    command = [sys.executable, "-m", "pytest", "-q", "-k", "single and float32", "test_my_grpo.py"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert "1 passed" in run.stdout


@pytest.mark.parametrize(("spec", "head"), EVERY)
def test_a_candidate_can_be_written_for_every_spec_and_head(spec: str, head: str, lossgate: Lossgate) -> None:
    """They agree: see the tests of the dense candidates, which hold the same kernels."""
    assert lossgate("init", spec, "--head", head).returncode == 0
    done = lossgate("list", f"my_{spec}.py")
    assert done.returncode == 0
    assert f"my_{spec}" in done.stdout


@pytest.mark.slow
def test_it_names_every_option_and_its_default(folder: Path, lossgate: Lossgate) -> None:
    """A kernel whose author knew nothing of one that is on by default would be wrong."""
    lossgate("init", "grpo", "--head", "logprobs")
    text = (folder / "my_grpo.py").read_text()
    for option in SPECS["grpo"].options:
        assert f'        # "{option.name}": lossgate.ANY,  # default: {option.default!r}\n' in text
    (folder / "my_grpo.py").write_text(text.replace('# "', '"'))  # all of them
    done = lossgate("verify", "my_grpo.py", "--layout", "single", "--dtype", "float32")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "head"), [("softcap", "logits"), ("dpo", "hidden"), ("token_logprobs", "logits")])
def test_some_of_them_are_verified_here(spec: str, head: str, lossgate: Lossgate) -> None:
    """With masked ids of -100, pairs, and no loss."""
    lossgate("init", spec, "--head", head)
    assert lossgate("verify", f"my_{spec}.py", "--ranks", "2", "--dtype", "float32").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nlll",), "unknown spec 'nlll'; did you mean 'nll'?"),
        (("nll", "--head", "hiden"), "init: --head hiden: spec 'nll' has no such head; did you mean 'hidden'?"),
        (("nll", "--name", "my-loss"), "init: --name my-loss: expected a valid Python name, such as my_nll"),
        (("nll", "--name", "class"), "init: --name class: expected a valid Python name, such as my_nll"),
        (("nll", "--name", "kernels"), "init: kernels.py exists already and is not overwritten; choose another --name"),
        (("nll", "--folder", "kernels.py"), "init: can't write into kernels.py: File exists; choose another --folder"),
    ],
)
def test_what_cannot_be_written_is_a_line(
    arguments: tuple[str, ...], message: str, folder: Path, lossgate: Lossgate
) -> None:
    before = sorted(folder.iterdir()), (folder / "kernels.py").read_text()
    done = lossgate("init", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {message}")
    assert done.stderr.count("\n") == 1
    assert (sorted(folder.iterdir()), (folder / "kernels.py").read_text()) == before


@pytest.mark.parametrize(
    ("torch", "remark"), [("2.11.0", ""), ("2.14.1+cu130", ""), ("2.99.0a0", " (not tested; 2.11 to 2.14 are)")]
)
def test_the_versions_are_shown(lossgate: Lossgate, torch: str, remark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lossgate.cli.app"], "version", lambda name: {"torch": torch}[name])
    done = lossgate("--version")
    assert (done.returncode, done.stdout) == (0, f"lossgate {package.__version__}, torch {torch}{remark}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(shell: str) -> None:
    from lossgate.cli import app

    script = app.generate_completion(shell=shell)  # pyright: ignore[reportArgumentType]
    for word in ("verify", "replay", "init", "fail-fast"):
        assert word in script
