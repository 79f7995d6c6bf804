# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a kernel makes at some tokens alone, or everywhere but at some."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.explanation import Explanation
from lossgate.diagnosis.observed import Observed
from lossgate.diagnosis.traits import Traits, traits_of
from lossgate.diagnosis.where import NOUNS, RowKinds, visible_rows, words_of, wrong_rows
from lossgate.specs.outputs import Output

_MOST = 0.6
"""The share of the wrong rows that a mistake must explain, if it does not explain all."""
_FEW = 0.15
"""The share of these at most that may have what the exceptions have in common."""
_SEVERAL = 4
"""If the problem on which most mistakes are known already has so many wrong rows, a mistake must
explain one of them, or it is not tried on another problem."""
_LEAST = 12
"""The fewest rows that must tell, over all problems."""


def partly(failing: Sequence[Observed], bank: Iterable[Counterfactual]) -> list[Explanation]:
    """Returns the mistakes that explain the rows of an output, but for rows that have something in
    common. Of several outputs one is enough: that of which most is explained.

    Args:
        failing: what a kernel returned on problems where it is wrong.
        bank: the mistakes, the plainest first.
    """
    outputs = {o for one in failing for o in one.wrong if o.dims and o.dims[0] in ("token", "vocab")}
    returned = {o for one in failing for o in one.case.result.outputs}
    found = [_of_rows(_Wrong.of(o, failing), bank) for o in sorted(outputs & returned, key=lambda o: (o.name, str(o)))]
    limited = min((each for each in found if each), key=lambda each: each[0].left, default=[])
    return [replace(one, failing=failing) for one in limited]


@dataclass(frozen=True)
class _Wrong:
    """Where an output is wrong, in several problems."""

    output: Output
    failing: Sequence[Observed]
    rows: Sequence[Tensor]
    """``[rows]`` bool, a tensor for each problem."""

    @classmethod
    def of(cls, output: Output, failing: Sequence[Observed]) -> "_Wrong":
        own = [one for one in failing if output in one.wrong and output in one.case.result.outputs]
        return cls(output, own, [wrong_rows(one, output) for one in own])

    @cached_property
    def traits(self) -> Sequence[Traits]:
        return [traits_of(one.setting, self.output.dims[0]) for one in self.failing]

    def explained(self, number: int, one: Counterfactual) -> int:
        """Returns how many wrong rows of a problem, by its number, a mistake explains."""
        observed, output = self.failing[number], self.output
        if not observed.says_something(one) or output not in observed.predicted(one):
            return 0
        return int((self.rows[number] & ~wrong_rows(observed, output, observed.predicted(one)[output])).sum())

    def may_be(self, one: Counterfactual) -> bool:
        """Returns whether a mistake explains enough of two problems: of that of which most is known
        already, and of that with most wrong rows.
        """
        numbers, count = range(len(self.failing)), [int(rows.sum()) for rows in self.rows]
        tried = max(numbers, key=lambda number: self.failing[number].known)
        largest = max(numbers, key=count.__getitem__)
        if count[tried] >= _SEVERAL and not self.explained(tried, one):
            return False
        return self.explained(largest, one) >= _MOST * count[largest]


def _of_rows(wrong: _Wrong, bank: Iterable[Counterfactual]) -> list[Explanation]:
    each = (_limited(one, wrong) for one in bank if wrong.may_be(one))
    found = sorted((one for one in each if one is not None), key=lambda one: one[0])
    return [one for _, one in found]


def _limited(one: Counterfactual, wrong: _Wrong) -> tuple[int, Explanation] | None:
    """Returns how many wrong rows a mistake leaves unexplained, and that it is made at the others
    alone; None if it does not explain the rows.
    """
    made: list[Tensor] = []
    neither: list[Tensor] = []
    spared: list[Tensor] = []
    output = wrong.output
    for observed, bad in zip(wrong.failing, wrong.rows, strict=True):
        if not observed.says_something(one) or output not in observed.predicted(one):
            return None
        other = observed.predicted(one)[output]
        unlike, visible = wrong_rows(observed, output, other), visible_rows(observed, output)
        made.append(bad & ~unlike)
        neither.append(bad & unlike)
        spared.append(~bad & unlike & (visible | (other != 0).flatten(1).any(1) if other.dim() > 1 else visible))
    counts = [sum(int(x.sum()) for x in rows) for rows in (made, neither, spared)]
    if counts[0] < _LEAST or counts[0] < _MOST * (counts[0] + counts[1]):
        return None
    limits = _limits(wrong, made, neither, spared)
    if not limits:
        return None
    cause = Cause(name=one.name, words=f"{one.words(words_of(output))}{limits}", todo=one.todo)
    effect = [{output: o.predicted(one)[output][rows]} for o, rows in zip(wrong.failing, made, strict=True)]
    left = (float(counts[1] > 0),)
    found = Explanation(
        cause=cause, failing=wrong.failing, left=left, effect=effect, partly=True, stands_for_others=True
    )
    return counts[1], found


def _limits(wrong: _Wrong, made: Sequence[Tensor], neither: Sequence[Tensor], spared: Sequence[Tensor]) -> str:
    """Returns in words at which rows a mistake is made, or is not; "" if nothing tells them.

    Args:
        wrong: where the output is wrong.
        made: the wrong rows that it explains, of each problem, and so are the next two.
        neither: those that it does not explain.
        spared: the right rows that it would have spoilt.
    """
    count, left, kept = (sum(int(x.sum()) for x in rows) for rows in (made, neither, spared))
    noun, traits = NOUNS[wrong.output.dims[0]], wrong.traits
    if not left and kept >= _LEAST and (trait := RowKinds(made, spared, traits).common()) is not None:
        return f", at {noun} {trait} alone"
    exceptions = [one | other for one, other in zip(neither, spared, strict=True)]
    if left + kept and (best := RowKinds(exceptions, made, traits).best()) is not None:
        trait, as_well = best
        if as_well <= _FEW * count:
            return f", except at {'some ' * (as_well > 0)}{noun} {trait}"
    return ""
