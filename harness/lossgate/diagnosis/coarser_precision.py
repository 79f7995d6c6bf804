# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a kernel only rounds more than it declares. It is judged again as if it had
declared a coarser ``Precision``.
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
from lossgate.numerics.float_formats import FLOAT_FORMATS, ROUNDED_TO, float_format_of
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
    "products": "the factors of products",
    "loss": "the arithmetic from log-probabilities to the loss",
}
"""The stages of a ``Precision``, and what each rounds, in words."""
_PRODUCT = ("logits", "dlogits")
_SOFTMAX = (*_PRODUCT, "logsumexp", "logprobs")
_TOGETHER = tuple(
    (*stages, "products", *in_a_loop)
    for stages in (_PRODUCT, _SOFTMAX, (*_SOFTMAX, "loss"))
    for in_a_loop in ((), ("accumulate",))
)
"""The stages that kernels round together: the product, the product and the softmax, or all. Torch
rounds them together if the inputs are never cast to float32. Under autocast it rounds inputs that
are in float32, too."""
_LOOP = {*_PRODUCT, "accumulate", "chunk"}
"""The fields of a kernel that rounds its products and loops over chunks of tokens."""
_STEPS = {"accumulate": ("chunk", "token", "weight"), "accumulate_hidden": ("vocab_chunk", "vocab", "hidden")}
"""For each running sum, the field with the size of its steps, the dim that it runs over, and the
leaf whose gradient it is."""
_COUNTED = {"token": "tokens", "vocab": "rows of the vocabulary"}
_USUAL_STEPS = (64, 32, 16, 8, 4, 2, 1)
"""The steps that are tried if a candidate declares no tiles. Longer steps round less."""

_UNITS = 8.0
"""The largest error of rounding of an output as a whole, in units of roundoff, relative to its
size."""
_ALIGNED = 0.5
"""The largest mean over entries of the sign of error times reference that rounding may have. For a
factor it is 1 or -1."""
_STAGES_NAMED = 3
"""The largest number of stages that are named. They are the ones that add the least noise."""
_ENTRIES = 16
"""An output with fewer entries is not asked for this mean."""
_WOULD_SHOW = 10.0
"""The largest factor by which rounding a stage may make a right output noisier, in the median over
problems. With a larger one, the output would be wrong on most problems."""


@dataclass(frozen=True)
class Coarser:
    """A change to a ``Precision`` that makes it coarser."""

    changes: Mapping[str, Any]
    """The values of its fields."""
    rounds: str
    """What the kernel rounds, in words."""
    to: str
    """The format to which it is rounded, in words."""
    guessed: str = ""
    """The field whose value was tried, as the candidate does not declare it."""

    def __str__(self) -> str:
        return f"Precision({', '.join(f'{name}={value!r}' for name, value in self.changes.items())})"

    def declared(self, candidate: Candidate, dtype: str) -> str:
        """Returns the ``Precision`` to declare, in words, with the candidate's own declarations."""
        changed, plain = self.of(candidate, dtype).precision[dtype], Precision()
        shown = {f.name: getattr(changed, f.name) for f in fields(Precision)}
        shown = {name: value for name, value in shown.items() if value != getattr(plain, name)}
        words = (f"{name}={'N' if name == self.guessed else repr(value)}" for name, value in shown.items())
        called = f"Precision({', '.join(words)})"
        if not self.guessed:
            return called
        dim = next(dim for name, dim, _ in _STEPS.values() if name == self.guessed)
        most = shown[self.guessed]
        return f"{called}, where N is the number of {_COUNTED[dim]} in a step of its loop, at most {most}"

    @property
    def is_of_logits(self) -> bool:
        """Whether a stage changes that kernels round together with others."""
        return not self.changes.keys().isdisjoint(_SOFTMAX)

    @property
    def leaf(self) -> str:
        """The differentiable input whose gradient has a changed running sum; "" for none."""
        if self.is_of_logits:
            return ""
        return next((leaf for stage, (size, _, leaf) in _STEPS.items() if self.changes.keys() & {stage, size}), "")

    def of(self, candidate: Candidate, dtype: str) -> Candidate:
        """Returns a candidate that declares the change for a dtype."""
        changed = replace(candidate.precision[dtype], **self.changes)
        return replace(candidate, precision=MappingProxyType({**candidate.precision, dtype: changed}))


