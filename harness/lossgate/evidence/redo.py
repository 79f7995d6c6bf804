# SPDX-License-Identifier: Apache-2.0
"""Redoes verdicts from the numbers in evidence, without running anything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite

from lossgate.evidence.columns import ROUNDING, Columns
from lossgate.evidence.records import WITHOUT_NOISE, CellRecord, OutputRecord, VerdictName
from lossgate.judge.pooling import FEWEST, LARGEST_MDE, PooledNoise


@dataclass(frozen=True)
class Redone:
    """What the numbers of a record say."""

    verdict: VerdictName
    margin: float
    """The largest statistic of any comparison, as a share of its limit."""
    symptoms: tuple[str, ...]
    """What disagrees: outputs, and faults beside them."""
    contradiction: str
    """How the record contradicts its own numbers, in words; empty if it does not."""


def redo(records: Sequence[CellRecord]) -> list[Redone]:
    """Returns what the numbers of each record say."""
    columns = Columns(records)
    margins, pooled = iter(columns.margins()), _pool(columns)
    return [_redo(record, list(islice(margins, len(record.outputs))), pooled) for record in records]


def _redo(record: CellRecord, margins: Sequence[float], pooled: Iterator[str]) -> Redone:
    wrong_pools = "; ".join(dict.fromkeys(filter(None, islice(pooled, len(record.outputs)))))
    wrong = [output.name for output, margin in zip(record.outputs, margins, strict=True) if _disagrees(output, margin)]
    of_failure = record.failure.symptoms if record.failure is not None else ()
    broken = [f"property {held_to.name}" for held_to in record.properties if held_to.findings]
    symptoms = tuple(sorted({*wrong, *record.faults, *of_failure, *broken}))
    verdict = _verdict(record, bool(symptoms) or record.failure is not None)
    contradiction = wrong_pools or _contradiction(record, verdict)
    return Redone(verdict, max(margins, default=0.0), symptoms, contradiction)


def _contradiction(record: CellRecord, redone: VerdictName) -> str:
    if wrong := _wrong_counts(record) or _wrong_outputs(record) or _wrong_properties(record):
        return wrong
    if not _near(record.mde, (mde := largest_mde(record))):
        return f"its mde is {record.mde}, and its numbers give {mde}"
    if (known := record.known_failure) is not None:
        if record.verdict != "DISAGREE":
            return f"its verdict is {record.verdict}, and a known failure disagrees"
        if known.expected and (redone != "DISAGREE" or record.failure is None):
            return f"its known failure is said to be as expected, and its numbers give {redone}"
        return ""
    if record.property == "agreement" and not record.needs_adequacy:
        return "it says that agreement needs no coverage, and it does"
    if redone != record.verdict:
        return f"its verdict is {record.verdict}, and its numbers give {redone}"
    if bool(record.reasons) == (record.verdict == "AGREE"):
        return f"its verdict is {record.verdict}, and it gives {'a' if record.reasons else 'no'} reason against AGREE"
    return ""


def _wrong_counts(record: CellRecord) -> str:
    """Returns how the counts of a record contradict its lists, in words; empty if they do not."""
    count, cases = 0, set[int]()
    for output in record.outputs:
        count += len(output.cases) + len(output.without_numbers)
        cases.update(output.cases, output.without_numbers)
    if count != record.comparisons:
        return f"it says {record.comparisons} comparisons, and has {count}"
    if cases and max(cases) >= record.problems:
        return f"it says {record.problems} problems, and has the numbers of problem {max(cases)}, counted from 0"
    if record.verdict == "AGREE" and record.needs_adequacy and len(cases) < record.problems:
        return f"it says {record.problems} problems, and has comparisons of {len(cases)}"
    if record.coverage and max(record.coverage.values()) > record.problems:
        return f"it says that {max(record.coverage.values())} of {record.problems} problems reach a goal"
    return ""


_NO_METRICS = ("loss", "logprobs", "token_entropy")


def _wrong_outputs(record: CellRecord) -> str:
    """Returns what no record says of outputs; empty if it does not."""
    names = [output.name for output in record.outputs]
    if len(set(names)) < len(names):
        return "it has an output twice"
    for output in record.outputs:
        if output.metric and (output.name in _NO_METRICS or output.name.startswith("grad of ")):
            return f"it says that {output.name} is a metric"
        if output.cases and output.noise is None and record.schema != WITHOUT_NOISE:
            return f"it has schema {record.schema}, and does not say how noisy {output.name} is"
    return ""


def _wrong_properties(record: CellRecord) -> str:
    """Returns what no record says of properties; empty if it does not."""
    names = [held_to.name for held_to in record.properties]
    if len(set(names)) < len(names) or record.property in names:
        return "it has a property twice"
    for held_to in record.properties:
        if held_to.exempt and (held_to.problems or held_to.findings):
            return f"it is exempt from property {held_to.name}, and was held to it"
        if (held_to.findings or held_to.comparisons) and not held_to.problems:
            return f"property {held_to.name} was checked on no problem, and found something"
        if not held_to.findings and not (held_to.margin is not None and held_to.margin <= 1):
            return f"property {held_to.name} has a margin of {held_to.margin}, and no finding"
    return ""


def largest_mde(record: CellRecord) -> float | None:
    """Returns the minimum detectable effect of the output with the least power; None if it is
    infinite.

    Metrics that were zero on every problem are left out.
    """
    counted = [output for output in record.outputs if output.pooled is not None or _must_be_compared(output)]
    effects = [output.pooled.mde for output in counted if output.pooled is not None]
    return max(effects) if effects and len(effects) == len(counted) else None


def _verdict(record: CellRecord, disagrees: bool) -> VerdictName:
    """Returns the verdict that numbers give, by the rules of ``engine/verdict.py``."""
    if disagrees:
        return "DISAGREE"
    return "INCONCLUSIVE" if any(True for _ in _gaps(record)) else "AGREE"


def _disagrees(output: OutputRecord, margin: float) -> bool:
    if output.faults or not margin <= 1:
        return True
    pooled = output.pooled
    if pooled is None:
        return False
    return not abs(pooled.scale) <= pooled.limit or (
        pooled.noise is not None and not pooled.noise.noise <= pooled.noise.limit
    )


def _hides_scale(output: OutputRecord) -> bool:
    """Returns whether the scale of an output could be wrong."""
    if output.pooled is None:
        return _must_be_compared(output)
    few = bool(output.silent) and not output.metric and output.pooled.problems < FEWEST
    return few or not output.pooled.mde <= LARGEST_MDE


def _must_be_compared(output: OutputRecord) -> bool:
    """Returns whether the scale of an output must be compared. A metric may be zero everywhere."""
    return not output.metric or bool(output.silent)


def _gaps(record: CellRecord) -> Iterator[str]:
    """Yields what was not seen enough of."""
    too_few = record.problems < (FEWEST if record.needs_adequacy else 1)
    if too_few or (record.needs_adequacy and all(output.metric for output in record.outputs)):
        yield "problems"
    for output in record.outputs:
        yield from output.blind
        if record.needs_adequacy and _hides_scale(output):
            yield output.name
    yield from (goal for goal in record.required if not record.coverage.get(goal))
    yield from set(record.surviving).difference(record.equivalent)
    yield from record.mistakes_surviving
    yield from record.untried


def _pool(columns: Columns) -> Iterator[str]:
    """Yields for each output how it contradicts its own pool, in words; empty if it does not."""
    sizes, pools = columns.pooled()
    size, scales, limits = iter(sizes), iter(pools.scale.tolist()), iter(pools.limit.tolist())
    noises = iter(zip(*(numbers.tolist() for numbers in columns.pooled_noise()), strict=True))
    silence = iter(columns.wrong_silence())
    for output, fits, schema in zip(columns.outputs, columns.fitting, columns.schemas, strict=True):
        if not fits:
            yield f"the lists of {output.name} do not have one entry for each comparison"
            continue
        noise, wrong = PooledNoise(*next(noises)), next(silence)
        contradiction = f"what {output.name} says of silent comparisons is not what their limits say"
        silent = contradiction if wrong and schema != WITHOUT_NOISE else ""
        if problems := next(size):
            yield _compare(output, problems, next(scales), next(limits)) or _compare_noise(output, noise) or silent
        else:
            yield f"{output.name} is pooled, and no problem says anything about its scale" if output.pooled else silent


def _compare(output: OutputRecord, problems: int, scale: float, limit: float) -> str:
    said = output.pooled
    if said is None:
        return f"{output.name} is not pooled, and {problems} problems say something about its scale"
    if said.problems != problems:
        return f"{output.name} is pooled over {said.problems} problems, and has the numbers of {problems}"
    near = ROUNDING * (abs(limit) + abs(scale))
    if not (abs(said.scale - scale) <= near and abs(said.limit - limit) <= near):  # also if one is no number
        return (
            f"{output.name} has a pooled scale of {said.scale:.6g} +- {said.limit:.6g}, "
            f"and its numbers give {scale:.6g} +- {limit:.6g}"
        )
    return ""


def _compare_noise(output: OutputRecord, noise: PooledNoise) -> str:
    said = None if output.pooled is None else output.pooled.noise
    if said is None:
        return f"the noise of {output.name} is not pooled, and its numbers are enough" if isfinite(noise.limit) else ""
    if said.problems != noise.problems:
        return (
            f"the noise of {output.name} is pooled over {said.problems} problems, "
            f"and its numbers are of {noise.problems}"
        )
    if not (_near(said.noise, noise.noise) and _near(said.limit, noise.limit)):  # also if one is no number
        return (
            f"{output.name} has a pooled noise of {said.noise:.6g} and a limit of {said.limit:.6g}, "
            f"and its numbers give {noise.noise:.6g} and {noise.limit:.6g}"
        )
    return ""


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= ROUNDING * max(abs(a), abs(b))
