# SPDX-License-Identifier: Apache-2.0
"""Candidates are loaded from files and modules. What cannot be loaded is a UsageError."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossgate import UsageError, suite
from lossgate.declaration.loading import KernelElsewhere, load_candidate, load_candidates
from lossgate.engine import elsewhere
from lossgate.engine.failure_files import read_failure
from lossgate.properties import PROPERTIES, Checked
from property_tests.meta.command_line import KERNELS


def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
    return inputs.hidden.sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: suite(kernel), "expected a candidate; decorate the kernel with @lossgate.candidate(...)"),
        (lambda: load_candidates("nowhere.py"), "nowhere.py: no such file"),
        (
            lambda: load_candidates("no.such.module"),
            "no.such.module: no such module; expected a file ending in .py or an importable module",
        ),
        (lambda: load_candidates("json"), "json: no candidate in it; decorate a kernel with @lossgate.candidate(...)"),
        (lambda: read_failure(Path("nowhere.json")), "can't read nowhere.json: No such file or directory"),
    ],
)
def test_what_cannot_be_loaded_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)


def test_files_with_candidates(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import lossgate, neighbour\n"
        "@lossgate.candidate('nll', head='hidden')\ndef one(inputs, options, mesh): ...\n"
        "@lossgate.candidate('nll', head='logits')\ndef two(inputs, options, mesh): ...\nalias = two\n"
    )
    with pytest.raises(
        UsageError, match=r"mine\.py: can't be imported: ModuleNotFoundError: No module named 'neighbour'"
    ):
        load_candidates(str(file))
    (tmp_path / "neighbour.py").write_text("")
    assert [found.name for found in load_candidates(str(file))] == ["one", "two"]
    (two,) = load_candidates(f"{file}:two")
    assert two.source == f"{file}:two"
    assert load_candidates(two.source) == [two]
    with pytest.raises(UsageError, match="no candidate named 'three'"):
        load_candidates(f"{file}:three")
    with pytest.raises(UsageError, match="no candidate named 'tow'; did you mean 'two'"):
        load_candidates(f"{file}:tow")


def test_a_slip_in_a_file_is_reported_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "slip.py"
    file.write_text("import lossgate\n@lossgate.candidate('nll', head='hiden')\ndef one(inputs, options, mesh): ...\n")
    with pytest.raises(
        UsageError, match=r"^candidate\(head='hiden'\): spec 'nll' has no such head; did you mean 'hidd"
    ):
        load_candidates(str(file))


OWN_SPEC = '''
import lossgate

@lossgate.spec("own", source="here")
def own(values, batch, options):
    """A loss."""
    return -(values.logprobs * batch.mask).sum()

@lossgate.candidate(own, head="logits")
def right(inputs, options, mesh): ...
'''


def test_candidates_of_a_file_are_told_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the file has a spec or a property, which are more than data."""
    monkeypatch.setattr(elsewhere, "PROPERTIES", {"agreement": PROPERTIES["agreement"]})
    file, own = tmp_path / "kernels.py", tmp_path / "own_spec.py"
    file.write_text(KERNELS)
    own.write_text(OWN_SPEC)
    found = load_candidates(str(file))
    told = elsewhere.tell_candidates(str(file))
    assert told is not None
    take = elsewhere.stand_in(told, "")
    assert take is not None
    module = take()
    assert module.__file__ == str(file)
    assert [replace(one, kernel=len) for one in module.told] == [replace(one, kernel=len) for one in found]
    assert elsewhere.tell_candidates(str(own)) is None
    assert elsewhere.stand_in(b"cno_such_module\nOwn\n.", "") is None
    own_property = replace(PROPERTIES["agreement"], check=lambda case: Checked())
    monkeypatch.setattr(elsewhere, "PROPERTIES", {"own": own_property})
    assert elsewhere.tell_candidates(str(file)) is None


def test_a_kernel_that_another_process_loaded_is_loaded_where_it_is_called(tmp_path: Path) -> None:
    file = tmp_path / "doubles.py"
    file.write_text(
        "import lossgate\n@lossgate.candidate('nll', head='hidden')\ndef doubles(inputs, *_): return 2 * inputs\n"
    )
    assert KernelElsewhere(f"{file}:doubles")(21, None, None) == 42


def test_a_candidate_pickles_as_the_place_it_is_loaded_from(tmp_path: Path) -> None:
    file = tmp_path / "pickled.py"
    file.write_text("import lossgate\n@lossgate.candidate('nll', head='hidden')\ndef one(inputs, options, mesh): ...\n")
    (one,) = load_candidates(str(file))
    assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(pickle.dumps(one)) is load_candidate(one.source)
