# SPDX-License-Identifier: Apache-2.0
"""Which known mistakes the problems that were tried would show in a kernel.

The reference with a mistake takes the place of the kernel: would the judge reject what it gives? A
mistake that one problem shows is not asked about again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossgate.base.layout import Layout
from lossgate.cases.oracle import Oracle
from lossgate.cases.placement import PlacedProblem
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.operations import stops
from lossgate.counterfactuals.seams import Outputs, same
from lossgate.counterfactuals.setting import Setting
from lossgate.declaration.candidate import Candidate
from lossgate.judge.pooling import LARGEST_MDE
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.specs.outputs import Output

OF_METRICS = "metrics"
"""The family of mistakes in metrics alone."""
_AT_ONCE = 32
"""Results that are judged at once: they are held beside each other."""
_NOTHING = 1e-6
"""A change that is so much smaller than what rounding does to correct runs is one of float64."""
_CLEAR = 0.1
"""An output of which rounding is a larger share says little of the size of a change."""
_OFTEN = 8
"""A mistake that can be made on so many problems, and changes none of them, changes nothing. One
that has changed a problem is asked about until another shows it: a clip acts on few."""


_SELDOM = 24
"""So many further problems are looked at, without asking the judge, for one that it changes."""


@dataclass(frozen=True)
class Unshown:
    """What a mistake changes on problems that do not show it."""

    sentence: str
    layouts: tuple[Layout, ...]
    """Those on which it changes an output."""
    size: float
    """The largest change of an entry, relative to the largest entry of its output, where rounding
    leaves something of that."""


@dataclass(frozen=True)
class MistakesShown:
    """Which known mistakes the problems of a cell would have shown."""

    shown: int = 0
    surviving: tuple[str, ...] = ()
    """In words, those that change an output by more than an error in its scale may be, and that
    no problem shows."""
    too_small: tuple[str, ...] = ()
    """In words, those that change an output by less, and that no problem shows."""
    seconds: float = 0.0
    """CPU time that it took to ask; 0 if it was known."""


NOTHING_ASKED = MistakesShown()


@dataclass(frozen=True)
class _Said:
    """What one problem says of a mistake."""

    made: bool = False
    """It can be made on the problem."""
    sentence: str = ""
    """What it changes, in words; "" if nothing."""
    size: float = 0.0
    shown: bool = False
    """The judge would reject what it gives."""


class KnownMistakes:
    """Collects which known mistakes the problems of a candidate would show. ``ask`` asks a problem.

    Args:
        candidate: says in which precision it computes, and which outputs it gives.
        metrics: whether to ask about mistakes in metrics alone, too.
        names: the mistakes to ask about; by default all.
    """

    def __init__(self, candidate: Candidate, *, metrics: bool = False, names: Collection[str] | None = None) -> None:
        self._candidate, self._names = candidate, names
        known = counterfactuals_of(candidate.spec, candidate.head)
        self.bank: dict[str, Counterfactual] = {
            name: one
            for name, one in known.items()
            if (metrics or one.kind != OF_METRICS) and (names is None or name in names)
        }
        """All that are asked about, by name."""
        self.left = dict(self.bank)
        """Those that no problem has shown."""
        self.seen: dict[str, str] = {}
        """The sentences of those that a problem has shown."""
        self.unseen: dict[str, Unshown] = {}
        """Those that change an output, and that no problem has shown."""
        self.made = Counter[str]()
        """On how many problems each could be made, up to the one that showed it."""
        self._same_again = Counter[str]()
        self._of_sites = set[str]()
        """The names of those that were found in runs."""
        self._unchanged = Counter[tuple[str, Layout]]()
        self._metrics = metrics

    def ask(self, placed: PlacedProblem) -> None:
        """Asks one problem about all mistakes that are left."""
        returned = self._returned(placed)
        setting, oracle = self._setting(placed), Oracle(self._candidate, placed, returned)
        precision = self._candidate.precision[placed.problem.dtype]
        dtypes = {
            **{output: TORCH_DTYPES[precision.dtype_of(output.name)] for output in returned},
            **dict.fromkeys(oracle.gradients, TORCH_DTYPES[placed.problem.dtype]),
        }
        layout, here = setting.partition.layout, self._find(setting)
        wanted = [
            name
            for name in self.left
            if (name in self.unseen or self._unchanged[name, layout] < _OFTEN)
            and (name in here or name not in self._of_sites)
        ]
        for name, said in self._asked(wanted, setting, oracle, dtypes).items():
            self._note(name, said, layout)

    def find(self, placed: PlacedProblem) -> None:
        """Adds the mistakes of the places where the loss of a problem stops the gradient. They are
        seen in a run alone.
        """
        self._find(self._setting(placed))

    def _returned(self, placed: PlacedProblem) -> list[Output]:
        """Returns what a kernel must give; with metrics, all of those that the problem has, too."""
        returned = required_outputs(self._candidate)
        if self._metrics:
            returned += [o for o in placed.bound.dense.outputs(placed.bound.bound_spec) if o.kind == "metric"]
        return returned

    def _setting(self, placed: PlacedProblem) -> Setting:
        return Setting(placed, self._returned(placed), self._candidate.tokens, self._candidate.tiles)

    def _find(self, setting: Setting) -> set[str]:
        """Does what ``find`` does, and returns the names."""
        found = {one.name: one for one in stops(setting) if self._names is None or one.name in self._names}
        new = {name: one for name, one in found.items() if name not in self._of_sites}
        self._of_sites.update(new)
        self.bank |= new
        self.left |= new
        return set(found)

    def _asked(
        self, names: Iterable[str], setting: Setting, oracle: Oracle, dtypes: Mapping[Output, torch.dtype]
    ) -> dict[str, _Said]:
        """Returns what a problem says of some mistakes."""
        found, changed = dict[str, _Said](), dict[str, Outputs]()
        for name in names:
            outputs = self.bank[name].run(setting)
            found[name] = _Said(made=outputs is not None)
            own = {o: x for o, x in (outputs or {}).items() if o in dtypes and _differs(x, o, oracle)}
            if own:
                changed[name] = own
        shown = _shown(changed, oracle, dtypes)
        for name, own in changed.items():
            sentence = self.bank[name].words(" and ".join(map(str, own)))
            size = max(_relative(x, output, oracle) for output, x in own.items())
            found[name] = _Said(made=True, sentence=sentence, size=size, shown=name in shown)
        return found

    def _note(self, name: str, said: _Said, layout: Layout) -> None:
        self.made[name] += said.made
        if said.shown:
            self.seen[name] = said.sentence
            del self.left[name]
            self.unseen.pop(name, None)
        elif said.sentence:
            known = self.unseen.get(name, Unshown(said.sentence, (), 0.0))
            layouts = tuple(dict.fromkeys((*known.layouts, layout)))
            self.unseen[name] = Unshown(known.sentence, layouts, max(known.size, said.size))
        else:
            self._unchanged[name, layout] += said.made

    @property
    def result(self) -> MistakesShown:
        """What the problems said so far."""
        by_size = sorted(self.unseen.values(), key=lambda change: -change.size)
        return MistakesShown(
            shown=len(self.seen),
            surviving=tuple(one.sentence for one in by_size if one.size > LARGEST_MDE),
            too_small=tuple(one.sentence for one in by_size if one.size <= LARGEST_MDE),
        )

    def rarely_made(self) -> list[str]:
        """Returns the names of those that no problem has shown and that few problems could: another
        problem may.
        """
        return [name for name in self.left if name in self.unseen or self.made[name] < _OFTEN]

    @property
    def survivors(self) -> list[str]:
        """The names of those that ``result`` calls surviving."""
        return [name for name, change in self.unseen.items() if change.size > LARGEST_MDE]

    def changed(self, names: Iterable[str], placed: PlacedProblem, *, always: bool = False) -> set[str]:
        """Returns which of some mistakes change an output that a kernel must give on a problem.

        Args:
            names: of the mistakes.
            placed: the problem.
            always: whether to ask of a mistake that changed nothing on many problems, too.
        """
        setting, found = self._setting(placed), set[str]()
        reference, mask = placed.bound.reference(self._returned(placed)), placed.bound.batch.fields["mask"]

        def of(output: Output) -> Any:
            return mask if output.kind == "token value" else ...

        for name in names:
            if self._same_again[name] >= _SELDOM and not always:
                continue
            outputs = self.bank[name].run(setting)
            if any(not same(x[of(o)], reference[o][of(o)]) for o, x in (outputs or {}).items() if o in reference):
                found.add(name)
            self._same_again[name] += outputs is not None and name not in found
        return found


def _shown(changed: Mapping[str, Outputs], oracle: Oracle, dtypes: Mapping[Output, torch.dtype]) -> set[str]:
    """Returns the names of the mistakes of which the judge rejects an output."""
    shown = set[str]()
    for output, dtype in dtypes.items():
        asked = [name for name, own in changed.items() if output in own and name not in shown]
        for start in range(0, len(asked), _AT_ONCE):
            names = asked[start : start + _AT_ONCE]
            rejected = oracle.rejects(output, torch.stack([changed[name][output] for name in names]), dtype)
            shown.update(name for name, is_rejected in zip(names, rejected.tolist(), strict=True) if is_rejected)
    return shown


def required_outputs(candidate: Candidate) -> list[Output]:
    """Returns the values that a kernel must give: those that carry gradients, and the loss."""
    spec = candidate.spec
    return [spec.output(name) for name in dict.fromkeys((spec.outputs[0], *candidate.differentiable))]


def _differs(other: Tensor, output: Output, oracle: Oracle) -> bool:
    """Returns whether an output differs from the reference by more than the rounding of float64."""
    other, reference = _compared(other, output, oracle)
    if same(other, reference):
        return False
    off = torch.where(other == reference, 0.0, other - reference).abs().nan_to_num(torch.inf, torch.inf)
    return float(off.max()) > _NOTHING * _largest(oracle.deviations[output])


def _compared(other: Tensor, output: Output, oracle: Oracle) -> tuple[Tensor, Tensor]:
    """Returns the entries of an output that are compared, and the same entries of the reference."""
    compared, reference = oracle.compared(output), oracle.reference[output]
    return (other, reference) if compared is None else (other[compared], reference[compared])


def _relative(other: Tensor, output: Output, oracle: Oracle) -> float:
    """Returns the largest change of an entry, relative to the largest entry of its output; 0 where
    rounding leaves little of that, as where large terms cancel.
    """
    other, reference = _compared(other, output, oracle)
    difference = torch.where(other == reference, 0.0, other - reference).abs().nan_to_num(torch.inf, torch.inf)
    largest, noise = _largest(reference), _largest(oracle.deviations[output])
    return float(difference.max()) / largest if largest and noise <= _CLEAR * largest else 0.0


def _largest(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0
