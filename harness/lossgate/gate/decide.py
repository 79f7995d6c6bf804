# SPDX-License-Identifier: Apache-2.0
"""Decides whether a gate is open: holds evidence to a policy. Missing evidence closes it."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime

from lossgate.engine.cell_record import CellKey
from lossgate.evidence.gather import Gathered
from lossgate.evidence.reader import Digested
from lossgate.gate.cells import CellJudge, Need
from lossgate.gate.gate_verdict import Blocker, GateReason, GateVerdict
from lossgate.gate.kept_properties import check_property_names
from lossgate.gate.policy import Policy
from lossgate.gate.policy_patterns import Demand, KnownCells
from lossgate.gate.runs import Run, all_committed, different_code, incomplete, runs_of, wrong_matrix, wrong_time


def decide(evidence: Gathered, policy: Policy, now: datetime, commit: str | None = None) -> GateVerdict:
    """Holds evidence to a policy. The same arguments give the same verdict.

    Args:
        evidence: all evidence for the release.
        policy: what a release needs.
        now: the time at which the age of evidence is measured.
        commit: the commit that is to be released; all evidence must be of it.

    Raises:
        UsageError: if the policy names a property that does not exist.
    """
    check_property_names(policy, evidence)
    runs = runs_of(evidence)
    found = [*_of_lines(evidence), *_of_runs(runs, policy, now, commit)]
    needs, unmet = _needs(evidence, policy)
    found += unmet
    by_cell: defaultdict[CellKey, list[Blocker]] = defaultdict(list)
    for blocker in found:
        if blocker.cell is not None:
            by_cell[blocker.cell].append(blocker)
    judge = CellJudge(evidence, policy, needs, now.astimezone(UTC).date())
    keys = sorted({*evidence.cells, *by_cell, *(rule.key for rule in policy.known_failures)})
    cells = tuple(judge.judge(key, by_cell.get(key, ())) for key in keys)
    return GateVerdict(
        general=tuple(dict.fromkeys(blocker for blocker in found if blocker.cell is None)),
        cells=cells,
        policy=Digested(file=str(policy.file), sha256=policy.sha256),
        evidence=evidence.files,
        commits=tuple(sorted({run.record.commit for run in runs if run.record and run.record.commit})),
        committed=all_committed(evidence.runs.values(), (cell for run in runs for cell in run.cells)),
        sources=_sources(runs),
        versions=_versions(runs),
    )


def _of_lines(evidence: Gathered) -> Iterator[Blocker]:
    if not evidence.cells:
        files = ", ".join(file.file for file in evidence.files) or "no file"
        yield Blocker(reason=GateReason.EMPTY, message=f"there is no evidence of any cell in {files}")
    for line in evidence.damaged:
        yield Blocker(reason=GateReason.DAMAGED, message=f"{line.where}: {line.message}", where=str(line.where))
    for where in evidence.repeated:
        message = f"{where}: another line has started or ended this run differently"
        yield Blocker(reason=GateReason.CONTRADICTORY, message=message, where=str(where))


def _of_runs(runs: list[Run], policy: Policy, now: datetime, commit: str | None) -> Iterator[Blocker]:
    for run in runs:
        yield from incomplete(run)
        yield from wrong_time(run, policy.evidence, now)
    yield from wrong_matrix(runs)
    yield from different_code(runs, policy.evidence, commit)


def _needs(evidence: Gathered, policy: Policy) -> tuple[dict[CellKey, Need], list[Blocker]]:
    """Returns the need of each required cell that is there, and a blocker for each unmet demand."""
    known = KnownCells(evidence.cells)
    needs: dict[CellKey, Need] = {}
    unmet: list[Blocker] = []
    for rule in policy.require:
        need = Need(rule.min_problems, rule.largest_mde, frozenset(rule.keeps), rule.numbers_only)
        where = policy.where(rule)
        for demand in rule.demands(known):
            for key in demand.cells:
                needs[key] = _strictest(needs.get(key, need), need)
            if not demand.is_met:
                unmet.append(_missing(demand, where))
    return needs, unmet


def _missing(demand: Demand, where: str) -> Blocker:
    if demand.key is not None:
        what = f"there is no evidence of it, but {where} asks for it"
    else:
        what = f"{demand}, which {where} asks for"
    return Blocker(
        reason=GateReason.MISSING, message=f"{what}. Verify it, or change the policy", cell=demand.key, where=where
    )


def _strictest(one: Need, other: Need) -> Need:
    if one == other:
        return one
    problems, effect = max(one.min_problems, other.min_problems), min(one.max_mde, other.max_mde)
    return Need(problems, effect, one.keeps | other.keeps, one.numbers_only and other.numbers_only)


def _sources(runs: list[Run]) -> tuple[Digested, ...]:
    pairs = {(cell.source_file, cell.source_digest) for run in runs for cell in run.cells}
    return tuple(Digested(file=file, sha256=digest) for file, digest in sorted(pairs, key=str) if digest is not None)


def _versions(runs: list[Run]) -> dict[str, tuple[str, ...]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for run in runs:
        if run.record is not None:
            for name, version in run.record.versions.items():
                found[name].add(version)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}
