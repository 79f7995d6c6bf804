# SPDX-License-Identifier: Apache-2.0
"""Explanations by a mistake that a kernel makes only at some tokens, or at all except some."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.explanation import Explanation
from lossgate.diagnosis.observed import Observed
from lossgate.diagnosis.traits import Traits, traits_of
from lossgate.diagnosis.where import NOUNS, RowKinds, count_rows, visible_rows, words_of, wrong_rows
from lossgate.specs.outputs import Output

_MOST = 0.6
"""The least share of the wrong rows that a mistake must explain, if it does not explain all."""
_FEW = 0.15
"""The largest share of the explained rows that may have the trait of the exceptions."""
_SEVERAL = 4
"""If so many rows are wrong on the problem where most mistakes have been computed, a mistake must
explain one of them. Otherwise it is not tried on other problems, to save time."""
_LEAST = 12
"""The least number of rows, over all problems, on which an explanation must rest."""


def partly(failing: Sequence[Observed], bank: Iterable[Counterfactual]) -> list[Explanation]:
    """Returns the mistakes that explain the wrong rows of an output, except rows with a trait in
    common. If several outputs can be explained, the one with the fewest unexplained rows is taken.

    Args:
        failing: what a kernel returned on problems where it is wrong.
        bank: the mistakes, the plainest first.
    """
    outputs = {o for observed in failing for o in observed.wrong if o.dims and o.dims[0] in ("token", "vocab")}
    returned = {o for observed in failing for o in observed.case.result.outputs}
    found: list[list[Explanation]] = []
    for output in sorted(outputs & returned, key=lambda o: (o.name, str(o))):
        if of_output := _of_rows(_Wrong.of(output, failing), bank):
            found.append(of_output)
    best = min(found, key=lambda of_output: of_output[0].left, default=[])
    return [replace(one, failing=failing) for one in best]


@dataclass(frozen=True)
class _Wrong:
    """The rows at which an output is wrong in several problems."""

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
        """Returns how many wrong rows of a problem a mistake explains. The problem has a number."""
        observed, output = self.failing[number], self.output
        if not observed.says_something(one) or output not in observed.predicted(one):
            return 0
        return int((self.rows[number] & ~wrong_rows(observed, output, observed.predicted(one)[output])).sum())

    def may_be(self, one: Counterfactual) -> bool:
        """Returns whether a mistake explains enough rows of two problems.

        These are the problem on which most mistakes have been computed, and the one with the most
        wrong rows.
        """
        numbers, count = range(len(self.failing)), [int(rows.sum()) for rows in self.rows]
        tried = max(numbers, key=lambda number: self.failing[number].known)
        largest = max(numbers, key=lambda number: count[number])
        if count[tried] >= _SEVERAL and not self.explained(tried, one):
            return False
        return self.explained(largest, one) >= _MOST * count[largest]


def _of_rows(wrong: _Wrong, bank: Iterable[Counterfactual]) -> list[Explanation]:
    limited = (_limited(one, wrong) for one in bank if wrong.may_be(one))
    found = sorted((pair for pair in limited if pair is not None), key=lambda pair: pair[0])
    return [explanation for _, explanation in found]


def _limited(one: Counterfactual, wrong: _Wrong) -> tuple[int, Explanation] | None:
    """Limits a mistake to the wrong rows that it explains.

    Returns:
        The number of wrong rows that it does not explain, and the explanation. None if it explains
        too few rows, or if these have nothing in common.
    """
    rows, output = _Rows(), wrong.output
    for observed, bad in zip(wrong.failing, wrong.rows, strict=True):
        if not observed.says_something(one) or output not in observed.predicted(one):
            return None
        predicted = observed.predicted(one)[output]
        unlike, is_visible = wrong_rows(observed, output, predicted), visible_rows(observed, output)
        if predicted.dim() > 1:
            is_visible = is_visible | (predicted != 0).flatten(1).any(1)
        rows.made.append(bad & ~unlike)
        rows.neither.append(bad & unlike)
        rows.spared.append(~bad & unlike & is_visible)
    explained, unexplained = count_rows(rows.made), count_rows(rows.neither)
    if explained < _LEAST or explained < _MOST * (explained + unexplained):
        return None
    limits = _limits(wrong, rows)
    if not limits:
        return None
    found = Explanation(
        cause=Cause(name=one.name, words=f"{one.words(words_of(output))}{limits}", todo=one.todo),
        failing=wrong.failing,
        left=(float(unexplained > 0),),
        effect=[{output: o.predicted(one)[output][made]} for o, made in zip(wrong.failing, rows.made, strict=True)],
        partly=True,
        stands_for_others=True,
    )
    return unexplained, found


@dataclass(frozen=True)
class _Rows:
    """The rows of an output by what a mistake does there: ``[rows]`` bool for each problem."""

    made: list[Tensor] = field(default_factory=list)
    """The wrong rows that the mistake explains."""
    neither: list[Tensor] = field(default_factory=list)
    """The wrong rows that it does not explain."""
    spared: list[Tensor] = field(default_factory=list)
    """The right rows that it would make wrong."""


def _limits(wrong: _Wrong, rows: _Rows) -> str:
    """Returns words for the rows at which a mistake is made or not; "" if no trait tells them."""
    unexplained, spared = count_rows(rows.neither), count_rows(rows.spared)
    noun, traits = NOUNS[wrong.output.dims[0]], wrong.traits
    if not unexplained and spared >= _LEAST:
        trait = RowKinds(rows.made, rows.spared, traits).common()
        if trait is not None:
            return f", at {noun} {trait} alone"
    exceptions = [neither | of_spared for neither, of_spared in zip(rows.neither, rows.spared, strict=True)]
    if unexplained + spared and (best := RowKinds(exceptions, rows.made, traits).best()) is not None:
        trait, made_as_well = best
        if made_as_well <= _FEW * count_rows(rows.made):
            return f", except at {'some ' * (made_as_well > 0)}{noun} {trait}"
    return ""
