# SPDX-License-Identifier: Apache-2.0
"""Redoes verdicts from the numbers in evidence, without running anything."""

from collections.abc import Iterator, Sequence

from lossgate.evidence.records import CellRecord, OutputRecord, VerdictName
from lossgate.judge.pooled_scale import LARGEST_MDE, pool_scales, smallest_bias

_ROUNDING = 1e-3
"""Relative error of a pooled scale or limit that is explained by the digits that evidence keeps."""


def contradictions(records: Sequence[CellRecord]) -> list[str]:
    """Returns for each record how it contradicts its own numbers, in words; "" if it does not."""
    pooled = _pool([output for record in records for output in record.outputs])
    return [_contradiction(record, pooled) for record in records]


def _contradiction(record: CellRecord, pooled: Iterator[str]) -> str:
    wrong = "; ".join(dict.fromkeys(filter(None, [next(pooled) for _ in record.outputs])))
    if wrong:
        return wrong
    count = sum(len(output.cases) for output in record.outputs)
    if count > record.comparisons:
        return f"it says {record.comparisons} comparisons, and has the numbers of {count}"
    if not _near(record.mde, (mde := largest_mde(record))):
        return f"its mde is {record.mde}, and its numbers give {mde}"
    cases = {case for output in record.outputs for case in output.cases}
    if cases and max(cases) >= record.problems:
        return f"it says {record.problems} problems, and has the numbers of problem {max(cases)}, counted from 0"
    redone = redo(record)
    if record.known_failure is not None:
        if record.verdict != "DISAGREE":
            return f"its verdict is {record.verdict}, and a known failure disagrees"
        if record.known_failure.expected and redone != "DISAGREE":
            return f"its known failure is said to be as expected, and its numbers give {redone}"
        return ""
    if redone != record.verdict:
        return f"its verdict is {record.verdict}, and its numbers give {redone}"
    return ""


def largest_mde(record: CellRecord) -> float | None:
    """Returns the minimum detectable effect of the output with the least power; None if it is
    infinite.

    Metrics that were zero on every problem are left out.
    """
    told = [output for output in record.outputs if output.pooled is not None or not output.metric]
    effects = [output.pooled.mde for output in told if output.pooled is not None]
    return max(effects) if effects and len(effects) == len(told) else None


def redo(record: CellRecord) -> VerdictName:
    """Returns the verdict that the numbers of a record give."""
    if record.faults or record.failure is not None or any(map(_disagrees, record.outputs)):
        return "DISAGREE"
    return "INCONCLUSIVE" if any(True for _ in _gaps(record)) else "AGREE"


def _disagrees(output: OutputRecord) -> bool:
    if output.faults:
        return True
    if any(abs(scale) > limit for scale, limit in zip(output.scale, output.limit, strict=True)):
        return True
    if any(share is None or share > 1 for shares in output.shares.values() for share in shares):
        return True
    return output.pooled is not None and abs(output.pooled.scale) > output.pooled.limit


def _gaps(record: CellRecord) -> Iterator[str]:
    """Yields what was not seen enough of."""
    if not record.problems:
        yield "problems"
    for output in record.outputs:
        yield from output.blind
        if record.needs_adequacy and (not output.metric if output.pooled is None else output.pooled.mde > LARGEST_MDE):
            yield output.name
    yield from (goal for goal in record.required if not record.coverage.get(goal))
    yield from set(record.surviving).difference(record.equivalent)


def _pool(outputs: Sequence[OutputRecord]) -> Iterator[str]:
    """Yields for each output how it contradicts its own pool, in words; "" if it does not."""
    told = [_telling(output) for output in outputs]
    used = [(output, which) for output, which in zip(outputs, told, strict=True) if which]
    redone = pool_scales(
        scales=[output.scale[i] for output, which in used for i in which],
        sds=[output.sd[i] for output, which in used for i in which],
        means=[output.mean[i] for output, which in used for i in which],
        limits=[output.limit[i] for output, which in used for i in which],
        floors=smallest_bias([output.unit for output, _ in used], [output.kernels for output, _ in used]),
        sizes=[len(which) for _, which in used],
    )
    scales, limits = iter(redone.scale.tolist()), iter(redone.limit.tolist())
    for output, which in zip(outputs, told, strict=True):
        if which is None:
            yield f"the lists of {output.name} do not have one entry for each comparison"
        elif not which:
            yield f"{output.name} is pooled, and no problem says anything about its scale" if output.pooled else ""
        else:
            yield _compare(output, len(which), next(scales), next(limits))


def _telling(output: OutputRecord) -> list[int] | None:
    """Returns the comparisons that say something about an output's scale; None if its lists do not
    fit each other.
    """
    count = len(output.cases)
    lists = (output.scale, output.limit, output.sd, output.mean, *output.shares.values())
    if any(len(one) != count for one in lists):
        return None
    return [i for i in range(count) if i not in output.vacuous]


def _compare(output: OutputRecord, problems: int, scale: float, limit: float) -> str:
    said = output.pooled
    if said is None:
        return f"{output.name} is not pooled, and {problems} problems say something about its scale"
    if said.problems != problems:
        return f"{output.name} is pooled over {said.problems} problems, and has the numbers of {problems}"
    near = _ROUNDING * (abs(limit) + abs(scale))
    if not (abs(said.scale - scale) <= near and abs(said.limit - limit) <= near):  # also if one is no number
        return (
            f"{output.name} has a pooled scale of {said.scale:.6g} +- {said.limit:.6g}, "
            f"and its numbers give {scale:.6g} +- {limit:.6g}"
        )
    return ""


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= _ROUNDING * max(abs(a), abs(b))
