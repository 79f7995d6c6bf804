# SPDX-License-Identifier: Apache-2.0
"""Looks for what explains what a kernel returned: hypotheses of each kind, the plainest first.

A name is said only after it has held on several fresh problems that fail, of ordinary size, on
layouts whose sizes differ where the kernel can be split. On one problem, and on small ones above
all, a wrong name fits now and then.
"""

from collections.abc import Callable, Collection, Iterable

from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.loss_terms import terms
from lossgate.counterfactuals.families.operations import operations
from lossgate.counterfactuals.families.rounded import rounded
from lossgate.diagnosis.cause import Diagnosis
from lossgate.diagnosis.coarser_precision import coarser
from lossgate.diagnosis.explanation import Explanation, said
from lossgate.diagnosis.fitted_numbers import fitted_factors, mixed_in, whole_number
from lossgate.diagnosis.inquiry import FIRST, FRESH, Inquiry
from lossgate.diagnosis.observed import Observed, layouts_of
from lossgate.diagnosis.one_mistake import beside_rounding, condition_alone, explaining, on_most_problems, one_mistake
from lossgate.diagnosis.partly import partly
from lossgate.diagnosis.two_mistakes import two_mistakes
from lossgate.diagnosis.where import where
from lossgate.worlds.base import RankFailure

_HYPOTHESES: tuple[Callable[[Inquiry], list[Explanation]], ...] = (
    one_mistake,
    lambda inquiry: coarser(inquiry.failing),
    lambda inquiry: whole_number(inquiry.failing),
    two_mistakes,
    on_most_problems,
    beside_rounding,
    lambda inquiry: partly(inquiry.failing, inquiry.known),
)
"""The kinds of hypotheses, in the order in which they are asked: first those that explain all that
a kernel returned, then those that leave out some problems, rounding, or rows of an output. The
first kind of which an explanation is sure is said."""


def name_cause(
    cases: Iterable[Case], bank: Iterable[Counterfactual], without: Collection[str] = (), smallest: Case | None = None
) -> Diagnosis | None:
    """Returns what explains a disagreement; None if too few problems fail to tell.

    Args:
        cases: of one candidate, of ordinary size, on several layouts in turn. As many are run as
            are needed.
        bank: the counterfactuals, the plainest first.
        without: names that are not to be said: a measurement asks what is said without the right
            one.
        smallest: the case of the problem that is shown. Where few others fail, it is asked whether
            the kernel rounds more than it declares.
    """
    inquiry = Inquiry(iter(cases))
    if not inquiry.observe(FIRST):
        return _rounded_on_few(inquiry, smallest)
    _compare(inquiry, bank, without)
    if not inquiry.observe(FIRST + FRESH):
        few = None if inquiry.likely else _rounded_on_few(inquiry, smallest)
        return few or Diagnosis(problems=len(inquiry.failing), tried=len(inquiry.seen), where=where(inquiry.failing))
    asked = len(inquiry.known)
    for explain in _HYPOTHESES:
        if (found := said(explain(inquiry), asked)) is not None:
            return found
    failing = inquiry.failing
    places = (*_some_agree_if_coarser(inquiry), *condition_alone(inquiry.seen), *where(failing))
    return Diagnosis(problems=len(failing), layouts=layouts_of(failing), asked=asked, where=places)


def _compare(inquiry: Inquiry, bank: Iterable[Counterfactual], without: Collection[str]) -> None:
    """Compares mistakes with what the first failing problems show. To the bank are added the terms
    of the loss and factors; if none of these explains all, what may be rounded and the single
    operations of the loss; and if none fits at all, other losses that may be mixed in.
    """

    def ask(mistakes: Iterable[Counterfactual]) -> list[Explanation]:
        asked = [one for one in mistakes if one.name not in without]
        inquiry.known += asked
        return explaining(inquiry.seen, asked)

    first = inquiry.failing[0]
    found = ask([*bank, *terms(first.setting), *fitted_factors(first)])
    if all(any(one.left) for one in found):
        found += ask([*rounded(first.setting), *operations(first.setting)])
    if not found:
        found = ask(mixed_in(first))
    inquiry.likely = [one.mistake for one in sorted(found, key=lambda one: one.left) if one.mistake is not None]


def _rounded_on_few(inquiry: Inquiry, smallest: Case | None) -> Diagnosis | None:
    """Returns that a kernel rounds more than it declares, if that explains the problem that is
    shown and the few others that fail.
    """
    if smallest is None:
        return None
    try:
        shown = Observed(smallest)
    except (RankFailure, CandidateError):  # it failed otherwise this time
        return None
    found = coarser([shown, *inquiry.failing]) if shown.wrong else []
    causes = tuple(one.cause for one in found)
    return Diagnosis(causes=causes, problems=len(inquiry.failing), tried=len(inquiry.seen)) if causes else None


def _some_agree_if_coarser(inquiry: Inquiry) -> tuple[str, ...]:
    """Returns in words on how many problems the kernel would agree if it declared what torch
    rounds; nothing if on none or all.
    """
    if inquiry.as_if_coarser is None:
        return ()
    change, seen = inquiry.as_if_coarser
    total, agree = len(inquiry.failing), len(inquiry.failing) - sum(bool(one.wrong) for one in seen)
    if not 0 < agree < total:
        return ()
    hint = f"{agree} of {total} failing problems would agree if the kernel declared to round {change.rounds}"
    return (f"{hint} to {change.to}: declare what is meant, and verify again",)
