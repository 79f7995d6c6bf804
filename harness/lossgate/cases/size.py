# SPDX-License-Identifier: Apache-2.0
"""Sizes at which a problem is judged some tokens at a time."""

from lossgate.problems.problem import Problem
from lossgate.specs.heads import HEADS

LARGE = 1 << 20
"""Logits, or entries of the lm-head, from which on a problem is large. A dozen runs of it at once
would take gigabytes."""


def is_large(problem: Problem) -> bool:
    """Returns whether a problem is judged some tokens, and one run, at a time."""
    return HEADS[problem.head].has_logits and size_of(problem) > LARGE


def size_of(problem: Problem) -> int:
    """Returns the logits of a problem, or the entries of its lm-head, whichever are more."""
    return problem.vocab * max(problem.tokens, problem.hidden if problem.head == "hidden" else 1)
