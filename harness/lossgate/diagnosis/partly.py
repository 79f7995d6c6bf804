# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a kernel makes at some tokens alone, or everywhere but at some."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.same import same
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
_SEVERAL = 4
"""If the problem on which most mistakes are known already has so many wrong rows, a mistake must
explain one of them, or it is not tried on another problem."""
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
    explained: tuple[Tensor, ...]
    """What it predicts in the wrong rows that it explains, of each problem."""

    @property
    def level(self) -> bool:
        """Sorts what explains all wrong rows first."""
        return self.unexplained > 0

    def like(self, other: "Partly") -> bool:
        """Returns whether another has the same effect where it is made."""
        pairs = zip(self.explained, other.explained, strict=True)
        return self.output == other.output and all(a.shape == b.shape and same(a, b) for a, b in pairs)

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
    tried = max(range(len(own)), key=lambda i: own[i].known)
    largest = max(range(len(own)), key=lambda i: int(wrong[i].sum()))
    traits: list[dict[str, Tensor]] = []
    found: list[Partly] = []
    for one in bank:
        if int(wrong[tried].sum()) >= _SEVERAL and not _explained(one, output, own[tried], wrong[tried]):
            continue
        if _explained(one, output, own[largest], wrong[largest]) < _MOST * int(wrong[largest].sum()):
            continue
        if not traits:
            traits = [dict(traits_of(observed.setting, output.dims[0])) for observed in own]
        limited = _limited(one, output, own, wrong, traits)
        if limited is not None:
            found.append(limited)
    return found


def _explained(one: Counterfactual, output: Output, observed: Observed, wrong: Tensor) -> int:
    """Returns how many wrong rows of a problem a mistake explains."""
    if not observed.says_something(one) or output not in observed.predicted(one):
        return 0
    return int((wrong & ~wrong_rows(observed, output, observed.predicted(one)[output])).sum())


def _limited(
    one: Counterfactual,
    output: Output,
    seen: Sequence[Observed],
    wrong: Sequence[Tensor],
    traits: Sequence[dict[str, Tensor]],
) -> Partly | None:
    """Returns a mistake with the words that say where it is made; None if it does not explain the
    rows.
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
    explained = tuple(observed.predicted(one)[output][rows] for observed, rows in zip(seen, made, strict=True))
    exceptions = [one | other for one, other in zip(neither, spared, strict=True)]
    if not counts[1] and counts[2] >= _LEAST and (trait := Rows(made, spared, traits).common()) is not None:
        return Partly(one, output, f", at {noun} {trait} alone", 0, explained)
    if counts[1] + counts[2] and (best := Rows(exceptions, made, traits).best()) is not None:
        trait, as_well = best
        if as_well <= _FEW * counts[0]:
            limits = f", except at {'some ' * (as_well > 0)}{noun} {trait}"
            return Partly(one, output, limits, counts[1], explained)
    return None
