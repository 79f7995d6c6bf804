# SPDX-License-Identifier: Apache-2.0
"""The adapters of public libraries: they are lazy and short, a missing library is told in a line,
and one kernel of each that is installed agrees.
"""

import ast
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from lossgate import UsageError, adapters
from lossgate.adapters import CHECKOUTS, LIBRARIES, Library, support
from lossgate.declaration.loading import load_candidates
from lossgate.declaration.precision import Precision
from property_tests.meta.command_line import in_a_process

FOLDER = Path(adapters.__file__).parent
JUDGED = (
    *("torch.nll_of_log_softmax", "liger.fused_linear_logprobs", "trl.bnpo", "verl.value"),
    *("megatron.vocab_parallel_logprobs", "transformers.masked_lm", "cut_cross_entropy.torch_compile_mean"),
    *("deepspeed.vocab_parallel_cross_entropy_mean", "torchtune.logprobs", "openrlhf.sft"),
)
"""One of each library that pip installs."""


def entries() -> dict[str, list[str]]:
    return {name: [*library.entry_points] for name, library in LIBRARIES.items()}


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    modules = [library.module for library in LIBRARIES.values()]
    asked = "import sys; from lossgate.adapters import LIBRARIES; [one.entry_points for one in LIBRARIES.values()]"
    script = f"{asked}; [one.installed for one in LIBRARIES.values()]; print({{*sys.modules}} & {set(modules)!r})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_there_are_many_each_in_a_few_lines() -> None:
    sizes = list[int]()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                size = (node.end_lineno or 0) - first + 1
                assert size <= 25 or path.stem in ("__init__", "support"), (path.name, node.name)
                if adapters._is_entry(node):
                    sizes.append(size)
    ids = [entry for own in entries().values() for entry in own]
    assert len(sizes) == len(ids) == len({*ids}) >= 60
    assert len(LIBRARIES) >= 10
    assert all(entries().values())
    assert statistics.median(sizes) <= 6
    assert {f"{name}.py" for name in LIBRARIES} == {path.name for path in FOLDER.glob("*.py")} - {
        "__init__.py",
        "support.py",
    }


def test_the_ids_are_the_names_of_the_candidates() -> None:
    assert [one.name for one in load_candidates("lossgate.adapters.torch")] == entries()["torch"]


def told(library: Library) -> str:
    with pytest.raises(UsageError) as error:
        library.check()
    return str(error.value)


def test_a_library_that_is_missing_or_too_old_is_told_with_the_known_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Library(name="liger", package="no-such-kernel", module="no_such", known=("1.2", "1.3"))
    assert told(missing) == (
        "lossgate.adapters.liger: no-such-kernel is not installed; known is 1.2 or 1.3: "
        "pip install 'no-such-kernel>=1.2,<=1.3'"
    )
    old = Library(name="torch", package="torch", module="torch", known=("99.0",))
    assert re.fullmatch(
        r"lossgate\.adapters\.torch: torch 2\S+ is too old; known is 99\.0 and what is newer", told(old)
    )
    monkeypatch.delenv(CHECKOUTS, raising=False)
    checkout = Library(name="slime", package="its/repo", module="no_such", known=("abc",), is_release=False)
    assert "known is abc: put a checkout into LOSSGATE_CHECKOUTS/no_such" in told(checkout)


