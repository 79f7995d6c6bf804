# SPDX-License-Identifier: Apache-2.0
"""Large problems: sizes at which kernels may fail that are right on small problems.

Some bugs show on no small problem: blocks of 1,024 tokens whose tail is lost, ids that pass through
float16, sums over dozens of chunks in a coarse format, and an exp without a maximum. Each shape is
large in one direction only, because a problem takes time and memory in proportion to tokens times
vocabulary. Problems above a certain size are judged some tokens at a time.
"""

from collections.abc import Sequence

from lossgate.base.shape import Shape
from lossgate.declaration.candidate import Candidate
from lossgate.problems.problem import Problem
from lossgate.specs.heads import HEADS
from lossgate.specs.option import LARGE_SIZES

MANY_TOKENS = Shape(tokens=2085, vocab=13, width=8, sequences=4)
"""Its tokens are more than 2,048, and no multiple of any block size."""

MANY_SEQUENCES = Shape(tokens=301, vocab=17, width=16, sequences=40)

LARGE_VOCABULARY = Shape(tokens=5, vocab=33_023, width=3, sequences=1, logit_std=30.0)
"""Its ids exceed int16, and float16 and bfloat16 do not hold them exactly. In float32, exp of its
logits overflows."""


def large_shapes(candidate: Candidate) -> Sequence[Shape]:
    """Returns the large shapes on which a candidate may fail, and that it does not leave out."""
    given = candidate.given(LARGE_SIZES.name)
    shapes = {"tokens": MANY_TOKENS, "sequences": MANY_SEQUENCES, "vocabulary": LARGE_VOCABULARY}
    if candidate.spec.trained_dim == "sequence":
        del shapes["tokens"], shapes["vocabulary"]
    elif not candidate.starts_at.has_logits:
        del shapes["vocabulary"]
    return [shape for name, shape in shapes.items() if name in given]


LARGE = 1 << 20
"""The most logits, or entries of the lm-head, of a problem that is not large. A dozen runs of a
larger problem at once would take gigabytes."""


def is_large(problem: Problem) -> bool:
    """Returns whether a problem is judged one run, and some tokens, at a time."""
    return HEADS[problem.head].has_logits and size_of(problem) > LARGE


def size_of(problem: Problem) -> int:
    """Returns the number of logits of a problem, or of entries of its lm-head, whichever is
    larger.
    """
    return problem.vocab * max(problem.tokens, problem.hidden if problem.head == "hidden" else 1)
