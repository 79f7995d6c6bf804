# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a kernel makes at some tokens alone, or everywhere but at some."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.observed import Observed
from lossgate.diagnosis.rows import visible_rows, wrong_rows
from lossgate.diagnosis.traits import traits_of
from lossgate.diagnosis.where import NOUNS, Rows, words_of
from lossgate.specs.outputs import Output

_MOST = 0.6
"""The share of the wrong rows that a mistake must explain, if it does not explain all."""
_FEW = 0.15
"""The share of these at most that may have what the exceptions have in common."""
_LEAST = 12
"""The fewest rows that must tell, over all problems."""


@dataclass(frozen=True)
class Partly:
    """A mistake, and where it is made."""

    counterfactual: Counterfactual
    output: Output
    """Whose rows show it."""
    limits: str
    """In words, at which rows it is made, or is not."""
    unexplained: int
    """The wrong rows that it does not explain."""

    @property
    def level(self) -> bool:
        """Sorts what explains all wrong rows first."""
        return self.unexplained > 0

    @property
    def cause(self) -> Cause:
        words = self.counterfactual.words(words_of(self.output))
        return Cause(name=self.counterfactual.name, words=f"{words}{self.limits}", todo=self.counterfactual.todo)


def partly(failing: Sequence[Observed], bank: Iterable[Counterfactual]) -> list[Partly]:
    """Returns the mistakes that explain the rows of an output, but for rows that have something in
    common.

    Args:
        failing: what a kernel returned on problems where it is wrong.
        bank: the mistakes, the plainest first.
    """
    outputs = sorted({o for one in failing for o in one.wrong if o.dims and o.dims[0] in ("token", "vocab")}, key=str)
    found = [one for output in outputs for one in _by_rows(output, failing, bank)]
    return sorted(found, key=lambda one: (one.level, one.output.name, one.unexplained))


def _by_rows(output: Output, failing: Sequence[Observed], bank: Iterable[Counterfactual]) -> list[Partly]:
    own = [one for one in failing if output in one.wrong and output in one.case.result.outputs]
    wrong = [wrong_rows(one, output) for one in own]
    largest = max(range(len(own)), key=lambda i: int(wrong[i].sum()))
    traits: list[dict[str, Tensor]] = []
    found: list[Partly] = []
    for one in bank:
        if not _may_explain(one, output, own[largest], wrong[largest]):
            continue
        if not traits:
            traits = [dict(traits_of(observed.setting, output.dims[0])) for observed in own]
        limits = _limits(one, output, own, wrong, traits)
        if limits is not None:
            found.append(Partly(one, output, *limits))
    return found


def _may_explain(one: Counterfactual, output: Output, observed: Observed, wrong: Tensor) -> bool:
    if not observed.says_something(one) or output not in observed.predicted(one):
        return False
    explained = wrong & ~wrong_rows(observed, output, observed.predicted(one)[output])
    return int(explained.sum()) >= _MOST * int(wrong.sum())


def _limits(
    one: Counterfactual,
    output: Output,
    seen: Sequence[Observed],
    wrong: Sequence[Tensor],
    traits: Sequence[dict[str, Tensor]],
) -> tuple[str, int] | None:
    """Returns in words where a mistake is made, and how many wrong rows it leaves unexplained; None
    if it does not explain the rows.
    """
    made: list[Tensor] = []
    neither: list[Tensor] = []
    spared: list[Tensor] = []
    for observed, bad in zip(seen, wrong, strict=True):
        if not observed.says_something(one) or output not in observed.predicted(one):
            return None
        other = observed.predicted(one)[output]
        unlike, visible = wrong_rows(observed, output, other), visible_rows(observed, output)
        made.append(bad & ~unlike)
        neither.append(bad & unlike)
        spared.append(~bad & unlike & (visible | (other != 0).flatten(1).any(1) if other.dim() > 1 else visible))
    counts = [sum(int(x.sum()) for x in rows) for rows in (made, neither, spared)]
    noun = NOUNS[output.dims[0]]
    if counts[0] < _LEAST or counts[0] < _MOST * (counts[0] + counts[1]):
        return None
    exceptions = [one | other for one, other in zip(neither, spared, strict=True)]
    if not counts[1] and counts[2] >= _LEAST and (trait := Rows(made, spared, traits).common()) is not None:
        return f", at {noun} {trait} alone", 0
    if counts[1] + counts[2] and (best := Rows(exceptions, made, traits).best()) is not None:
        trait, as_well = best
        if as_well <= _FEW * counts[0]:
            return f", except at {'some ' * (as_well > 0)}{noun} {trait}", counts[1]
    return None
