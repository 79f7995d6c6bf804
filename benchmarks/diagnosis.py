# SPDX-License-Identifier: Apache-2.0
"""Measures how often the cause of a bug is named, and how often a wrong one: bugs that were written
by people who did not know the known mistakes.

    python benchmarks/diagnosis.py ninth            # one part of the bugs
    python benchmarks/diagnosis.py ninth witnesses  # several
    python benchmarks/diagnosis.py ninth --only bias_grad_of_last_chunk
    python benchmarks/diagnosis.py ninth --without  # what is said if the right names are taken out

A name is right if ``unseen_bugs/answers.toml`` lists it for the bug: a person who read the kernel
has judged it. What is listed for no bug counts as wrong. With ``--without`` no listed name can be
said. There a name is equal in effect if it explains what the kernel returns on 24 more failing
problems, from other random numbers than those that named it.
"""

import argparse
import importlib.util
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Literal

import torch

from lossgate import Candidate, Layout
from lossgate.base.errors import CandidateError
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.loss_terms import terms
from lossgate.counterfactuals.families.operations import operations
from lossgate.diagnosis.cause import Cause, Diagnosis
from lossgate.diagnosis.fitted_numbers import fitted_factors
from lossgate.diagnosis.observed import Observed
from lossgate.diagnosis.partly import partly
from lossgate.engine import run_cell as engine
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.diagnose import further_cases
from lossgate.engine.settings import PROFILES, Settings
from lossgate.problems.problem import Problem
from lossgate.worlds.base import RankFailure, World

HERE = Path(__file__).parent / "unseen_bugs"
ANSWERS = HERE / "answers.toml"
PARTS = ("ninth", "witnesses")
Outcome = Literal["named", "equal", "wrong", "nothing", "not seen"]
MORE = 24
"""Failing problems on which a name that is equal in effect must explain the kernel."""
EXCEPT = ", except with "
"""How a condition begins that says which problems a mistake does not explain."""


@dataclass(frozen=True)
class Row:
    """What came of one bug on one layout."""

    bug: str
    layout: str
    outcome: Outcome
    seconds: float
    sentences: tuple[str, ...]


def modules(part: str) -> Iterator[ModuleType]:
    """Yields the files of a part, imported."""
    for file in sorted((HERE / part).glob("*.py")):
        name = f"unseen_bugs_{part}_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def bugs(part: str) -> Iterator[tuple[Candidate, str]]:
    """Yields the bugs of a part, each with a layout that shows it: the one with the most ranks."""
    for module in modules(part):
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
    spent, equal = 0.0, False

    def timed(cell: Cell, failing: Problem, world: World, settings: Settings) -> Diagnosis:
        nonlocal spent, equal
        start = process_time()
        names = answers.get(candidate.name, ()) if without else ()
        found = _DIAGNOSE(cell, failing, world, settings, names)
        spent = process_time() - start
        if without and found.causes:
            equal = explains_more(found, cell, failing, world, settings)
        return found

    engine.diagnose = timed
    result = engine.run_cell(Cell(candidate, Layout.parse(layout), candidate.dtypes[0]), PROFILES["nightly"])
    engine.diagnose = _DIAGNOSE
    outcome: Outcome = "nothing"
    if result.verdict is not Verdict.DISAGREE:
        outcome = "not seen"
    elif result.run.diagnosis is not None and result.run.diagnosis.causes:
        known = answers.get(candidate.name, [])
        outcome = "named" if all(cause.name in known for cause in result.run.diagnosis.causes) else "wrong"
        outcome = "equal" if outcome == "wrong" and equal else outcome
    return Row(candidate.name, layout, outcome, spent, result.record.causes or result.reasons[:1])


def explains_more(diagnosis: Diagnosis, cell: Cell, failing: Problem, world: World, settings: Settings) -> bool:
    """Returns whether all that was named explains what the kernel returns on more problems, from
    other random numbers.

    Args:
        diagnosis: what was said.
        cell: where the kernel was verified.
        failing: the problem on which it failed first.
        world: where its ranks run.
        settings: with which it was verified.
    """
    seen: list[Observed] = []
    with further_cases(cell, failing, world, replace(settings, seed=settings.seed + 1)) as cases:
        for case in cases:
            try:
                seen.append(Observed(case))
            except (RankFailure, CandidateError):
                continue
            if sum(bool(one.wrong) for one in seen) == MORE:
                return all(_explains(seen, cause, diagnosis) for cause in diagnosis.causes)
    return False


def _explains(seen: Sequence[Observed], cause: Cause, diagnosis: Diagnosis) -> bool:
    asked, failing = list(seen), [one for one in seen if one.wrong]
    if diagnosis.condition.startswith(EXCEPT):
        asked = [one for one in seen if diagnosis.condition.removeprefix(EXCEPT) not in one.traits]
    elif diagnosis.condition:
        asked = failing
    made = {one: each for one in asked if (each := _counterfactual(one, cause.name)) is not None}
    if diagnosis.partly and not diagnosis.condition:  # it limits itself to some rows
        found = partly(failing, [made[one] for one in failing[:1] if one in made])
        return any(one.cause.words == cause.words for one in found)
    return all(one in made for one in asked if one.wrong) and all(
        one.fits(mistake, one.wrong if diagnosis.scope or mistake.of_any_output else one.got)
        for one, mistake in made.items()
    )


def _counterfactual(seen: Observed, name: str) -> Counterfactual | None:
    bank = counterfactuals_of(seen.case.candidate.spec, seen.case.candidate.head)
    made = () if name in bank else chain(terms(seen.setting), fitted_factors(seen), operations(seen.setting))
    return bank.get(name) or next((each for each in made if each.name == name), None)


_DIAGNOSE = engine.diagnose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--without", action="store_true", help="take the right names out of the known mistakes")
    parser.add_argument("--only", nargs="*", default=(), help="the bugs of these names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    answers = tomllib.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for part in given.parts:
        rows: list[Row] = []
        for candidate, layout in bugs(part):
            if not given.only or candidate.name in given.only:
                rows.append(diagnosed(candidate, layout, answers, without=given.without))
                print(f"{rows[-1].outcome:9} {candidate.name}  {layout}  {rows[-1].seconds:.1f} s", flush=True)
                for sentence in rows[-1].sentences:
                    print(f"          {sentence}", flush=True)
        counts = Counter(row.outcome for row in rows)
        shares = ", ".join(
            f"{counts[outcome]} {outcome}" for outcome in ("named", "equal", "wrong", "nothing", "not seen")
        )
        most = max((row.seconds for row in rows), default=0.0)
        print(f"{part} part: {len(rows)} bugs: {shares}; at most {most:.1f} CPU seconds")


if __name__ == "__main__":
    main()
