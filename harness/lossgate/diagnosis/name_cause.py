# SPDX-License-Identifier: Apache-2.0
"""Looks for the cause of what a kernel returned. Each kind of hypothesis is asked in turn, the
plainest first.

A cause is told only if it explains several fresh failing problems of ordinary size. If the kernel
can be split, their layouts have different numbers of ranks. On a single problem, above all on a
small one, a wrong cause sometimes fits.
"""

from collections.abc import Callable, Collection, Iterable

from lossgate.cases.case import Case
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.factors import powers_of_options
from lossgate.counterfactuals.families.loss_terms import terms
from lossgate.counterfactuals.families.operations import operations
from lossgate.counterfactuals.families.option_values import options_for_others
from lossgate.counterfactuals.families.rounded import rounded
from lossgate.diagnosis.cause import Diagnosis
from lossgate.diagnosis.coarser_precision import coarser
from lossgate.diagnosis.explanation import Explanation, said
from lossgate.diagnosis.fitted_numbers import fitted_factors, mixed_in, whole_number
from lossgate.diagnosis.inquiry import FIRST, FRESH, Inquiry
from lossgate.diagnosis.observed import layouts_of
from lossgate.diagnosis.one_mistake import beside_rounding, condition_alone, explaining, on_most_problems, one_mistake
from lossgate.diagnosis.padded_rows import means_over_rows
from lossgate.diagnosis.partly import partly
from lossgate.diagnosis.two_mistakes import two_mistakes
from lossgate.diagnosis.where import where

_HYPOTHESES: tuple[Callable[[Inquiry], list[Explanation]], ...] = (
    one_mistake,
    lambda inquiry: coarser(inquiry.failing),
    lambda inquiry: whole_number(inquiry.failing),
    two_mistakes,
    on_most_problems,
    beside_rounding,
    lambda inquiry: partly(inquiry.failing, inquiry.known),
)
"""The kinds of hypotheses, in the order in which they are asked. The first ones explain all that a
kernel returned. The others leave out some problems, rounding, or rows of an output. The first kind
with a sure explanation is told."""


def name_cause(
    cases: Iterable[Case], bank: Iterable[Counterfactual], without: Collection[str] = (), alike: Iterable[Case] = ()
) -> Diagnosis:
    """Returns the diagnosis of a disagreement. It has no cause if too few problems fail.

    Args:
        cases: cases of one candidate, of ordinary size, on several layouts in turn. Only as many
            are run as are needed.
        bank: the counterfactuals, the plainest first.
        without: names that are left out. A benchmark leaves out the right ones, to see whether a
            wrong one is told.
        alike: cases like the problem that the user sees, with other sizes and numbers. They are run
            if few others fail.
    """
    inquiry = Inquiry(iter(cases), iter(alike))
    if inquiry.observe(FIRST):
        _compare(inquiry, bank, without)
    if not inquiry.observe(FIRST + FRESH):
        return Diagnosis(problems=len(inquiry.failing), tried=len(inquiry.seen), where=where(inquiry.failing))
    asked = len(inquiry.known)
    for explain in _HYPOTHESES:
        if (found := said(explain(inquiry), asked)) is not None:
            return found
    failing = inquiry.failing
    places = (*_some_agree_if_coarser(inquiry), *condition_alone(inquiry.seen), *where(failing))
    return Diagnosis(problems=len(failing), layouts=layouts_of(failing), asked=asked, where=places)


def _compare(inquiry: Inquiry, bank: Iterable[Counterfactual], without: Collection[str]) -> None:
    """Compares mistakes with the first failing problems.

    These are the bank, the terms of the loss, factors, and means over padded rows. If none of them
    explains all, more mistakes of options, single values that may be rounded and single operations
    of the loss are added. If nothing fits at all, other losses that may be mixed in are added.
    """

    def ask(mistakes: Iterable[Counterfactual]) -> list[Explanation]:
        asked = [one for one in mistakes if one.name not in without]
        inquiry.known += asked
        return explaining(inquiry.seen, asked)

    first = inquiry.failing[0]
    found = ask([*bank, *terms(first.setting), *fitted_factors(first), *means_over_rows(first)])
    if all(any(one.left) for one in found):  # each leaves something unexplained
        of_options = [*options_for_others(first.setting), *powers_of_options(first.setting)]
        found += ask([*of_options, *rounded(first.setting), *operations(first.setting)])
    if not found:
        found = ask(mixed_in(first))
    inquiry.likely = [one.mistake for one in sorted(found, key=lambda one: one.left) if one.mistake is not None]


def _some_agree_if_coarser(inquiry: Inquiry) -> tuple[str, ...]:
    """Returns the words for the number of problems on which the kernel would agree if it declared
    the default rounding of torch. Nothing if these are none or all.
    """
    if inquiry.as_if_coarser is None:
        return ()
    change, seen = inquiry.as_if_coarser
    total = len(inquiry.failing)
    agree = total - sum(bool(one.wrong) for one in seen)
    if not 0 < agree < total:
        return ()
    hint = f"{agree} of {total} failing problems would agree if the kernel declared to round {change.rounds}"
    return (f"{hint} to {change.to}: declare the rounding that is meant, and verify again",)
