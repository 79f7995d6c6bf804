# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/conformance.py`` writes what findings and evidence say, below what people wrote."""

import re
import subprocess
from importlib.machinery import PathFinder
from pathlib import Path

import conformance
import pytest

from lossgate.adapters import LIBRARIES, Library
from lossgate.findings import FINDINGS, Severity
from property_tests.meta import made_evidence


def row(page: str, start: str) -> list[str]:
    (found,) = [line for line in page.splitlines() if line.startswith(f"| `{start}` |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The page with made verdicts."""
    cells = [
        made_evidence.cell(candidate="liger.jsd", conventions={"counts='own'": "it divides by its own counts"}),
        made_evidence.breaking("strided-inputs", candidate="liger.cross_entropy"),
        made_evidence.disagreeing(candidate="liger.chunked_dpo"),
        *(made_evidence.cell(candidate="liger.chunked_dapo", layout=layout) for layout in ("single", "dp=2")),
        *(made_evidence.disagreeing(candidate="liger.chunked_dapo", layout=layout) for layout in ("dp=3", "dp=2,cp=2")),
        made_evidence.cell(candidate="liger.chunked_jsd", excluded={"ratios extreme": "it clamps them"}),
        made_evidence.cell(candidate="liger.chunked_jsd", dtype="bfloat16", mde=0.25),
        made_evidence.disagreeing(candidate="liger.chunked_jsd", dtype="bfloat16", layout="dp=2"),
        made_evidence.disagreeing(
            candidate="liger.triton_grpo", reasons=("rank 0 raised ValueError: no  [/home/me/it.py:7 in loss]",)
        ),
    ]
    return conformance.page_of([made_evidence.write(tmp_path / "made.jsonl", made_evidence.whole_run(cells))])


def test_a_row_has_the_verdict_and_what_readers_must_know(page: str) -> None:
    assert row(page, "liger.jsd")[4:6] == ["agrees", "`counts='own'`"]
    assert row(page, "liger.cross_entropy")[4:6] == ["numbers agree", "not kept: strided-inputs; see `liger-stride`"]
    assert row(page, "liger.chunked_dpo")[4] == "**NaN**"
    assert row(page, "liger.triton_grpo")[4] == "**numbers disagree**"


def test_a_row_has_what_the_entry_point_calls(page: str) -> None:
    assert row(page, "liger.jsd")[1] == "`liger_kernel.transformers.functional.liger_jsd`"


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=[*LIBRARIES])
def test_what_an_entry_point_calls_is_read_from_its_adapter(library: Library) -> None:
    for entry, calls in conformance.calls_of(library).items():
        assert calls, entry
        assert all(call.startswith(f"{library.module}.") for call in calls), calls


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=[*LIBRARIES])
def test_what_is_not_judged_is_in_the_library(library: Library) -> None:
    """A name that a release has no more would stand there for ever."""
    said = conformance.not_judged(library)
    assert said.startswith("Not judged: ")
    spec = PathFinder.find_spec(library.module)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{library.package} is not installed")
    root = next(iter(spec.submodule_search_locations))
    for name in re.findall(r"`([^`]+)`", said):
        found = subprocess.run(["grep", "-rqw", "--include=*.py", name, root], check=False)
        assert found.returncode == 0, name


def test_a_verdict_that_is_not_one_everywhere_has_its_places(page: str) -> None:
    split, verdict = row(page, "liger.chunked_dapo")[3:5]
    assert split == "one rank, dp, dp+cp; float32"
    assert verdict == "**wrong number** (dp, dp+cp); agrees (one rank)"  # of dp=2 and dp=3 the worse one counts
    split, verdict, _, detects = row(page, "liger.chunked_jsd")[3:7]
    assert split == "float32: one rank; bfloat16: one rank, dp"
    assert verdict == "**numbers disagree** (dp; bfloat16); agrees (one rank)"
    assert detects.endswith(" / -")


def test_a_finding_of_an_axis_explains_no_cell_without_it() -> None:
    alone, split = (made_evidence.disagreeing(candidate="liger.chunked_dapo", layout=one) for one in ("single", "dp=2"))
    assert conformance._verdict("liger.chunked_dapo", alone) == "**numbers disagree**"
    assert conformance._verdict("liger.chunked_dapo", split) == "**wrong number**"


def test_what_a_library_is_never_given_stands_below_it(page: str) -> None:
    assert row(page, "ratios extreme") == ["`ratios extreme`", "it clamps them", "`chunked_jsd`"]


def test_a_row_has_no_path_of_the_machine_that_judged(page: str) -> None:
    assert row(page, "liger.triton_grpo")[5] == "rank 0 raised ValueError: no"


def test_a_row_whose_finding_says_why_names_it_alone(page: str) -> None:
    assert row(page, "liger.chunked_dpo")[4:6] == ["**NaN**", "see `liger-dpo-nothing-chosen`"]


def test_every_finding_has_a_row_the_worst_first(page: str) -> None:
    assert row(page, "liger-stride")[1:] == [
        FINDINGS["liger-stride"].sentence,
        "wrong number",
        "liger-kernel 0.8.5",
        "`liger_kernel/ops/cross_entropy.py:459`",
        "strided-inputs",
        f"[#1251]({FINDINGS['liger-stride'].upstream})",
    ]
    severities = [row(page, name)[2] for name in sorted(FINDINGS, key=lambda name: page.index(f"| `{name}` |"))]
    assert severities == sorted(severities, key=[*map(str, Severity)].index)


def test_what_people_wrote_stays_and_the_page_has_all_findings(page: str) -> None:
    written = conformance.PAGE.read_text()
    above, _, findings = written.partition("## Verdicts")[0].partition("## Findings")
    assert page.startswith(above)
    assert findings == page.partition("## Verdicts")[0].partition("## Findings")[2]


def test_check_tells_a_page_of_other_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = made_evidence.write(
        tmp_path / "made.jsonl", made_evidence.whole_run([made_evidence.cell(candidate="liger.jsd")])
    )
    copy = tmp_path / "conformance.md"
    copy.write_text(conformance.PAGE.read_text())
    monkeypatch.setattr(conformance, "PAGE", copy)
    monkeypatch.setattr("sys.argv", ["conformance.py", str(evidence), "--check"])
    assert conformance.main() == 1
    monkeypatch.setattr("sys.argv", ["conformance.py", str(evidence)])
    assert conformance.main() == 0
    monkeypatch.setattr("sys.argv", ["conformance.py", str(evidence), "--check"])
    assert conformance.main() == 0
