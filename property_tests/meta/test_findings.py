# SPDX-License-Identifier: Apache-2.0
"""What was found in public losses: each finding has a script that shows it, and a script that does
not show it is told apart.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lossgate import UsageError
from lossgate.adapters import LIBRARIES
from lossgate.cli import Exit, app
from lossgate.declaration.loading import load_candidates
from lossgate.findings import FINDINGS, Finding, Seen, Severity, find, show
from lossgate.properties import PROPERTIES

STRIDE = FINDINGS["liger-stride"]


@dataclass(frozen=True, kw_only=True)
class Written(Finding):
    """A finding whose script stands in a folder of a test."""

    folder: Path

    @property
    def script(self) -> Path:
        return self.folder / "script.py"


def written(folder: Path, code: str) -> Finding:
    cause = "Cause: torch/nn/functional.py\n    no such line"
    (folder / "script.py").write_text(f'# licence\n"""A sentence.\n\n{cause}\n\nA reason.\n"""\n\n{code}\n')
    given = {"severity": Severity.NAN, "shown_by": "agreement", "entry_points": (), "versions": ("2.13.0",)}
    return Written(name="torch-own", library="torch", folder=folder, **given)  # type: ignore[arg-type]


def test_each_has_a_script_a_property_and_entry_points_that_there_are() -> None:
    assert len(FINDINGS) >= 15
    scripts = {path.stem for path in STRIDE.script.parent.glob("*.py")}
    assert scripts == {*FINDINGS}
    for name, finding in FINDINGS.items():
        assert finding.name == name
        assert finding.sentence.endswith(".")
        assert finding.why.endswith(".")
        assert "lossgate" not in finding.code
        assert finding.shown_by in PROPERTIES
        assert finding.library in LIBRARIES
        assert {*finding.entry_points} <= {*finding.of.entry_points}
        assert finding.versions


def test_the_line_that_does_it_is_in_the_pinned_version() -> None:
    for finding in FINDINGS.values():
        if str(finding.of.installed).partition("+")[0] == finding.versions[-1] or finding.library == "torch":
            assert re.match(r"\w[\w/]+\.py:\d+: ", finding.cause), finding.cause


def test_a_line_that_another_version_has_not_is_told_without_a_number(tmp_path: Path) -> None:
    finding = written(tmp_path, "raise SystemExit(1)")
    assert finding.cause == "torch/nn/functional.py: no such line"
    assert "  the cause: torch/nn/functional.py: no such line\n    A reason.\n" in show(finding, finding.run())
    assert replace(finding, library="slime").cause == "torch/nn/functional.py: no such line"


RELEASED = {name: finding for name, finding in FINDINGS.items() if finding.of.is_release}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*FINDINGS} - {*RELEASED}))
def test_a_script_shows_it_in_a_checkout_that_there_is(name: str) -> None:
    finding = FINDINGS[name]
    if finding.of.installed is None:
        with pytest.raises(UsageError, match=r"is not installed; .* put a checkout into LOSSGATE_CHECKOUTS"):
            finding.run()
        return
    seen = finding.run()
    assert seen.there, seen.output


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("finding", RELEASED.values(), ids=RELEASED)
def test_a_script_shows_it_in_the_pinned_version(finding: Finding) -> None:
    installed = str(finding.of.installed).partition("+")[0]
    assert installed in finding.versions
    seen = finding.run()
    assert seen.there, seen.output
    assert seen.output


def test_a_defect_that_is_mended_is_told(tmp_path: Path) -> None:
    finding = written(tmp_path, "print('all is well')")
    assert finding.run() == Seen(False, "all is well")
    assert ": it is not there\n    all is well\n" in show(finding, finding.run())
    assert "; mended in 9.9\n" in show(replace(finding, mended_in="9.9"), finding.run())


def test_a_script_that_fails_says_nothing_about_the_defect(tmp_path: Path) -> None:
    seen = written(tmp_path, "raise ValueError('no such argument')").run()
    assert seen == Seen(None, "ValueError: no such argument")


def test_a_finding_of_a_library_that_is_not_installed_is_told_in_a_line() -> None:
    missing = replace(FINDINGS["openrlhf-masked-nan"], library="slime")
    with pytest.raises(UsageError, match=r"^lossgate\.adapters\.slime: THUDM/slime is not installed; "):
        missing.run()


def test_a_misspelt_name_gives_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown finding 'liger-strid'; did you mean 'liger-stride'\?"):
        find("liger-strid")


def test_the_list_has_a_sentence_and_the_version_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["findings"], result_action="return_value") == Exit.AGREE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(FINDINGS)
    assert lines[0].split()[:2] == ["torch-mean-of-nothing", "convention"]
    assert lines[1].strip().startswith("torch 2.11.0, 2.13.0, 2.14.1; 2.")


def test_one_shows_what_is_wrong_first_and_the_script_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["findings", "torch-mean-of-nothing"], result_action="return_value") == Exit.DISAGREE
    first, *others, last = capsys.readouterr().out.splitlines()
    (target,) = re.findall(r"lossgate verify (\S+),", "\n".join(others))
    assert [one.name for one in load_candidates(target)] == ["torch.cross_entropy_mean"]
    assert first.startswith("torch-mean-of-nothing: The mean over no trained token is NaN")
    assert last == "    raise SystemExit(bool(loss.isnan()))"
