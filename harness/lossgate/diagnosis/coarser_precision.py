# SPDX-License-Identifier: Apache-2.0
"""Precisions that are coarser than a declared one: what a kernel may round and not say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from lossgate.base.spelling import in_a_row
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.precision import Precision
from lossgate.numerics.float_formats import FLOAT_FORMATS

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
        counted = next(counted for name, counted, _ in _STEPS.values() if name == self.guessed)
        return f"{called}, where N is the {_COUNTED[counted]} in a step of its loop, {shown[self.guessed]} at most"

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
    for stage, (size, counted, _) in _STEPS.items():
        declared = getattr(own, size)
        if declared is not None and FLOAT_FORMATS[getattr(own, stage)].unit >= FLOAT_FORMATS[name].unit:
            for smaller in (each for each in _USUAL_STEPS if each < declared):
                rounds = f"{_STAGES[stage]} after fewer {_COUNTED[counted]}"
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
    name, counted, _ = _STEPS[running]
    tiles = candidate.tiles.get(counted, ())[:1]
    for size in tiles or _USUAL_STEPS:
        yield Coarser({**changes, name: size}, rounds, to, guessed="" if tiles else name)


def _returned_as_before(candidate: Candidate, own: Precision) -> dict[str, Any]:
    """Returns what keeps the dtypes that are returned, whatever that of the loss becomes."""
    if isinstance(own.returned, str):
        return {}
    spec = candidate.spec
    dtypes = {name: own.dtype_of(name) for name in (*spec.outputs, *spec.metrics)}
    return {"returned": own.loss if own.returned is None else dtypes}
