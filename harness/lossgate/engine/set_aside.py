# SPDX-License-Identifier: Apache-2.0
"""Sets the known failure of a kernel aside, so that what lies beside it is judged.

Where the failure is a known mistake, its effect is taken out of what the kernel returned. Where the
kernel raises, or returns NaN, the problems that show it are left out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lossgate.base.spelling import counted
from lossgate.cases.case import Case
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.factors import fixed, scaled_outputs
from lossgate.counterfactuals.families.loss_terms import terms
from lossgate.counterfactuals.setting import Setting
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import CellRun
from lossgate.engine.verdict import judge
from lossgate.judge.comparison import Comparison
from lossgate.properties.registry import Checked
from lossgate.worlds.base import Hang

_FACTOR = re.compile(r": (multiplied|divided) by (\d[\d.]*(?:e[+-]?\d+)?)")
"""What a line on a cause says of a factor."""


@dataclass
class SetAside:
    """A known failure, and how it is told apart from others."""

    name: str
    example: CaseResult
    """How the kernel fails on the frozen example."""
    mistake: Counterfactual | None = None
    """The known mistake that explains it; None if none does, or if the kernel gives no numbers."""
    explains: bool = True
    """Whether the mistake explains an output of the frozen example."""
    left_out: int = 0
    """The number of problems that were left out, because they show it."""

    @classmethod
    def of(cls, case: Case, example: CaseResult, causes: Sequence[str]) -> "SetAside | None":
        """Returns how to set the known failure of a candidate aside; None if that can't be done.

        Args:
            case: the frozen example.
            example: how the kernel fails on it.
            causes: the lines on the cause in its file. They may name a known mistake.
        """
        known = case.candidate.known_failure
        assert known is not None
        if example.failure or example.manner == "not finite":
            return None if example.failure == Hang.__name__ else cls(known.name, example)
        before = sum(one.agrees for one in example.comparisons)
        bank = counterfactuals_of(case.candidate.spec, case.candidate.head).values()
        named = [
            cls(known.name, example, one)
            for one in (*bank, *terms(_setting(case)), *_factors(causes))
            if any(_names(line, one) for line in causes)
        ]
        for aside in named:
            if sum(one.agrees for one in aside(case, example).comparisons) > before:
                return aside
        return replace(named[0], explains=False) if named else None

    def __call__(self, case: Case, result: CaseResult) -> CaseResult:
        """Returns the result of a case as it would be without the known failure."""
        if result.agrees:
            return result
        if self.mistake is not None and not result.failure:
            return self._without_mistake(self.mistake, case, result)
        return self._without_alike(result)

    def _without_alike(self, result: CaseResult) -> CaseResult:
        """Returns the result without what fails as in the example: by the same error on the same
        line, or in the same outputs, which are not finite.
        """
        if self.example.failure or result.failure:
            others = ()
            is_alike = (result.failure, result.raised) == (self.example.failure, self.example.raised)
        else:
            others = tuple(one for one in result.comparisons if not self._is_alike(one))
            is_alike = len(others) < len(result.comparisons)
        if not is_alike:
            return result
        findings = Checked(comparisons=others, faults=result.faults).findings
        if findings:
            return replace(result, comparisons=others, findings=findings)
        self.left_out += 1
        return CaseResult(problem=result.problem, held_to=result.held_to, fits=False)

    def _is_alike(self, one: Comparison) -> bool:
        is_not_finite = not one.agrees and one.manner == self.example.manner == "not finite"
        return is_not_finite and str(one.output) in self.example.symptoms

    def _without_mistake(self, one: Counterfactual, case: Case, result: CaseResult) -> CaseResult:
        predicted = one.run(_setting(case))
        if predicted is None:
            return result
        compared = tuple(self._corrected(each, case, predicted.get(each.output)) for each in result.comparisons)
        findings = Checked(comparisons=compared, faults=result.faults).findings
        return replace(result, comparisons=compared, findings=findings)

    def _corrected(self, comparison: Comparison, case: Case, predicted: Tensor | None) -> Comparison:
        """Returns the comparison of an output without the effect of the mistake, if that is nearer
        to the reference.
        """
        output, result = comparison.output, case.result
        if comparison.agrees or predicted is None or output not in result.outputs:
            return comparison
        right = _without(predicted, result.outputs[output], case.oracle.reference[output])
        # What else is wrong with the output stays, such as ranks that do not return the same.
        found = case.oracle.compare(output, right, result.dtypes[output], result.faults.get(output, ()))
        is_nearer = found.agrees or found.margin < comparison.margin
        return replace(found, called=f"without {self.name}") if is_nearer else comparison

    def words(self, run: CellRun) -> str:
        """Returns what was judged without the known failure, in words, if nothing was wrong."""
        judged = sum(case.fits for case in run.cases)
        agree = f"without it {counted(judged, 'problem')} agree{'s' * (judged == 1)}"
        left_out = f", {self.left_out} that show{'s' * (self.left_out == 1)} it left out" * bool(self.left_out)
        unsure = "".join(f"; not enough: {reason}" for reason in judge(run).reasons[:1])
        return f"{agree}{left_out}{unsure}"


def _setting(case: Case) -> Setting:
    return Setting(case.placed, case.result.outputs, case.candidate.tokens, case.candidate.tiles)


def _factors(causes: Iterable[str]) -> Iterator[Counterfactual]:
    """Yields the factors that lines on a cause name, which may be any number."""
    for how, number in _FACTOR.findall("\n".join(causes)):
        factor = float(number) if how == "multiplied" else 1 / float(number)
        sentence = f"{{outputs}}: {how} by {number}"
        yield mistake(sentence, sentence, outputs=partial(scaled_outputs, partial(fixed, factor)))


def _names(line: str, one: Counterfactual) -> bool:
    """Returns whether a line on a cause has the sentence of a mistake."""
    return line.startswith("cause: ") and all(part in line for part in one.sentence.split("{outputs}"))


def _without(predicted: Tensor, got: Tensor, reference: Tensor) -> Tensor:
    """Returns what a kernel would have returned without a mistake.

    Its own deviations stay. They are as large relative to the output as they were: a gradient that
    is three times too large has three times the rounding errors.
    """
    size, own = float(predicted.nan_to_num(0.0, 0.0, 0.0).norm()), float(reference.norm())
    left = (got - predicted) * (own / size if size and own else 1.0)
    alike = (got == predicted) | (got.isnan() & predicted.isnan())  # also infinities
    return torch.where(alike, reference, reference + left)
