# SPDX-License-Identifier: Apache-2.0
"""Precisions that are coarser than a declared one: what a kernel may round and not say. Would it
agree, if it declared that?
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lossgate.base.spelling import counted, in_a_row
from lossgate.cases.oracle import Oracle
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.precision import Precision
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.explanation import Explanation
from lossgate.diagnosis.observed import Observed, scope_of
from lossgate.numerics.float_formats import FLOAT_FORMATS, float_format_of
from lossgate.specs.outputs import Output

_STAGES: Mapping[str, str] = {
    "returned": "what is returned",
    "reduce": "what the ranks of tp add up of the gradient of hidden",
    "accumulate": "the running sum of the gradient of weight",
    "accumulate_hidden": "the running sum of the gradient of hidden",
    "dlogits": "the gradient of the logits",
    "logsumexp": "the sum over the vocabulary",
    "entropy": "the entropies",
    "logprobs": "the log-probabilities",
    "logits": "the logits",
    "loss": "the arithmetic from log-probabilities to the loss",
}
"""The stages, and what each rounds, in words."""
_PRODUCT = ("logits", "dlogits")
_SOFTMAX = (*_PRODUCT, "logsumexp", "logprobs")
_TOGETHER = tuple(
    (*stages, *in_a_loop) for stages in (_PRODUCT, _SOFTMAX, (*_SOFTMAX, "loss")) for in_a_loop in ((), ("accumulate",))
)
"""The stages that kernels round together, as torch does where the inputs are never cast to float32:
the product alone, also the softmax, or all."""
_LOOP = {*_PRODUCT, "accumulate", "chunk"}
_STEPS = {"accumulate": ("chunk", "token", "weight"), "accumulate_hidden": ("vocab_chunk", "vocab", "hidden")}
"""What has the size of a step of each running sum, what it counts, and the leaf whose gradient it
is."""
_COUNTED = {"token": "tokens", "vocab": "rows of the vocabulary"}
_USUAL_STEPS = (64, 32, 16, 8, 4, 2, 1)
"""The steps that are tried where a candidate declares no tiles. The fewer there are, the less is
rounded."""

_UNITS = 8.0
"""So many units of roundoff is the most that an output may be off as a whole, relative to its
size."""
_ALIGNED = 0.5
"""The largest mean sign of errors of rounding, relative to the reference. A factor has 1."""
_STAGES_NAMED = 3
"""The most stages that are named: those that make a kernel the least noisy."""
_ENTRIES = 16
"""The fewest entries of an output of which this is asked."""
_WOULD_SHOW = 10.0
"""A stage that makes an output so many times as noisy would show in it, on most problems."""


@dataclass(frozen=True)
class Coarser:
    """A change to a ``Precision`` that makes it coarser."""

    changes: Mapping[str, Any]
    """The values of its fields."""
    rounds: str
    """What the kernel rounds, in words."""
    to: str
    """The format, in words."""
    guessed: str = ""
    """The field whose value is the largest that was tried: the candidate does not say it."""

    def __str__(self) -> str:
        return f"Precision({', '.join(f'{name}={value!r}' for name, value in self.changes.items())})"

    def declared(self, candidate: Candidate, dtype: str) -> str:
        """Returns what to write, with all that the candidate declares already."""
        own, plain = self.of(candidate, dtype).precision[dtype], Precision()
        given = {f.name: getattr(own, f.name) for f in fields(Precision)}
        shown = {name: value for name, value in given.items() if value != getattr(plain, name)}
        words = (f"{name}={'N' if name == self.guessed else repr(value)}" for name, value in shown.items())
        called = f"Precision({', '.join(words)})"
        if not self.guessed:
            return called
        dim = next(dim for name, dim, _ in _STEPS.values() if name == self.guessed)
        return f"{called}, where N is the {_COUNTED[dim]} in a step of its loop, {shown[self.guessed]} at most"

    @property
    def is_of_logits(self) -> bool:
        """Whether it is of a stage that kernels round together with others."""
        return not self.changes.keys().isdisjoint(_SOFTMAX)

    @property
    def leaf(self) -> str:
        """The differentiable input of whose gradient it is a running sum; "" if it is of none."""
        sums = (leaf for stage, (size, _, leaf) in _STEPS.items() if self.changes.keys() & {stage, size})
        return next(sums, "") if not self.is_of_logits else ""

    def of(self, candidate: Candidate, dtype: str) -> Candidate:
        """Returns a candidate that declares the change for a dtype."""
        changed = replace(candidate.precision[dtype], **self.changes)
        return replace(candidate, precision=MappingProxyType({**candidate.precision, dtype: changed}))


def in_one_stage(candidate: Candidate, dtype: str) -> Iterator[Coarser]:
    """Yields the changes to what a candidate declares for a dtype that are of a single stage.

    A running sum has several, the longest step first.
    """
    own, name = candidate.precision[dtype], _coarse(dtype)
    for stage in _STAGES:
        if stage != "returned" or own.returned is None:
            yield from _rounded(candidate, own, _left(candidate, own, (stage,), name), name)
    for stage, (size, dim, _) in _STEPS.items():
        declared = getattr(own, size)
        if declared is not None and FLOAT_FORMATS[getattr(own, stage)].unit >= FLOAT_FORMATS[name].unit:
            for smaller in (each for each in _USUAL_STEPS if each < declared):
                rounds = f"{_STAGES[stage]} after fewer {_COUNTED[dim]}"
                yield Coarser({size: smaller}, rounds, name, guessed=size)
    if own.products != "tf32":
        yield Coarser({"products": "tf32"}, "the factors of products", "TF32")
    if not own.grads_in_forward and dtype != "float32":
        yield Coarser({"grads_in_forward": True}, "gradients both in forward and in backward", dtype)


def in_several_stages(candidate: Candidate, dtype: str) -> Iterator[Coarser]:
    """Yields the changes of several stages at once, those that round the least first."""
    own, name = candidate.precision[dtype], _coarse(dtype)
    for stages in dict.fromkeys(_left(candidate, own, together, name) for together in _TOGETHER):
        if len(stages) > 1:
            yield from _rounded(candidate, own, stages, name)


def as_coarse_as_usual(candidate: Candidate, dtype: str) -> Coarser | None:
    """Returns the change to what torch rounds if products are in a dtype, and a loop over tokens
    has no sum of its own; None if there is nothing to add.
    """
    if dtype == "float32":
        return None
    changes = (one for one in in_several_stages(candidate, dtype) if one.changes.keys() <= _LOOP)
    return min(changes, key=lambda one: (-len(one.changes), one.changes.get("chunk", 0)), default=None)


def _coarse(dtype: str) -> str:
    return dtype if dtype == "float16" else "bfloat16"


def _left(candidate: Candidate, own: Precision, stages: tuple[str, ...], to: str) -> tuple[str, ...]:
    """Returns those of some stages that a candidate has and declares finer than a dtype."""

    def is_left(stage: str) -> bool:
        given = own.loss if stage == "returned" else getattr(own, stage)
        there = stage not in _STEPS or _STEPS[stage][2] in candidate.starts_at.leaves
        there = there and (stage != "reduce" or "tp" in candidate.axes)
        return there and FLOAT_FORMATS[given].unit < FLOAT_FORMATS[to].unit

    return tuple(filter(is_left, stages))


def _rounded(candidate: Candidate, own: Precision, stages: tuple[str, ...], to: str) -> Iterator[Coarser]:
    """Yields the changes that round some stages to a dtype."""
    if not stages:
        return
    changes: dict[str, Any] = dict.fromkeys(stages, to)
    if "loss" in stages:  # what is returned has come in the dtype that is declared
        changes |= _returned_as_before(candidate, own)
    rounds = in_a_row([_STAGES[stage] for stage in stages])
    running = next((stage for stage in stages if stage in _STEPS), None)
    if running is None or getattr(own, _STEPS[running][0]) is not None:
        yield Coarser(changes, rounds, to)
        return
    name, dim, _ = _STEPS[running]
    tiles = candidate.tiles.get(dim, ())[:1]
    for size in tiles or _USUAL_STEPS:
        yield Coarser({**changes, name: size}, rounds, to, guessed="" if tiles else name)


def _returned_as_before(candidate: Candidate, own: Precision) -> dict[str, Any]:
    """Returns what keeps the dtypes that are returned, whatever that of the loss becomes."""
    if isinstance(own.returned, str):
        return {}
    spec = candidate.spec
    dtypes = {name: own.dtype_of(name) for name in (*spec.outputs, *spec.metrics)}
    return {"returned": own.loss if own.returned is None else dtypes}


def coarser(failing: Sequence[Observed]) -> list[Explanation]:
    """Returns that one of some stages is rounded, if that explains what a kernel returned: the
    numbers do not tell which it is. If no single stage does, these are the fewest that kernels
    round together and that do.

    A single stage may be all that these problems show of several, so that the advice has both.

    Args:
        failing: what the kernel returned on problems where it is wrong.
    """
    candidate, dtype = failing[0].case.candidate, failing[0].case.problem.dtype
    of_each = {output: [one for one in failing if output in one.wrong] for output in scope_of(failing)}
    if not all(_may_be_rounding(own, output) for output, own in of_each.items()):
        return []
    found = _explaining(failing, in_one_stage(candidate, dtype))
    likely = not found or any(one.is_of_logits for _, one in found)
    several = in_several_stages(candidate, dtype) if likely else ()
    together = [one for _, one in _explaining(failing, several, first=True)]
    if not found:
        return [_rounding(failing, together)] if together else []
    to = min(found, key=lambda one: one[0])[1].to
    stages = [one for _, one in sorted(found, key=lambda one: one[0]) if one.to == to]
    return [_rounding(failing, stages, together)]


def _explaining(
    failing: Sequence[Observed], changes: Iterable[Coarser], *, first: bool = False
) -> list[tuple[float, Coarser]]:
    """Returns the changes that explain all, with how noisy they make a kernel: of those that round
    the same, and differ in the step of a sum, the first.
    """
    found: dict[str, tuple[float, Coarser]] = {}
    for change in changes:
        if change.rounds not in found and (noise := _noise_if_it_agrees(failing, change)) is not None:
            found[change.rounds] = noise, change
            if first:
                break
    return list(found.values())


def _rounding(failing: Sequence[Observed], stages: Sequence[Coarser], together: Sequence[Coarser] = ()) -> Explanation:
    """Returns that a kernel rounds one of some stages, or several at once.

    Args:
        failing: the problems that this explains.
        stages: those that may be rounded, each alone.
        together: the stages that may be rounded at once; at most one such change.
    """
    candidate, dtype = failing[0].case.candidate, failing[0].case.problem.dtype
    several = ": the numbers do not tell which, or whether it is several" if len(stages) > 1 else ""
    named, left = stages[:_STAGES_NAMED], counted(len(stages) - _STAGES_NAMED, "other stage")
    what = [one.rounds for one in named] + [left] * (len(stages) > _STAGES_NAMED)
    declared = "; or ".join(one.declared(candidate, dtype) for one in named)
    more = (f"; or, if it rounds {one.rounds}, as autograd does: {one.declared(candidate, dtype)}" for one in together)
    cause = Cause(
        name=" or ".join(map(str, named)),
        words=f"the kernel rounds {', or '.join(what)} to {stages[0].to}, "
        f"which its declared precision does not say{several}",
        todo=f"compute it in float32. Or, if it is meant, declare for {dtype} {declared}{''.join(more)}",
    )
    return Explanation(cause=cause, failing=failing)


def _noise_if_it_agrees(failing: Sequence[Observed], change: Coarser) -> float | None:
    """Returns how noisy kernels with a coarser precision are in what is wrong, relative to those
    that are declared; None if the kernel does not agree with them, or they would be wrong in what
    is right, too.
    """
    noise, right = 1.0, failing[0].got.keys() - scope_of(failing)
    ratios: dict[Output, list[float]] = {output: [] for output in right}
    for observed in failing:
        case = observed.case
        oracle = Oracle(change.of(case.candidate, case.problem.dtype), case.placed, case.result.outputs)
        if not all(one.agrees for one in case.compare(case.result, oracle.gradients, oracle)):
            return None
        noise = max(noise, *(_noise(oracle, o) / max(_noise(case.oracle, o), 1e-300) for o in observed.wrong))
        for output in right.intersection(case.result.outputs):
            ratios[output].append(_size(observed, oracle, output) / _size(observed, case.oracle, output))
    return None if any(median(of_output) > _WOULD_SHOW for of_output in ratios.values() if of_output) else noise


def _noise(oracle: Oracle, output: Output) -> float:
    return float(oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0).abs().max())


def _size(observed: Observed, oracle: Oracle, output: Output) -> float:
    """Returns how far right kernels may be off, with the rounding of what they return."""
    largest = float(oracle.reference[output].nan_to_num(0.0, 0.0, 0.0).abs().max())
    dtype = observed.case.result.dtypes[output]
    return max(_noise(oracle, output) + float_format_of(dtype).unit * largest, 1e-300)


def _may_be_rounding(failing: Sequence[Observed], output: Output) -> bool:
    """Returns whether the errors of an output are as small as those of rounding, and point
    anywhere.
    """
    signs: list[Tensor] = []
    for observed in failing:
        if output not in observed.case.result.outputs:
            return False
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        finite = got.isfinite() & reference.isfinite()
        off, right = torch.where(finite, got - reference, 0.0).flatten(), torch.where(finite, reference, 0.0).flatten()
        if float(off.norm()) > _UNITS * FLOAT_FORMATS["bfloat16"].unit * float(right.norm()):
            return False
        signs.append((off * right).sign())
    of_all = torch.cat(signs)
    of_all = of_all[of_all != 0]
    return len(of_all) < _ENTRIES or abs(float(of_all.mean())) <= _ALIGNED
