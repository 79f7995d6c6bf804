# SPDX-License-Identifier: Apache-2.0
"""Measures how often the cause of a bug is named, and how often a wrong one: bugs that were written
by people who did not know the known mistakes.

    python benchmarks/diagnosis.py first            # one half of the bugs
    python benchmarks/diagnosis.py first second     # all
    python benchmarks/diagnosis.py first --only temperature_not_in_backward
    python benchmarks/diagnosis.py first --without  # what is said if the right names are taken out

A name is right if ``unseen_bugs/answers.toml`` lists it for the bug: a person who read the kernel
has judged it. What is listed for no bug counts as wrong.
"""

import argparse
import importlib.util
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Literal

import torch

from lossgate import Candidate, Layout
from lossgate.diagnosis.cause import Diagnosis
from lossgate.engine import run_cell as engine
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.settings import PROFILES

HERE = Path(__file__).parent / "unseen_bugs"
ANSWERS = HERE / "answers.toml"
Outcome = Literal["named", "wrong", "nothing", "not seen"]


@dataclass(frozen=True)
class Row:
    """What came of one bug on one layout."""

    bug: str
    layout: str
    outcome: Outcome
    seconds: float
    sentences: tuple[str, ...]


def modules(half: str) -> Iterator[ModuleType]:
    """Yields the files of a half, imported."""
    for file in sorted((HERE / half).glob("*.py")):
        name = f"unseen_bugs_{half}_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def bugs(half: str) -> Iterator[tuple[Candidate, str]]:
    """Yields the bugs of a half, each with a layout that shows it: the one with the most ranks."""
    for module in modules(half):
        for name, layouts in module.BUGS.items():
            yield getattr(module, name), max(layouts, key=lambda text: Layout.parse(text).ranks)


def diagnosed(candidate: Candidate, layout: str, answers: Mapping[str, list[str]], *, without: bool) -> Row:
    """Verifies a bug as a user would, and judges the name that is said.

    Args:
        candidate: the bug.
        layout: where it is verified.
        answers: the right names of each bug.
        without: whether these are not to be said.
    """
    spent = [0.0]

    def timed(*given) -> Diagnosis | None:
        start = process_time()
        try:
            return _DIAGNOSE(*given, without=answers.get(candidate.name, ()) if without else ())
        finally:
            spent[0] = process_time() - start

    engine.diagnose = timed
    result = engine.run_cell(Cell(candidate, Layout.parse(layout), candidate.dtypes[0]), PROFILES["nightly"])
    engine.diagnose = _DIAGNOSE
    outcome: Outcome = "nothing"
    if result.verdict is not Verdict.DISAGREE:
        outcome = "not seen"
    elif result.diagnosis is not None and result.diagnosis.causes:
        known = answers.get(candidate.name, [])
        outcome = "named" if all(cause.name in known for cause in result.diagnosis.causes) else "wrong"
    return Row(candidate.name, layout, outcome, spent[0], result.causes or result.reasons[:1])


_DIAGNOSE = engine.diagnose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("halves", nargs="+", choices=("first", "second", "third", "fourth"))
    parser.add_argument("--without", action="store_true", help="take the right names out of the known mistakes")
    parser.add_argument("--only", nargs="*", default=(), help="the bugs of these names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    answers = tomllib.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for half in given.halves:
        rows: list[Row] = []
        for candidate, layout in bugs(half):
            if not given.only or candidate.name in given.only:
                rows.append(diagnosed(candidate, layout, answers, without=given.without))
                print(f"{rows[-1].outcome:9} {candidate.name}  {layout}  {rows[-1].seconds:.1f} s", flush=True)
                for sentence in rows[-1].sentences:
                    print(f"          {sentence}", flush=True)
        counts = Counter(row.outcome for row in rows)
        shares = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("named", "wrong", "nothing", "not seen"))
        print(f"{half} half: {len(rows)} bugs: {shares}; at most {max(row.seconds for row in rows):.1f} CPU seconds")


if __name__ == "__main__":
    main()
