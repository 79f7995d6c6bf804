# SPDX-License-Identifier: Apache-2.0
"""Properties of calls: what a kernel keeps from one to the next, and how backward may be called."""

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
from lossgate.cases.rank_call import RankCall, RankOutputs, plainly
from lossgate.declaration.candidate import Outputs
from lossgate.problems.batch import GlobalBatch
from lossgate.properties.registry import Checked, called, property

_SECOND = -2.0
"""What multiplies the upstream gradients of a second backward. With 1, a gradient that the second
call overwrites would look right. It is exact in every dtype, and so is the sum."""


@property(
    "same-call-twice",
    runs=3,
    remedy="keep nothing from one call to the next, and write to no tensor that a call returned or saved",
)
def same_call_twice(case: Case) -> Checked:
    """A call between forward and backward, and before the same call again, changes nothing."""
    return _in_between(case, case.placed.batch, "other numbers")


@property(
    "after-another-shape",
    runs=3,
    remedy="key what is kept by every shape, dtype and option that it depends on, or keep nothing",
)
def after_another_shape(case: Case) -> Checked:
    """The same with a call of other sizes in between."""
    problem = case.problem
    other = replace(
        problem, lengths=problem.lengths * 2, masks=problem.masks * 2, vocab=2 * problem.vocab, seed=problem.seed + 1
    )
    return _in_between(case, lay_out(BoundProblem(case.candidate.spec, other).unmasked, other), "other sizes")


def _in_between(case: Case, other: GlobalBatch, what: str) -> Checked:
    """Compares calls before and after another one with a plain one: bit by bit, or by the judge
    where sums have another order in each call.
    """
    by_rank = case.on_ranks(_Around(other))
    before, after = ([calls[number] for calls in by_rank] for number in (0, 1))
    if not case.world.repeatable or case.problem.reduction_order == "permuted":
        found = (called("before another call", case.judged(before)), called("after it", case.judged(after)))
        return Checked(comparisons=tuple(chain.from_iterable(found)))
    faults = [
        f"{output} has other bits with a call of {what} between forward and backward" for output in case.unequal(before)
    ]
    faults += [f"{output} has other bits after a call of {what}" for output in case.unequal(after)]
    return Checked(faults=tuple(faults))


@dataclass(frozen=True)
class _Around:
    """Calls a kernel before and after a call with another batch, or with the same batch and other
    numbers. The first call's backward comes after that.
    """

    batch: GlobalBatch

    def __call__(self, call: RankCall) -> tuple[RankOutputs, RankOutputs]:
        outputs = call.forward()
        other = RankCall(call.candidate, call.options, self.batch, call.context)
        other.replace(**{name: (-leaf.detach()).requires_grad_() for name, leaf in other.leaves.items()})
        plainly(other)
        call.backward(outputs)
        return call.collect(outputs), plainly(call.again())


@property(
    "gradients-add-up",
    runs=2,
    remedy="return gradients from backward and let autograd add them up; assign to no .grad",
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
    remedy="use ctx.save_for_backward, and do not write to what was saved: multiply out of place",
)
def second_backward(case: Case) -> Checked:
    """A second backward through the same graph adds its gradients, or is refused by an error."""
    ways = {"with retain_graph": True, "without retain_graph": False}
    found = (called(words, case.judged(case.on_ranks(_BackwardTwice(way)))) for words, way in ways.items())
    return Checked(comparisons=tuple(chain.from_iterable(found)))


@dataclass(frozen=True)
class _BackwardTwice:
    """Calls backward twice, the second time with another upstream gradient."""

    retain_graph: bool

    def __call__(self, call: RankCall) -> RankOutputs:
        outputs, once = call.forward(), None
        try:
            call.backward(outputs, retain_graph=self.retain_graph)
            once = call.collect(outputs)
            call.backward(outputs, _SECOND, retain_graph=self.retain_graph)
        except LossgateError:  # of the world, or about the declaration
            raise
        except Exception:  # it is refused, by torch or by the kernel: nobody can take it for a gradient
            if once is None and not self.retain_graph:  # that was a plain call
                raise
            return plainly(call.again()) if once is None else once
        return call.collect(outputs, divided_by=1 + _SECOND)


@property(
    "checkpointing",
    runs=4,
    remedy="compute and save the same in the second forward as in the first, by ctx.save_for_backward",
)
def checkpointing(case: Case) -> Checked:
    """Under activation checkpointing, which runs forward again in backward, nothing changes."""
    ways = {"with use_reentrant=True": _checkpointed_reentrant, "with use_reentrant=False": _checkpointed}
    found = (called(words, case.judged(case.on_ranks(way))) for words, way in ways.items())
    return Checked(comparisons=tuple(chain.from_iterable(found)))


def _checkpointed_reentrant(call: RankCall) -> RankOutputs:
    """Calls a kernel as torch.utils.checkpoint does with use_reentrant=True. That itself would load
    torch's compiler.
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
    """Calls a kernel as torch.utils.checkpoint does with use_reentrant=False: what forward saves is
    let go, and backward takes what a second forward saves.
    """
    first, again = list[Tensor](), list[Tensor]()
    ended = False

    def pack_first(tensor: Tensor) -> int:
        first.append(tensor.detach())
        return len(first) - 1

    def pack_again(tensor: Tensor) -> Tensor:
        again.append(tensor.detach())
        return tensor

    def unpack_first(number: int) -> Tensor:
        if not ended:  # a backward inside forward
            return first[number]
        if not again:
            with torch.enable_grad(), saved_tensors_hooks(pack_again, lambda tensor: tensor):
                call.forward()
            if len(again) != saved:
                raise CandidateError(
                    f"candidate {call.candidate.name!r} on rank {call.context.rank} saves {saved} tensors in "
                    f"forward, and {len(again)} if forward is run again in backward; save the same each time"
                )
        return again[number]

    with saved_tensors_hooks(pack_first, unpack_first):
        outputs = call.forward()
    saved, ended = len(first), True
    first.clear()
    call.backward(outputs)
    return call.collect(outputs)
