# SPDX-License-Identifier: Apache-2.0
"""Properties of calls: calls do not disturb one another, and backward is called in unusual ways."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from lossgate.base.errors import CandidateError, LossgateError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.materialize import lay_out
from lossgate.cases.placement import is_given
from lossgate.cases.random_numbers import put_back
from lossgate.cases.rank_call import RankCall, RankOutputs, plainly
from lossgate.declaration.candidate import Outputs
from lossgate.judge.comparison import Comparison
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.masks import MaskPattern
from lossgate.problems.problem import Problem
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import all_of, formulas, gradients, masked_token_counts, metrics, values
from lossgate.worlds.base import RankRaised

_SECOND = -2.0
"""The factor on the upstream gradients of a second backward. With a factor of 1 it would look right
if the second call overwrites the gradient of the first. -2 and 1 - 2 are exact in every dtype."""


@property(
    "same-call-twice",
    runs=3,
    mistakes=all_of(values("is that of another call"), gradients("is that of another call")),
    remedy="keep nothing from one call to the next, and write to no tensor that a call returned or saved",
    may_explain=("after-another-shape", "gradients-add-up", "second-backward", "checkpointing"),
)
def same_call_twice(case: Case) -> Checked:
    """Another call between forward and backward, or between two equal calls, changes nothing."""
    return _in_between(case, _of_equal_sizes(case.problem), "other numbers")


def _of_equal_sizes(problem: Problem) -> Iterator[Problem]:
    """Yields problems with other numbers: first with the sequences in the opposite order, if each
    rank then has as many tokens as before, and at last the problem itself, whose inputs will be
    negated.
    """
    other = replace(problem, seed=problem.another_seed())
    turned = replace(other, lengths=other.lengths[::-1], masks=other.masks[::-1], forced_labels=(), outliers=())
    own, others = ([len(shard) for shard in one.partition.token_shards.values()] for one in (problem, turned))
    if own == others:
        yield turned
    yield from (other, problem)


@property(
    "after-another-shape",
    runs=3,
    mistakes=all_of(values("is that of another call"), gradients("is that of another call")),
    remedy="key each kept value by every shape, dtype and option that it depends on, or keep nothing",
)
def after_another_shape(case: Case) -> Checked:
    """A call of other sizes between forward and backward, or between two calls, changes nothing."""
    problem = case.problem
    lengths, masks = problem.lengths * 2, problem.masks * 2
    other = replace(problem, lengths=lengths, masks=masks, vocab=2 * problem.vocab, seed=problem.another_seed())
    trained: tuple[MaskPattern, ...] = ("all",) * len(masks)
    return _in_between(case, [other, replace(other, masks=trained)], "other sizes")


def _in_between(case: Case, others: Iterable[Problem], other_what: str) -> Checked:
    """Compares two calls with a plain call: one around a call with another batch, and one after it.

    The comparison is bit by bit, or by the judge if each call adds up in another order. The other
    batch is that of the first problem that the candidate's conventions allow.
    """
    bound = ((BoundProblem(case.candidate.spec, other), other) for other in others)
    given = next((pair for pair in bound if is_given(case.candidate, pair[0], pair[1].partition)), None)
    if given is None:
        return Checked(says_nothing=True)
    by_rank = case.on_ranks(_Around(lay_out(given[0].unmasked, given[1])))
    around, after = ([calls[number] for calls in by_rank] for number in (0, 1))
    if not case.world.repeatable or case.problem.reduction_order == "permuted":
        found = (called("before another call", case.judged(around)), called("after it", case.judged(after)))
        return Checked(comparisons=tuple(chain.from_iterable(found)))
    between = f"with a call of {other_what} between forward and backward"
    faults = [f"{output} has other bits {between}" for output in case.unequal(around)]
    faults += [f"{output} has other bits after a call of {other_what}" for output in case.unequal(after)]
    return Checked(faults=tuple(faults))


@dataclass(frozen=True)
class _Around:
    """Calls a kernel with a call of another batch between forward and backward, and then once
    more.
    """

    batch: GlobalBatch

    def __call__(self, call: RankCall) -> tuple[RankOutputs, RankOutputs]:
        outputs = call.forward()
        with put_back():  # whatever backward draws
            plainly(self._other(call))  # only what it leaves behind matters
        call.backward(outputs)
        around = call.collect(outputs)
        after = plainly(call.again())
        return around, after

    def _other(self, call: RankCall) -> RankCall:
        """Returns a call with the other batch, and with differentiable inputs negated."""
        other = RankCall(call.candidate, call.options, self.batch, call.context)
        negated = {name: (-leaf.detach()).requires_grad_() for name, leaf in other.leaves.items()}
        other.replace(**negated)
        return other


@property(
    "gradients-add-up",
    runs=2,
    applies=lambda candidate: candidate.conventions.inputs == "kept",
    mistakes=gradients("replaces the one that is there", 1 / (1 + _SECOND) * _SECOND),
    remedy="return gradients from backward and let autograd add them up; assign to no .grad",
    may_explain=("second-backward",),
)
def gradients_add_up(case: Case) -> Checked:
    """Gradients of a second call are added to those that are there."""
    return Checked(comparisons=case.judged(case.on_ranks(_accumulated)))


def _accumulated(call: RankCall) -> RankOutputs:
    call.backward(call.forward())
    outputs = call.forward()
    call.backward(outputs, _SECOND)
    return call.collect(outputs, divided_by=1 + _SECOND)


@property(
    "second-backward",
    runs=2,
    applies=lambda candidate: candidate.conventions.inputs == "kept",
    mistakes=gradients("is added twice", 1 / (1 + _SECOND) * 2),
    remedy="use ctx.save_for_backward, and do not write to what was saved: multiply out of place",
)
def second_backward(case: Case) -> Checked:
    """A second backward through the same graph adds its gradients, or raises an error."""
    ways = {"with retain_graph": True, "without retain_graph": False}
    found = (called(words, case.judged(case.on_ranks(_BackwardTwice(way)))) for words, way in ways.items())
    return Checked(comparisons=tuple(chain.from_iterable(found)))


@dataclass(frozen=True)
class _BackwardTwice:
    """Calls backward twice, the second time with another upstream gradient."""

    retain_graph: bool

    def __call__(self, call: RankCall) -> RankOutputs:
        outputs, after_one = call.forward(), None
        try:
            call.backward(outputs, retain_graph=self.retain_graph)
            after_one = call.collect(outputs)
            call.backward(outputs, _SECOND, retain_graph=self.retain_graph)
        except LossgateError:  # of the world, or about the declaration
            raise
        except Exception:  # torch or the kernel refuses: nobody can take that for a gradient
            if after_one is not None:
                return after_one
            if not self.retain_graph:  # the first backward was that of a plain call
                raise
            return plainly(call.again())
        return call.collect(outputs, divided_by=1 + _SECOND)


@property(
    "checkpointing",
    runs=4,
    applies=lambda candidate: candidate.conventions.inputs == "kept",
    relaxed_by={"hooks": ("refused",)},
    mistakes=all_of(gradients("is lost"), metrics("is lost"), masked_token_counts, formulas),
    remedy="compute and save the same in the second forward as in the first, by ctx.save_for_backward",
)
def checkpointing(case: Case) -> Checked:
    """Under activation checkpointing, which runs forward again in backward, nothing changes.

    A kernel that is declared to refuse hooks on saved tensors may raise an error.
    """
    ways = {"with use_reentrant=True": _checkpointed_reentrant, "with use_reentrant=False": _checkpointed}
    found = list[Comparison]()
    for words, way in ways.items():
        try:
            found += called(words, case.judged(case.on_ranks(way)))
        except RankRaised:
            if case.candidate.conventions.hooks == "taken":
                raise
    return Checked(comparisons=tuple(found))


def _checkpointed_reentrant(call: RankCall) -> RankOutputs:
    """Calls a kernel as torch.utils.checkpoint does with use_reentrant=True, without calling that
    function: it would load torch's compiler.
    """
    kept: list[Outputs] = []

    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        call.replace(**dict(zip(names, leaves, strict=True)))
        outputs = call.forward(has_graph=torch.is_grad_enabled())
        kept.append(outputs)
        return tuple(call.roots(outputs).values())

    leaves = dict(call.leaves)
    names = list(leaves)
    roots: Any = CheckpointFunction.apply(forward, False, *leaves.values())
    outputs = replace(kept[0], **dict(zip(call.roots(kept[0]), roots, strict=True)))
    call.backward(outputs)
    call.replace(**leaves)
    return call.collect(outputs)


def _checkpointed(call: RankCall) -> RankOutputs:
    """Calls a kernel as torch.utils.checkpoint does with use_reentrant=False: the tensors that
    forward saves are dropped, and backward gets those that a second forward saves.
    """
    saved = _SavedAgain(call)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        outputs = call.forward()
    saved.drop()
    call.backward(outputs)
    return call.collect(outputs)


class _SavedAgain:
    """The tensors that forward saves. After ``drop`` they are those of a second forward."""

    def __init__(self, call: RankCall) -> None:
        self._call = call
        self._first: list[Tensor] = []
        self._again: list[Tensor] = []
        self._dropped: int | None = None
        """How many tensors were dropped; None before."""

    def pack(self, tensor: Tensor) -> int:
        self._first.append(tensor.detach())
        return len(self._first) - 1

    def drop(self) -> None:
        self._dropped = len(self._first)
        self._first.clear()

    def unpack(self, number: int) -> Tensor:
        if self._dropped is None:  # a backward inside forward
            return self._first[number]
        if not self._again:
            self._run_again(self._dropped)
        return self._again[number]

    def _run_again(self, expected: int) -> None:
        def pack(tensor: Tensor) -> Tensor:
            self._again.append(tensor.detach())
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            self._call.forward()
        if len(self._again) != expected:
            raise CandidateError(
                f"candidate {self._call.candidate.name!r} on rank {self._call.context.rank} saves {expected} tensors "
                f"in forward, but {len(self._again)} if forward runs again in backward; save the same tensors each time"
            )
