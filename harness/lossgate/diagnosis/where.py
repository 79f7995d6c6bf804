# SPDX-License-Identifier: Apache-2.0
"""Says where an output is wrong, if nothing that is known explains it: at which tokens, and what
these have in common.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.base.spelling import in_a_row
from lossgate.diagnosis.observed import Observed
from lossgate.diagnosis.traits import traits_of
from lossgate.numerics.float_formats import float_format_of
from lossgate.specs.outputs import Output

NOUNS: Mapping[str, str] = {"token": "tokens", "vocab": "rows of the vocabulary", "sequence": "sequences"}
"""What the rows of a dim are called."""
_NEARLY_ALL = 0.9
"""RowKinds that are wrong on so large a share are said to be wrong as a whole."""
_SEEN = 0.01
"""A factor that is nearer to 1 says nothing."""
_TELLS = 0.7
"""What is shared by more rows than this share tells little of them."""
_OFF = 8.0
"""So many times its noise off, a row is wrong. This tells where a disagreement lies, not whether
there is one."""
_FLOOR = 1e-6
"""The noise of a row that has none, relative to the largest entry of the output."""


@dataclass(frozen=True)
class RowKinds:
    """Two kinds of rows of an output in several problems, and what there is to tell them apart."""

    these: Sequence[Tensor]
    """``[rows]`` bool, a tensor for each problem."""
    others: Sequence[Tensor]
    traits: Sequence[Mapping[str, Tensor]]

    def common(self) -> str | None:
        """Returns the plainest trait that all of these have and none of the others; None if there
        is none.
        """
        return next((name for name in self._shared() if self._having(name, self.others) == 0), None)

    def best(self) -> tuple[str, int] | None:
        """Returns a trait that all of these have, and how few of the others; None if none tells."""
        total = _count(self.others)
        counts = {name: self._having(name, self.others) for name in self._shared()}
        telling = {name: count for name, count in counts.items() if count < _TELLS * total}
        name = min(telling, key=telling.__getitem__, default=None)
        return None if name is None else (name, telling[name])

    def _shared(self) -> Iterator[str]:
        for name in self.traits[0] if self.traits else ():
            if all(name in traits for traits in self.traits) and self._having(name, self.these) == _count(self.these):
                yield name

    def _having(self, name: str, rows: Sequence[Tensor]) -> int:
        return sum(int((own & traits[name]).sum()) for own, traits in zip(rows, self.traits, strict=True))


def where(failing: Iterable[Observed]) -> tuple[str, ...]:
    """Returns, in sentences, which rows of each wrong output are wrong and what they have in
    common. Nothing is said of outputs without rows.

    Args:
        failing: what a kernel returned on problems where it is wrong.
    """
    seen = list(failing)
    outputs = sorted({output for one in seen for output in one.wrong if output.dims}, key=str)
    return tuple(sentence for output in outputs for sentence in _of_output(output, seen))


def _of_output(output: Output, seen: Sequence[Observed]) -> Iterator[str]:
    own = [one for one in seen if output in one.wrong and output in one.case.result.outputs]
    noun = NOUNS.get(output.dims[0], "rows")
    wrong = [wrong_rows(one, output) for one in own]
    right = [visible_rows(one, output) & ~rows for one, rows in zip(own, wrong, strict=True)]
    bad, good = _count(wrong), _count(right)
    if not bad:
        return
    what = f"{words_of(output)} is wrong at"
    if bad >= _NEARLY_ALL * (bad + good):
        yield f"{what} {'all' if not good else 'nearly all'} {noun}{_ratio(output, own, wrong)}"
        return
    common = f"{what} {bad} of {bad + good} {noun}"
    traits = [traits_of(one.setting, output.dims[0]) for one in own]
    rows, others = RowKinds(wrong, right, traits), RowKinds(wrong, [~rows for rows in wrong], traits)
    if (trait := others.common() or rows.common()) is not None:
        yield f"{what} {noun} {trait}, {bad} of {bad + good}, and at no others{_ratio(output, own, wrong)}"
    elif (best := rows.best()) is not None:
        trait, spared = best
        yield f"{common}, only at {noun} {trait}, of which {spared} are right{_ratio(output, own, wrong)}"
    elif (inverse := RowKinds(right, wrong, traits).best()) is not None:
        trait, spared = inverse
        yield f"{common}; those that are right are {noun} {trait}{_ratio(output, own, wrong)}"
    else:
        yield f"{common}, and nothing tells these from the others{_ratio(output, own, wrong)}"


def _ratio(output: Output, seen: Sequence[Observed], wrong: Sequence[Tensor]) -> str:
    """Returns in words by what factor wrong rows are off, if it is about one for all."""
    factors: list[Tensor] = []
    for one, rows in zip(seen, wrong, strict=True):
        got, reference = (x[output][rows].flatten(1) if x[output].dim() > 1 else x[output][rows, None]
                          for x in (one.got, one.case.oracle.reference))  # fmt: skip
        size, alike = reference.square().sum(1), (got * reference).sum(1)
        if not got.isfinite().all() or bool((size == 0).any()):
            return ""
        factors.append(alike / size)
        off = (got - factors[-1][:, None] * reference).square().sum(1)
        if bool((off > 1e-4 * got.square().sum(1)).any()):
            return ""
    each = torch.cat(factors)
    if len(each) and float(each.max() - each.min()) <= 1e-2 * float(each.abs().max()):
        factor = float(each.mean())
        return "" if abs(factor - 1) < _SEEN else f", each {factor:.3g} times the reference"
    if len(each) and bool((each < 0).all()):
        return ", with the opposite sign"
    return ""


def words_of(output: Output) -> str:
    """Names an output in a sentence."""
    return f"the gradient of {output.name}" if output.kind == "gradient" else output.name


def words_of_several(outputs: Collection[Output]) -> str:
    """Names some outputs in a sentence."""
    return in_a_row(sorted(map(words_of, outputs)))


def _count(rows: Iterable[Tensor]) -> int:
    return sum(int(one.sum()) for one in rows)


def wrong_rows(observed: Observed, output: Output, other: Tensor | None = None) -> Tensor:
    """Returns which rows of an output differ from what they should be, ``[rows]`` bool.

    Args:
        observed: what the kernel returned.
        output: one with dims; rows are those of its first.
        other: what it should be; by default the reference.
    """
    case, got = observed.case, observed.got[output]
    reference = case.oracle.reference[output]
    expected = reference if other is None else other
    difference = torch.where(got == expected, 0.0, got - expected).nan_to_num(nan=torch.inf)
    unit = float_format_of(case.result.dtypes.get(output, torch.float32)).unit
    runs = case.oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0)
    largest, was = _largest(expected), _largest(reference)
    noise = _largest(runs.transpose(0, 1)) * (largest / was.clamp(min=1e-300)).clamp(min=1.0, max=1e3)
    floor = _FLOOR * float(was.max()) if len(was) else 0.0
    wrong = _largest(difference) > _OFF * (noise + unit * largest) + floor
    compared = case.oracle.compared(output)
    return wrong if compared is None else wrong & compared


def visible_rows(observed: Observed, output: Output) -> Tensor:
    """Returns which rows of the reference are not 0, ``[rows]`` bool."""
    return _largest(observed.case.oracle.reference[output]) > 0


def _largest(x: Tensor) -> Tensor:
    return x.abs().nan_to_num(0.0, 0.0, 0.0).flatten(1).amax(1) if x.dim() > 1 else x.abs().nan_to_num(0.0, 0.0, 0.0)
