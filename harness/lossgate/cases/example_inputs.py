# SPDX-License-Identifier: Apache-2.0
"""``lossgate.example``: inputs of a kernel to play with."""

from collections.abc import Mapping, Sequence
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.base.spelling import nearest
from lossgate.cases.drawn_problem import DrawnProblem
from lossgate.declaration.candidate import Candidate
from lossgate.losses import find_spec
from lossgate.problems.problem import Problem
from lossgate.specs.option import COMMON_OPTIONS
from lossgate.specs.spec import Spec

_LENGTHS = (5, 3)


def example(
    of: str | Spec | Candidate,
    *,
    head: str | None = None,
    lengths: Sequence[int] | None = None,
    hidden: int = 4,
    vocab: int = 11,
    dtype: str = "float32",
    layout: str = "single",
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> DrawnProblem:
    """Makes a small problem to play with: the inputs of a kernel, and the right results.

    For example::

        example = lossgate.example("nll", head="logits")
        inputs, options = example.inputs(), example.options
        loss = my_kernel(inputs, options, None)
        loss.backward()
        example.reference()["loss"]

    The same arguments give the same numbers. Every token is trained that has a next token in its
    sequence.

    Args:
        of: a spec, by name or as the object, or a candidate.
        head: where the kernel starts; by default the head of the candidate, or the spec's first.
        lengths: the tokens of each sequence; by default 5 and 3, or 5, 3, 5 and 3 if the spec has
            pairs.
        hidden: the width of the hidden states, at head "hidden".
        vocab: the rows of the vocabulary, at heads with logits.
        dtype: the dtype of the differentiable inputs.
        layout: the layout of the ranks, such as "tp=2". ``inputs(rank)`` has the part of a rank.
        options: the options that are not at their default, by name.
        seed: the seed of all numbers.

    Returns:
        The problem: its ``inputs(rank)``, ``options``, ``upstream(rank)``, ``reference(rank)``, and
        ``check(candidate)``.

    Raises:
        UsageError: if the spec has no such head or option, or the sizes do not suit it.
    """
    if isinstance(of, Candidate):
        spec, own_head = of.spec, of.head
    else:
        spec = of if isinstance(of, Spec) else find_spec(of)
        own_head = next(iter(spec.inputs))
    start = head or own_head
    if start not in spec.inputs:
        raise UsageError(f"example(head={start!r}): spec {spec.name!r} has no such head; {nearest(start, spec.inputs)}")
    given = tuple(lengths) if lengths is not None else _LENGTHS * spec.group_size
    own = dict(options or {})
    common: dict[str, Any] = {name: own.pop(name) for name in COMMON_OPTIONS if name in own}  # fields of Problem
    if spec.outputs[0] == "logprobs":
        common["cotangent"] = "logprobs"
    problem = Problem(
        spec=spec.name,
        head=start,
        dtype=dtype,
        lengths=given,
        masks=("all",) * len(given),
        hidden=hidden,
        vocab=vocab,
        layout=Layout.parse(layout),
        options=own,
        group_size=spec.group_size,
        seed=seed,
        **common,
    )
    drawn = DrawnProblem(problem, spec)
    drawn.inputs()  # so that unsuitable arguments are reported here, and not where they are used
    return drawn
