# SPDX-License-Identifier: Apache-2.0
"""The power of the problems of a cell, and what was lost of it from one record to a later one."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from sys import intern

from lossgate.engine.cell_record import CellRecord
from lossgate.engine.output_record import OutputRecord

FACTOR = 1.5
"""A loss is reported if the minimum detectable effect of an output grows, or the share of planted
errors that are rejected falls, by more than this factor.

Half as many problems made the effect 1.4 to 6 times as large (36 pairs of outputs of cross entropy,
20 problems and 10). Another seed made it more than 1.4 times as large in 6 of 36 pairs.
"""


@dataclass(frozen=True, slots=True)
class SeenOutput:
    """The power with which an output was compared."""

    mde: float
    """The minimum detectable effect of the output; infinite if its scale was never compared."""
    planted: dict[str, float]
    """The share of the planted errors that were rejected, by kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """The power of the problems of a cell. ``losses`` compares two of these."""

    time: str
    problems: int
    outputs: dict[str, SeenOutput]
    """The outputs that were compared, by name."""
    covered: frozenset[str]
    """The coverage goals that were reached."""
    killed: int
    unkilled: frozenset[str]
    """The option mutants that survive, including the equivalent ones."""
    needs_adequacy: bool


def sight_of(record: CellRecord) -> Sight:
    """Returns the power of the problems of a cell."""
    return Sight(
        time=record.time,
        problems=record.problems,
        outputs={intern(output.name): _seen(output) for output in record.outputs if output.cases},
        covered=frozenset(intern(goal) for goal, count in record.coverage.items() if count),
        killed=record.killed,
        unkilled=frozenset(map(intern, {*record.surviving, *record.equivalent})),
        needs_adequacy=record.needs_adequacy,
    )


def _seen(output: OutputRecord) -> SeenOutput:
    mde = inf if output.pooled is None else output.pooled.mde
    return SeenOutput(mde, {intern(name): rejected for name, rejected in output.planted.items()})


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the later record shows less well, or not at all."""

    message: str
    factor: float = inf
    """How many times less is seen; infinite if nothing is."""


def losses(before: Sight, after: Sight) -> list[Loss]:
    """Returns what ``after`` shows less well than ``before``, the gravest loss first."""
    return sorted(_losses(before, after), key=lambda loss: -loss.factor)


def _losses(before: Sight, after: Sight) -> Iterator[Loss]:
    if gone := sorted(before.outputs.keys() - after.outputs.keys()):
        yield Loss(f"no longer compared: {', '.join(gone)}")
    if gone := sorted(before.covered - after.covered):
        yield Loss(f"goals not reached any more: {', '.join(gone)}")
    if survive := sorted(after.unkilled - before.unkilled):
        yield Loss(f"option mutants that survive now: {', '.join(survive)}")
    elif after.killed < before.killed:
        message = f"{before.killed} option mutants were killed, now {after.killed}"
        yield Loss(message, before.killed / max(after.killed, 1))
    if before.needs_adequacy and not after.needs_adequacy:
        yield Loss("goals and option mutants are not asked for any more")
    for name in sorted(before.outputs.keys() & after.outputs.keys()):
        yield from _of_output(name, before.outputs[name], after.outputs[name])
    if after.problems < before.problems:
        yield Loss(f"{before.problems} problems, now {after.problems}", before.problems / max(after.problems, 1))


def _of_output(name: str, before: SeenOutput, after: SeenOutput) -> Iterator[Loss]:
    for error, rejected in before.planted.items():
        now = after.planted.get(error, 0.0)
        if rejected > FACTOR * now:
            message = f"planted error {error} in {name}: rejected in {rejected:.0%} of the problems, now in {now:.0%}"
            yield Loss(message, rejected / now if now else inf)
    if after.mde == inf and before.mde < inf:
        yield Loss(f"the scale of {name} is not compared any more")
    elif after.mde > FACTOR * before.mde:
        message = f"{name} detected errors from {before.mde:.2g}, now only from {after.mde:.2g}"
        yield Loss(message, after.mde / before.mde)


def in_words(found: Iterable[Loss]) -> str:
    return "; ".join(loss.message for loss in found)
