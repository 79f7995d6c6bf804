# SPDX-License-Identifier: Apache-2.0
"""Mistakes that properties are there to find, by what they change.

Where nothing is trained, the gradients that a kernel loses are 0 anyway. Where no token is masked,
masked tokens disturb nothing. Such problems hide what a property is there to find.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.oracle import Oracle
from lossgate.cases.untrained import untrained
from lossgate.declaration.candidate import Candidate
from lossgate.properties.registry import OwnMistake
from lossgate.specs.outputs import Output, gradient_output

Mistakes = Callable[[Candidate], Sequence[OwnMistake]]

Judge = Callable[[Case], Oracle]
"""Returns the judge of the outputs of a case."""

LOST = 0.0
"""The factor of an output that a kernel does not give at all."""


def all_of(*mistakes: Mistakes) -> Mistakes:
    """Returns the mistakes of several kinds as one kind."""
    return lambda candidate: [own for each in mistakes for own in each(candidate)]


def _own(case: Case) -> Oracle:
    return case.oracle


def gradients(words: str, factor: float = LOST, judge: Judge = _own) -> Mistakes:
    """Returns a mistake for each differentiable input: its gradient is so many times as large.

    Args:
        words: follow the name of the gradient, such as "is lost".
        factor: the factor.
        judge: compares the outputs of the property; by default it is that of agreement.
    """

    def of(candidate: Candidate) -> list[OwnMistake]:
        leaves = candidate.starts_at.leaves
        return [_times(gradient_output(name, dims), words, factor, judge) for name, dims in leaves.items()]

    return of


def values(words: str, factor: float = LOST, judge: Judge = _own) -> Mistakes:
    """Returns a mistake for each output that carries gradients, such as the loss, and for each
    metric: it is so many times as large. The arguments are those of ``gradients``.
    """

    def of(candidate: Candidate) -> list[OwnMistake]:
        outputs = [candidate.spec.output(name) for name in candidate.differentiable]
        own = [_times(output, words, factor, judge) for output in outputs]
        return [*own, *metrics(words, factor, judge)(candidate)]

    return of


def metrics(
    words: str, factor: float = LOST, judge: Judge = _own, can_show: Callable[[Case], bool] = lambda case: True
) -> Mistakes:
    """Returns a mistake for each metric: it is so many times as large. Many metrics are 0 in most
    problems, so no verdict needs a problem that shows it.

    Args:
        words, factor, judge: see ``gradients``.
        can_show: what a problem needs beside a metric that is not 0. The candidate does not run.
    """

    def of(candidate: Candidate) -> list[OwnMistake]:
        return [
            OwnMistake(
                sentence=f"{output} {words}",
                matters=lambda case: True,
                can_show=can_show,
                shows=partial(_is_rejected, output, factor, judge),
                needed=False,
                metric=output,
            )
            for output in map(candidate.spec.output, candidate.spec.metrics)
        ]

    return of


def formulas(candidate: Candidate) -> list[OwnMistake]:
    """Returns a mistake for each situation in which a loss takes another formula, such as a ratio
    above the clip: the formula is another there. No verdict needs a problem that shows it.
    """
    return [
        OwnMistake(
            sentence=f"the formula is another where there is a {goal}",
            matters=lambda case: True,
            can_show=partial(_reaches, goal),
            needed=False,
        )
        for goal in candidate.spec.goals
    ]


def _reaches(goal: str, case: Case) -> bool:
    return goal in case.bound.coverage


def _times(output: Output, words: str, factor: float, judge: Judge) -> OwnMistake:
    return OwnMistake(
        sentence=f"{output} {words}",
        matters=partial(_is_somewhere, output),
        shows=partial(_is_rejected, output, factor, judge),
    )


def _is_somewhere(output: Output, case: Case) -> bool:
    """Returns whether the reference of an output is not 0 everywhere."""
    found = case.bound.mutated(case.problem.options).get(output)
    return found is not None and bool(found.any())


def _is_rejected(output: Output, factor: float, judge: Judge, case: Case) -> bool:
    dtype, oracle = case.result.dtypes.get(output), judge(case)
    return dtype is not None and bool(oracle.rejects(output, factor * oracle.reference[output][None], dtype))


def needing(
    sentence: str, can_show: Callable[[Case], bool], matters: Callable[[Case], bool] = lambda case: True
) -> Mistakes:
    """Returns a mistake that only some problems show.

    Args:
        sentence: what a kernel with it does.
        can_show: whether a problem shows it. The candidate does not run.
        matters: whether it is a mistake with the options of a problem; by default with all.
    """
    own = OwnMistake(sentence=sentence, matters=matters, can_show=can_show)
    return lambda candidate: [own]


def trained_tokens(case: Case) -> Tensor:
    """Returns the mask of the trained tokens of a problem, without padding."""
    return ~untrained(case.candidate.spec, case.bound.batch.known)["token"]


def has_tokens(case: Case) -> bool:
    """Returns whether a kernel is given tokens, and some are trained."""
    return case.candidate.starts_at.gives == "token" and bool(trained_tokens(case).any())


def _has_masked_before_trained(case: Case) -> bool:
    """Returns whether a masked token comes before a trained one of its sequence. The last token of
    every sequence is masked, and shows less.
    """
    fields, trained = case.bound.batch.fields, trained_tokens(case)
    last = torch.full((len(case.problem.lengths),), -1)
    last[fields["sequence"][trained]] = trained.nonzero().squeeze(1)  # in order, so that the last one stays
    numbers = torch.arange(len(trained))
    return bool((~fields["mask"] & (numbers < last[fields["sequence"]])).any())


def _has_padding(case: Case) -> bool:
    return case.placed.partition.tokens > case.problem.tokens


masked_token_counts = needing("a masked token counts", _has_masked_before_trained, has_tokens)
padding_counts = needing("padding counts", _has_padding, has_tokens)
