# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate audit``: what a configuration would have seen, and what it would not."""

from dataclasses import replace
from pathlib import Path

import pytest

from lossgate import Layout, OwnMistake
from lossgate.cli.audit import audit_lines
from lossgate.declaration.loading import load_candidates
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell
from lossgate.engine.dry_run import Audit, audit
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld
from property_tests.meta.command_line import Lossgate

DENSE = dense_candidate(SPECS["nll"], "logprobs")
KERNEL = """
import lossgate

@lossgate.candidate("nll", head="logprobs", axes=("dp", "cp"){declared})
def kernel(inputs, options, mesh):
    raise AssertionError("no kernel is run")
"""


def audited(folder: Path, *layouts: str, declared: str = "", examples: int = 20, dtype: str = "float32") -> Audit:
    file = folder / f"kernel{abs(hash((declared, layouts)))}.py"
    file.write_text(KERNEL.format(declared=declared))
    settings = Settings(layouts=layouts, dtypes=(dtype,), examples=examples)
    (found,) = audit(load_candidates(str(file)), settings)
    return found


def test_it_asks_the_problems_that_a_right_kernel_is_tried_on() -> None:
    world = SimulatedWorld(Layout(cp=2))
    search = Search(Cell(DENSE, Layout(cp=2), "float32"), world, Settings())
    try:
        expected = [placed.problem for placed in search.first_problems()]
        assert len(expected) >= 15
        search.run()
    finally:
        world.close()
    assert [placed.problem for placed in search.placed][: len(expected)] == expected


def test_mistakes_of_ranks_need_a_layout_with_ranks(tmp_path: Path) -> None:
    own_count = "valid_tokens local over cp, times ranks"
    alone, split = audited(tmp_path, "single"), audited(tmp_path, "cp=2")
    assert own_count in alone.impossible
    assert own_count in split.seen
    assert len(split.seen) > len(alone.seen) > 20
    both = audited(tmp_path, "single", "cp=2")
    assert both.seen.keys() == alone.seen.keys() | split.seen.keys()
    assert (both.cells, split.cells) == (2, 1)


@pytest.mark.slow
def test_a_mistake_in_an_option_needs_a_kernel_that_supports_it(tmp_path: Path) -> None:
    other = "epsilon as 0.0"
    assert other not in audited(tmp_path, "dp=2,cp=2").seen
    assert other in audited(tmp_path, "dp=2,cp=2", declared=", supports={'epsilon': (0.0, 1e-5)}").seen


def test_what_rounding_hides_would_have_passed(tmp_path: Path) -> None:
    """Numbers in bfloat16 say nothing of an epsilon of 1e-5."""
    declared = (
        ", dtypes=('bfloat16',), precision=lossgate.Precision(loss='bfloat16'), supports={'epsilon': (0.0, 1e-5)}"
    )
    found = audited(tmp_path, "single", declared=declared, dtype="bfloat16")
    assert found.unseen
    lines = list(audit_lines(found))
    assert lines[1] == "  would have passed:"
    first = next(iter(found.unseen.values()))
    assert lines[2].startswith(f"    {first.sentence}  (single")
    possible = len(found.seen) + len(found.unseen)
    assert lines[0].startswith(f"kernel: {len(found.seen)} of {possible} known mistakes would have been seen (")


def test_what_no_problem_could_show_a_property_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnMistake(sentence="one is added", matters=lambda case: True, can_show=lambda case: False)
    blind = replace(PROPERTIES["no-grad"], mistakes=lambda candidate: (own,))
    assert not audited(tmp_path, "single").of_properties
    monkeypatch.setitem(PROPERTIES, "no-grad", blind)
    assert "    property no-grad: one is added  (single)" in audit_lines(audited(tmp_path, "single"))


def test_the_command_lists_every_mistake_when_asked(tmp_path: Path, lossgate: Lossgate) -> None:
    (tmp_path / "mine.py").write_text(KERNEL.format(declared=""))
    given = ("audit", str(tmp_path / "mine.py"), "--layout", "single", "--dtype", "float32", "--examples", "3")
    short, full, metrics = (lossgate(*given, *more) for more in ((), ("--every",), ("--every", "--metrics")))
    assert (short.returncode, short.stderr) == (0, "")
    assert "more can't be made here: they need other layouts, options or tiles" in short.stdout
    assert len(full.stdout.splitlines()) > 50
    assert "    the loss is multiplied by 2, in value and gradient" in full.stdout.splitlines()
    assert len(metrics.stdout.splitlines()) > len(full.stdout.splitlines())
    assert "nothing named" in lossgate("audit").stderr
