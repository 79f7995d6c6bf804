# SPDX-License-Identifier: Apache-2.0
"""Properties of calls without some or all gradients: frozen inputs, and ``torch.no_grad()``."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch

from lossgate.cases.case import Case
from lossgate.cases.rank_call import RankCall, RankOutputs
from lossgate.judge.comparison import Comparison
from lossgate.properties.mended import with_grad
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import all_of, formulas, gradients, values


@property(
    "frozen-inputs",
    applies=lambda candidate: len(candidate.starts_at.leaves) > 1,
    fits=lambda case: len(case.bound.batch.leaves) > 1,
    runs=6,
    mistakes=gradients("is lost"),
    remedy="look at ctx.needs_input_grad, and return None in place of a gradient that is not needed",
    remedies={
        "missing": "give each input that needs a gradient one, whichever others are frozen: look at its own "
        "entry of ctx.needs_input_grad"
    },
)
def frozen_inputs(case: Case) -> Checked:
    """Inputs that need no gradient get none, and the gradients of the others stay right."""
    gradients = case.candidate.starts_at.gradients(case.bound.batch.leaves)
    comparisons, not_needed = list[Comparison](), dict[str, None]()
    for trained in _subsets(tuple(gradients)):
        by_rank = case.on_ranks(_Trained(trained))
        frozen = " and ".join(name for name in gradients if name not in trained)
        found = case.judged([outputs for outputs, _ in by_rank], [gradients[name] for name in trained])
        comparisons += called(f"with {frozen} frozen", found)
        not_needed |= dict.fromkeys(name for _, names in by_rank for name in names)
    faults = tuple(f"{name} got a gradient, but needs none" for name in not_needed)
    return Checked(comparisons=tuple(comparisons), faults=faults)


def _subsets(leaves: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields each set of leaves to train that is neither empty nor complete."""
    for size in range(1, len(leaves)):
        yield from combinations(leaves, size)


@dataclass(frozen=True)
class _Trained:
    """Calls a kernel with some leaves trained and the others frozen. Returns its outputs, and the
    names of frozen leaves that got a gradient.
    """

    leaves: tuple[str, ...]

    def __call__(self, call: RankCall) -> tuple[RankOutputs, list[str]]:
        frozen = {name: leaf.detach() for name, leaf in call.leaves.items() if name not in self.leaves}
        call.replace(**frozen)
        outputs = call.forward()
        call.backward(outputs)
        given = [name for name, leaf in frozen.items() if leaf.grad is not None]
        return call.collect(outputs, leaves=self.leaves), given


@property(
    "no-grad",
    runs=2,
    mistakes=all_of(values("is lost"), formulas),
    remedy="compute gradients only in backward, or where torch.is_grad_enabled(), and write to no .grad",
    mended=with_grad,
    may_explain=("checkpointing",),
)
def no_grad(case: Case) -> Checked:
    """Without a graph all outputs are right, and no input gets a gradient."""
    comparisons, with_gradient = list[Comparison](), dict[str, None]()
    for words, how in (("", _under_no_grad), ("if no input needs a gradient", _all_frozen)):
        by_rank = case.on_ranks(how)
        comparisons += called(words, case.judged([outputs for outputs, _ in by_rank], ()))
        with_gradient |= dict.fromkeys(name for _, names in by_rank for name in names)
    faults = tuple(f"{name} got a gradient" for name in with_gradient)
    return Checked(comparisons=tuple(comparisons), faults=faults)


def _under_no_grad(call: RankCall) -> tuple[RankOutputs, list[str]]:
    with torch.no_grad():
        return _forward_alone(call)


def _all_frozen(call: RankCall) -> tuple[RankOutputs, list[str]]:
    """Calls a kernel with inputs that need no gradient, as in evaluation without no_grad()."""
    call.replace(**{name: leaf.detach() for name, leaf in call.leaves.items()})
    return _forward_alone(call)


def _forward_alone(call: RankCall) -> tuple[RankOutputs, list[str]]:
    outputs = call.forward(has_graph=False)
    with_gradient = [name for name, leaf in call.leaves.items() if leaf.grad is not None]
    return call.collect(outputs, leaves=()), with_gradient