def in_one_stage(candidate: Candidate, dtype: str) -> Iterator[Coarser]:
    """Yields the changes of a single stage to the precision that a candidate declares for a dtype.

    A running sum has several changes, the one with the longest step first.
    """
    own, coarse = candidate.precision[dtype], _coarse(dtype)
    for stage in _STAGES:
        if stage != "products" and (stage != "returned" or own.returned is None):
            yield from _rounded(candidate, own, _finer(candidate, own, (stage,), coarse, dtype), coarse)
    for stage, (size, dim, _) in _STEPS.items():
        declared = getattr(own, size)
        if declared is not None and FLOAT_FORMATS[getattr(own, stage)].unit >= FLOAT_FORMATS[coarse].unit:
            for smaller in (step for step in _USUAL_STEPS if step < declared):
                rounds = f"{_STAGES[stage]} after fewer {_COUNTED[dim]}"
                yield Coarser({size: smaller}, rounds, coarse, guessed=size)
    for to in ("tf32", "float16", "bfloat16") if dtype == "float32" else ("tf32",):  # the finest that explains all
        if ROUNDED_TO[own.products].unit < ROUNDED_TO[to].unit:
            yield Coarser({"products": to}, _STAGES["products"], to.upper() if to == "tf32" else to)
    if not own.grads_in_forward and dtype != "float32":
        yield Coarser({"grads_in_forward": True}, "gradients both in forward and in backward", dtype)


def in_several_stages(candidate: Candidate, dtype: str) -> Iterator[Coarser]:
    """Yields the changes of several stages at once. The first changes round the least."""
    own, coarse = candidate.precision[dtype], _coarse(dtype)
    for stages in dict.fromkeys(_finer(candidate, own, together, coarse, dtype) for together in _TOGETHER):
        if len(stages) > 1:
            yield from _rounded(candidate, own, stages, coarse)


def as_coarse_as_usual(candidate: Candidate, dtype: str) -> Coarser | None:
    """Returns the change after which a declaration says what torch does by default in a loop over
    tokens: it rounds products and running sums. None if the declaration says so already, and for
    float32.
    """
    if dtype == "float32":
        return None
    changes = (change for change in in_several_stages(candidate, dtype) if change.changes.keys() <= _LOOP)
    # The most stages, with the shortest step.
    return min(changes, key=lambda change: (-len(change.changes), change.changes.get("chunk", 0)), default=None)


def _coarse(dtype: str) -> str:
    return dtype if dtype == "float16" else "bfloat16"


def _finer(candidate: Candidate, own: Precision, stages: tuple[str, ...], to: str, dtype: str) -> tuple[str, ...]:
    """Returns the stages that a candidate has and declares finer than ``to``, for inputs in
    ``dtype``.
    """

    def is_finer(stage: str) -> bool:
        if stage in _STEPS and _STEPS[stage][2] not in candidate.starts_at.leaves:
            return False
        if stage == "reduce" and "tp" not in candidate.axes:
            return False
        if stage == "products" and (dtype != "float32" or "weight" not in candidate.starts_at.leaves):
            return False
        declared: Any = own.loss if stage == "returned" else getattr(own, stage)
        return ROUNDED_TO[declared].unit < FLOAT_FORMATS[to].unit

    return tuple(filter(is_finer, stages))


def _rounded(candidate: Candidate, own: Precision, stages: tuple[str, ...], to: str) -> Iterator[Coarser]:
    if not stages:
        return
    changes: dict[str, Any] = dict.fromkeys(stages, to)
    if "loss" in stages:  # the outputs had the declared dtype, so it must not follow that of the loss
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
    """Returns the change that keeps the declared dtypes of outputs if that of the loss changes."""
    if isinstance(own.returned, str):
        return {}
    if own.returned is None:
        return {"returned": own.loss}
    names = (*candidate.spec.outputs, *candidate.spec.metrics)
    return {"returned": {name: own.dtype_of(name) for name in names}}


def coarser(failing: Sequence[Observed]) -> list[Explanation]:
    """Returns one explanation by stages that are rounded, or none if rounding does not explain all.

    If several stages explain it, each by itself, the cause names them all, as the numbers do not
    tell which is rounded. If no single stage explains it, the cause names the fewest stages that
    kernels round together. If the kernel rounds several stages, one may explain all that these
    problems show. So the advice then has both.

    Args:
        failing: what the kernel returned on problems where it is wrong.
    """
    candidate, dtype = failing[0].case.candidate, failing[0].case.problem.dtype
    for output in scope_of(failing):
        if not _may_be_rounding([observed for observed in failing if output in observed.wrong], output):
            return []
    by_noise = sorted(_explaining(failing, in_one_stage(candidate, dtype)), key=lambda pair: pair[0])
    single = [change for _, change in by_noise]
    together: list[Coarser] = []
    if not single or any(change.is_of_logits for change in single):
        found = _explaining(failing, in_several_stages(candidate, dtype), first=True)
        together = [change for _, change in found]
    if not single:
        return [_rounding(failing, together)] if together else []
    to_the_same = [change for change in single if change.to == single[0].to]
    return [_rounding(failing, to_the_same, together)]


