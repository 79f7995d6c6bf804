# SPDX-License-Identifier: Apache-2.0
"""Says where outputs are wrong if no known mistake explains them: at which tokens or rows, and what
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
"""The plural noun for the rows of a dim."""
_NEARLY_ALL = 0.9
"""If a larger share of the rows is wrong, no trait is named."""
_SEEN = 0.01
"""A factor that is closer to 1 is not named."""
_TELLS = 0.7
"""A trait is not named if a larger share of the other rows has it, too."""
_OFF = 8.0
"""A row is wrong if its error is more than so many times its noise. This limit only tells where a
disagreement lies. The judge tells whether there is one."""
_FLOOR = 1e-6
"""The error that a row without noise may have, relative to the largest entry of the output."""


@dataclass(frozen=True)
class RowKinds:
    """Two kinds of rows of an output in several problems, and traits that may tell them apart."""

    these: Sequence[Tensor]
    """``[rows]`` bool, a tensor for each problem."""
    others: Sequence[Tensor]
    traits: Sequence[Mapping[str, Tensor]]

    def common(self) -> str | None:
        """Returns the plainest trait that all of these rows have and none of the others; None if
        there is no such trait.
        """
        return next((name for name in self._shared() if self._having(name, self.others) == 0), None)

    def best(self) -> tuple[str, int] | None:
        """Returns the trait that all of these rows and the fewest others have, and how many others.
        None if most of the others have it.
        """
        total = count_rows(self.others)
        counts = {name: self._having(name, self.others) for name in self._shared()}
        telling = {name: count for name, count in counts.items() if count < _TELLS * total}
        return min(telling.items(), key=lambda item: item[1], default=None)

    def _shared(self) -> Iterator[str]:
        """Yields the traits that all of these rows have, in every problem."""
        for name in self.traits[0] if self.traits else ():
            is_known = all(name in traits for traits in self.traits)
            if is_known and self._having(name, self.these) == count_rows(self.these):
                yield name

    def _having(self, name: str, rows: Sequence[Tensor]) -> int:
        return sum(int((own & traits[name]).sum()) for own, traits in zip(rows, self.traits, strict=True))


def where(failing: Iterable[Observed]) -> tuple[str, ...]:
    """Returns sentences that say which rows of each wrong output are wrong and what they have in
    common. There is none for an output without rows.

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
    bad, good = count_rows(wrong), count_rows(right)
    if not bad:
        return
    what, factor = f"{words_of(output)} is wrong at", _common_factor(output, own, wrong)
    if bad >= _NEARLY_ALL * (bad + good):
        yield f"{what} {'all' if not good else 'nearly all'} {noun}{factor}"
        return
    common = f"{what} {bad} of {bad + good} {noun}"
    traits = [traits_of(one.setting, output.dims[0]) for one in own]
    from_all, from_visible = RowKinds(wrong, [~rows for rows in wrong], traits), RowKinds(wrong, right, traits)
    if (trait := from_all.common() or from_visible.common()) is not None:
        yield f"{what} {noun} {trait}, {bad} of {bad + good}, and at no others{factor}"
    elif (best := from_visible.best()) is not None:
        trait, spared = best
        yield f"{common}, only at {noun} {trait}, of which {spared} are right{factor}"
    elif (of_right := RowKinds(right, wrong, traits).best()) is not None:
        yield f"{common}; those that are right are {noun} {of_right[0]}{factor}"
    else:
        yield f"{common}, and no known trait tells these from the others{factor}"


def _common_factor(output: Output, seen: Sequence[Observed], wrong: Sequence[Tensor]) -> str:
    """Returns the words for the factor of wrong rows; "" unless it is nearly the same for all."""
    factors: list[Tensor] = []
    for one, is_wrong in zip(seen, wrong, strict=True):
        got, reference = (_as_matrix(x[output][is_wrong]) for x in (one.got, one.case.oracle.reference))
        size = reference.square().sum(1)
        if not got.isfinite().all() or bool((size == 0).any()):
            return ""
        factor = (got * reference).sum(1) / size
        left = (got - factor[:, None] * reference).square().sum(1)
        if bool((left > 1e-4 * got.square().sum(1)).any()):
            return ""  # a row is not a multiple of the reference
        factors.append(factor)
    each = torch.cat(factors)
    if len(each) and float(each.max() - each.min()) <= 1e-2 * float(each.abs().max()):
        mean = float(each.mean())
        return "" if abs(mean - 1) < _SEEN else f", each {mean:.3g} times the reference"
    if len(each) and bool((each < 0).all()):
        return ", with the opposite sign"
    return ""


def _as_matrix(rows: Tensor) -> Tensor:
    return rows.flatten(1) if rows.dim() > 1 else rows[:, None]


def words_of(output: Output) -> str:
    """Names an output in a sentence."""
    return f"the gradient of {output.name}" if output.kind == "gradient" else output.name


def words_of_several(outputs: Collection[Output]) -> str:
    """Names some outputs in a sentence."""
    return in_a_row(sorted(map(words_of, outputs)))


def count_rows(rows: Iterable[Tensor]) -> int:
    """Returns the number of rows that are true, over several problems."""
    return sum(int(of_problem.sum()) for of_problem in rows)


def wrong_rows(observed: Observed, output: Output, other: Tensor | None = None) -> Tensor:
    """Returns the rows of an output that differ from what they should be, ``[rows]`` bool.

    Args:
        observed: what the kernel returned.
        output: an output with dims. Rows are those of its first dim.
        other: what the output should be; by default the reference.
    """
    case, got = observed.case, observed.got[output]
    reference = case.oracle.reference[output]
    expected = reference if other is None else other
    difference = torch.where(got == expected, 0.0, got - expected).nan_to_num(nan=torch.inf)
    unit = float_format_of(case.result.dtypes.get(output, torch.float32)).unit
    deviations = case.oracle.deviations[output].nan_to_num(0.0, 0.0, 0.0)
    largest, of_reference = _largest(expected), _largest(reference)
    # These are deviations of the reference. They are taken to grow with the entries.
    growth = (largest / of_reference.clamp(min=1e-300)).clamp(min=1.0, max=1e3)
    noise = _largest(deviations.transpose(0, 1)) * growth
    floor = _FLOOR * float(of_reference.max()) if len(of_reference) else 0.0
    wrong = _largest(difference) > _OFF * (noise + unit * largest) + floor
    compared = case.oracle.compared(output)
    return wrong if compared is None else wrong & compared


def visible_rows(observed: Observed, output: Output) -> Tensor:
    """Returns the rows of the reference that are not 0, ``[rows]`` bool."""
    return _largest(observed.case.oracle.reference[output]) > 0


def _largest(x: Tensor) -> Tensor:
    """Returns the size of the largest finite entry of each row."""
    return _as_matrix(x.abs().nan_to_num(0.0, 0.0, 0.0)).amax(1)
