# SPDX-License-Identifier: Apache-2.0
"""Asks whether a kernel rounds more than it declares: would it agree with one stage of its
``Precision`` coarser?
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from lossgate.cases.oracle import Oracle
from lossgate.declaration.candidate import Candidate
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.observed import Observed
from lossgate.numerics.float_formats import FLOAT_FORMATS
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
_UNITS = 8.0
"""So many units of roundoff is the most that an output may be off as a whole, relative to its
size."""
_ALIGNED = 0.5
"""The largest mean sign of errors of rounding, relative to the reference. A factor has 1."""
_STAGES_NAMED = 5
"""The most stages that are named: more say little."""
_ENTRIES = 16
"""The fewest entries of an output of which this is asked."""


def coarser(failing: Sequence[Observed]) -> Cause | None:
    """Returns a cause that names the stages of which one, if coarser, explains what a kernel
    returned: the numbers do not tell which it is. None if there are none, or too many.

    Args:
        failing: what the kernel returned on problems where it is wrong.
    """
    dtype = failing[0].case.problem.dtype
    found: dict[str, list[tuple[float, str, str]]] = {}
    for changes, words, to in _changes(failing[0].case.candidate, dtype):
        noise = _noise_if_it_agrees(failing, dtype, changes)
        if noise is not None:
            declared = ", ".join(f"{name}={value!r}" for name, value in changes.items())
            found.setdefault(to, []).append((noise, words, f"Precision({declared})"))
    if not found:
        return None
    to, stages = min(found.items(), key=lambda one: min(one[1]))
    stages.sort()
    if len(stages) > _STAGES_NAMED:
        return None
    several = ": the numbers do not tell which" if len(stages) > 1 else ""
    return Cause(
        name=" or ".join(declared for _, _, declared in stages),
        words=f"the kernel rounds {', or '.join(words for _, words, _ in stages)} to {to}, "
        f"which its declared precision does not say{several}",
        todo=f"compute it in float32, or declare {' or '.join(declared for _, _, declared in stages)} if that is meant",
    )


def _changes(candidate: Candidate, dtype: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields changes to a precision that make one stage coarser, what it rounds, and to what."""
    own = candidate.precision[dtype]
    for name in (dtype if dtype == "float16" else "bfloat16",):
        for stage, words in _STAGES.items():
            given = own.loss if stage == "returned" else getattr(own, stage)
            if own.returned is not None and stage == "returned":
                continue
            if FLOAT_FORMATS[given].unit < FLOAT_FORMATS[name].unit:
                size = {"accumulate": "chunk", "accumulate_hidden": "vocab_chunk"}.get(stage)
                tiles = candidate.tiles.get({"chunk": "token", "vocab_chunk": "vocab"}.get(size or "", ""), ())
                steps = {size: tiles[0]} if size is not None and getattr(own, size) is None and tiles else {}
                yield {stage: name, **steps}, words, name
    if own.products != "tf32":
        yield {"products": "tf32"}, "the factors of products", "TF32"
    if not own.grads_in_forward and dtype != "float32":
        yield {"grads_in_forward": True}, "gradients in forward, and again in backward,", dtype


def _noise_if_it_agrees(failing: Sequence[Observed], dtype: str, changes: Mapping[str, Any]) -> float | None:
    """Returns how noisy kernels with a coarser stage are in what is wrong, relative to those that
    are declared; None if the kernel does not agree with them.
    """
    noise = 1.0
    for observed in failing:
        case = observed.case
        candidate = case.candidate
        precision = {**candidate.precision, dtype: replace(candidate.precision[dtype], **changes)}
        changed = replace(candidate, precision=MappingProxyType(precision))
        oracle = Oracle(changed, case.placed, case.result.outputs)
        if not all(_may_be_rounding(observed, output) for output in observed.wrong):
            return None
        if not all(one.agrees for one in case.compare(case.result, oracle.gradients, oracle)):
            return None
        noise = max(noise, *(_size(oracle, o) / max(_size(case.oracle, o), 1e-300) for o in observed.wrong))
    return noise


def _size(oracle: Oracle, output: Output) -> float:
    return float(oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0).abs().max())


def _may_be_rounding(observed: Observed, output: Output) -> bool:
    """Returns whether an error is as small as one of rounding, and points anywhere."""
    if output not in observed.case.result.outputs:
        return False
    got, reference = observed.got[output], observed.case.oracle.reference[output]
    finite = got.isfinite() & reference.isfinite()
    off, right = torch.where(finite, got - reference, 0.0).flatten(), torch.where(finite, reference, 0.0).flatten()
    size = float(right.norm())
    if float(off.norm()) > _UNITS * FLOAT_FORMATS["bfloat16"].unit * size:
        return False
    signs = (off * right).sign()
    signs = signs[signs != 0]
    return len(signs) < _ENTRIES or abs(float(signs.mean())) <= _ALIGNED