def _explaining(
    failing: Sequence[Observed], changes: Iterable[Coarser], *, first: bool = False
) -> list[tuple[float, Coarser]]:
    """Returns the changes that explain all, each with the noise of a kernel that declares it. Of
    changes that differ only in the step of a sum, it returns the first.

    Args:
        failing: what the kernel returned on problems where it is wrong.
        changes: the changes that are tried, in this order.
        first: whether to stop at the first change that explains all.
    """
    found: dict[str, tuple[float, Coarser]] = {}
    for change in changes:
        if change.rounds in found:
            continue
        noise = _noise_if_it_agrees(failing, change)
        if noise is None:
            continue
        found[change.rounds] = noise, change
        if first:
            break
    return list(found.values())


def _rounding(failing: Sequence[Observed], stages: Sequence[Coarser], together: Sequence[Coarser] = ()) -> Explanation:
    """Returns the explanation that a kernel rounds one of some stages, or several at once.

    Args:
        failing: the problems that this explains.
        stages: the stages that may be rounded, each alone.
        together: the stages that may be rounded at once; at most one such change.
    """
    candidate, dtype = failing[0].case.candidate, failing[0].case.problem.dtype
    named = stages[:_STAGES_NAMED]
    what = [change.rounds for change in named]
    if len(stages) > _STAGES_NAMED:
        what.append(counted(len(stages) - _STAGES_NAMED, "other stage"))
    unsure = ": the numbers do not tell which of these, or whether it rounds several" if len(stages) > 1 else ""
    declared = "; or ".join(change.declared(candidate, dtype) for change in named)
    for change in together:
        declared += f"; or, if it rounds {change.rounds}, as autograd does: {change.declared(candidate, dtype)}"
    cause = Cause(
        name=" or ".join(map(str, named)),
        words=f"the kernel rounds {', or '.join(what)} to {stages[0].to}, but its declared precision does not say so"
        f"{unsure}",
        todo=f"compute {in_a_row(what)} in float32. Or, if it is meant, declare for {dtype} {declared}",
    )
    return Explanation(cause=cause, failing=failing)


def _noise_if_it_agrees(failing: Sequence[Observed], change: Coarser) -> float | None:
    """Returns the noise of wrong outputs with a coarser precision, relative to the declared one.

    Returns:
        The largest ratio, 1 at least. None if the kernel does not agree with the coarser precision,
        or if outputs that are right would then be much noisier.
    """
    noise, right = 1.0, failing[0].got.keys() - scope_of(failing)
    ratios: dict[Output, list[float]] = {output: [] for output in right}
    for observed in failing:
        case = observed.case
        oracle = Oracle(change.of(case.candidate, case.problem.dtype), case.placed, case.result.outputs)
        if not all(comparison.agrees for comparison in case.compare(case.result, oracle.gradients, oracle)):
            return None
        for output in observed.wrong:
            noise = max(noise, _noise(oracle, output) / max(_noise(case.oracle, output), 1e-300))
        for output in right.intersection(case.result.outputs):
            ratios[output].append(_size(observed, oracle, output) / _size(observed, case.oracle, output))
    would_show = any(median(of_output) > _WOULD_SHOW for of_output in ratios.values() if of_output)
    return None if would_show else noise


def _noise(oracle: Oracle, output: Output) -> float:
    return float(oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0).abs().max())


def _size(observed: Observed, oracle: Oracle, output: Output) -> float:
    """Returns the largest error of right kernels, with the rounding of the returned output."""
    largest = float(oracle.reference[output].nan_to_num(0.0, 0.0, 0.0).abs().max())
    dtype = observed.case.result.dtypes[output]
    return max(_noise(oracle, output) + float_format_of(dtype).unit * largest, 1e-300)


def _may_be_rounding(failing: Sequence[Observed], output: Output) -> bool:
    """Returns whether the errors of an output look like rounding: they are small, and some are
    towards 0 and others away from it.
    """
    signs: list[Tensor] = []
    for observed in failing:
        if output not in observed.case.result.outputs:
            return False
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        finite = got.isfinite() & reference.isfinite()
        error = torch.where(finite, got - reference, 0.0).flatten()
        right = torch.where(finite, reference, 0.0).flatten()
        if float(error.norm()) > _UNITS * FLOAT_FORMATS["bfloat16"].unit * float(right.norm()):
            return False
        signs.append((error * right).sign())
    sign = torch.cat(signs)
    sign = sign[sign != 0]
    return len(sign) < _ENTRIES or abs(float(sign.mean())) <= _ALIGNED