def test_a_checkout_is_found_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its_own" / "its_own").mkdir(parents=True)
    (tmp_path / "its_own" / "its_own" / "__init__.py").touch()
    monkeypatch.setenv(CHECKOUTS, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    checkout = Library(name="own", package="its/own", module="its_own", known=("abc",), is_release=False)
    assert checkout.installed == "a checkout"
    checkout.check()
    assert sys.path[-1] == str(tmp_path / "its_own")


def test_what_a_release_does_not_have_is_told_in_a_line() -> None:
    with pytest.raises(UsageError, match=r"torch 2\S+ has no torch\.nn as it is known \(.*no_such.*\); known is 2\.11"):
        support.load("torch", "torch.nn", "no_such")


def test_packages_do_without_what_no_loss_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "heavy_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs a cluster')\n")
    (package / "helpers.py").write_text("number = 2\n")
    (package / "losses.py").write_text(
        "import no_cluster\nfrom no_cluster.nodes import Node\nfrom heavy_package import helpers, Other\n"
        "@no_cluster.remote(gpus=1)\nclass Loss(Node): pass\n"
        "@no_cluster.remote\ndef double(x): return x * helpers.number\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {"bare": "heavy_package", "absent": "no_cluster"}
    loss, double = support.load("torch", "heavy_package.losses", "Loss", "double", **given)
    assert isinstance(loss(), loss)
    assert double(4) == 8
    assert "no_cluster" not in sys.modules


@pytest.mark.slow
def test_the_others_that_are_named_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKOUTS, raising=False)
    one = (
        "lossgate.adapters.torch:torch.logprobs",
        "--layout",
        "single",
        "--dtype",
        "float32",
        "--property",
        "no-grad",
    )
    done = in_a_process(tmp_path, "verify", "lossgate.adapters.slime", *one)
    assert re.search(r"^lossgate: lossgate\.adapters\.slime: .* is not installed; known is", done.stderr, re.MULTILINE)
    assert "1 cell: 1 AGREE" in done.stdout
    assert done.returncode == 2
    done = in_a_process(tmp_path, "verify", "lossgate.adapters.slime")
    assert (done.stdout, done.stderr.count("\n"), done.returncode) == ("", 1, 2)


def test_the_list_says_what_there_is(tmp_path: Path) -> None:
    said = " ".join(in_a_process(tmp_path, "list", "adapters").stdout.split())
    for name, library in LIBRARIES.items():
        known = f"known: {', '.join(library.known)}; here: {library.installed or 'not installed'}"
        assert f"lossgate.adapters.{name} {library.package}; {known} {', '.join(library.entry_points)}" in said


def test_one_kernel_of_each_library_agrees(tmp_path: Path) -> None:
    """Each library that is installed, in one process of its own: Triton decides when it is imported
    whether it interprets, and packages are imported in part.
    """
    here = [one for one in JUDGED if LIBRARIES[one.partition(".")[0]].installed]
    targets = [f"lossgate.adapters.{one.partition('.')[0]}:{one}" for one in here]
    given = ("--layout", "single", "--dtype", "float32", "--property", "agreement", "--jobs", "1")
    done = in_a_process(tmp_path, "verify", *targets, *given)
    assert f"{len(here)} cells: {len(here)} AGREE" in done.stdout, done.stdout + done.stderr
    assert len(here) == len(JUDGED) or not os.environ.get("CI")


ROUNDING = (
    *("torch.kl_div", "trl.chunked_head", "verl.fused_linear", "megatron.vocab_parallel_cross_entropy"),
    *("transformers.label_smoother", "cut_cross_entropy.torch_compile", "openrlhf.language_model"),
)
"""One for each way in which they round in bfloat16."""


@pytest.mark.slow
def test_they_round_to_bfloat16_where_they_declare_it(tmp_path: Path) -> None:
    targets = [f"lossgate.adapters.{one.partition('.')[0]}:{one}" for one in ROUNDING]
    given = ("--layout", "single", "--dtype", "bfloat16", "--property", "agreement", "--jobs", "1")
    done = in_a_process(tmp_path, "verify", *targets, *given)
    assert f"{len(ROUNDING)} cells: {len(ROUNDING)} AGREE" in done.stdout, done.stdout + done.stderr


def test_what_rounds_does_so_in_bfloat16_alone() -> None:
    declared = support.rounds("logits", "loss", grads_in_forward=True, returned="float32")["precision"]
    assert declared["float32"] == Precision(grads_in_forward=True)
    coarser = Precision(logits="bfloat16", loss="bfloat16", grads_in_forward=True, returned="float32")
    assert declared["bfloat16"] == coarser
