# SPDX-License-Identifier: Apache-2.0
"""Mistakes with a number that is fitted to what a kernel returned.

It is a factor or the weight of another loss, which must be the same in every problem. Or it is a
whole number that differs between problems, such as the number of chunks of an undeclared size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.factors import fixed, scaled_outputs
from lossgate.counterfactuals.seams import Loss, Outputs, Reduced, entropy_of
from lossgate.counterfactuals.setting import Fields
from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.explanation import Explanation
from lossgate.diagnosis.observed import Observed, scope_of
from lossgate.diagnosis.where import words_of_several
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.outputs import Output
from lossgate.specs.token_values import TokenValues

_DIGITS = (2, 3, 4)
"""The numbers of significant digits to which a factor is rounded."""
_WHOLE = 1e-5
"""The largest distance of a divisor to a whole number, relative to the number."""
_LARGEST, _SCALE = 100, 2**20
"""The largest divisor that is looked for, and the largest that is a power of 2. There are limits
because any small factor is nearly 1 / n for some large n."""

_DIGITS_OF_WEIGHTS = (2, 3)
"""The numbers of significant digits to which weights are rounded."""
_SINGULAR = 1e-6
"""Two losses are too alike for weights if the square of their cosine is closer to 1 than this."""
_LEAST = 1e-4
"""The smallest weight. Smaller ones are taken for rounding of 0."""
_UNLIKE = 0.5
"""The largest share of a disagreement that two weights may leave unexplained. Otherwise they are
not tried."""
_MOST_PARTS = 64
"""The largest whole number that is taken for a number of parts."""


def fitted_factors(failing: Observed) -> list[Counterfactual]:
    """Returns the factors by which the wrong outputs of a problem are too large.

    Whether a factor is the same in other problems is not known yet.
    """
    return list({factor.name: factor for factor in _factors(failing)}.values())


def _factors(observed: Observed) -> Iterator[Counterfactual]:
    for output in sorted(observed.wrong, key=str):
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        finite = got.isfinite() & reference.isfinite()
        got, reference = got[finite], reference[finite]
        size = float(reference.square().sum())
        if size == 0:
            continue
        factor = float((got * reference).sum()) / size
        if (divisor := _divisor(factor)) is not None:
            yield mistake(
                f"outputs divided by {divisor}",
                f"{{outputs}}: divided by {divisor}",
                outputs=partial(scaled_outputs, partial(fixed, 1 / divisor)),
            )
            continue
        for digits in _DIGITS:
            rounded = float(f"{factor:.{digits}g}")
            if rounded not in (0.0, 1.0, -1.0, 2.0, 0.5):  # the bank has these, or they change nothing
                yield mistake(
                    f"outputs times {rounded}",
                    f"{{outputs}}: multiplied by {rounded:g}",
                    outputs=partial(scaled_outputs, partial(fixed, rounded)),
                )


def _divisor(factor: float) -> int | None:
    """Returns the whole number, 3 at least, by which a factor divides; None if there is none."""
    if not 1 / (2 * _SCALE) < factor < 0.4:
        return None
    divisor = round(1 / factor)
    is_likely = divisor <= _LARGEST or (divisor <= _SCALE and divisor & (divisor - 1) == 0)
    return divisor if is_likely and abs(1 / factor - divisor) < _WHOLE * divisor else None


OfToken = Callable[[BoundSpec, TokenValues, Fields], Tensor]


def mixed_in(failing: Observed) -> list[Counterfactual]:
    """Returns the mixtures of the right loss with another that may be what a kernel returned.

    Whether the weights are the same in other problems is not known yet.
    """
    spec, head = failing.setting.spec, failing.setting.head
    if spec.reference is None or not (head.has_logits or head.name == "logprobs"):
        return []
    found: dict[str, Counterfactual] = {}
    for what, other in _others(failing).items():
        found |= {mixture.name: mixture for mixture in _mixtures(failing, what, other)}
    return list(found.values())


def _others(failing: Observed) -> Mapping[str, Loss]:
    """Returns the other losses that may be mixed in, in words."""
    spec, found = failing.setting.spec, dict[str, Loss]()
    uses = {*spec.uses} if failing.setting.head.has_logits else {*spec.uses} - {"logits", "entropy", "logsumexp"}
    if spec.trained_dim != "token" or (spec.gathered_ids is not None and "logprobs" in uses):
        return {}
    if uses & {"logprobs", "logits"}:
        found["the mean negative log-likelihood of the labels"] = partial(_mean, _nll)
    if "logits" in uses and spec.temperature is not None:
        found["the mean negative log-likelihood of the labels by untempered logits"] = partial(_mean, _untempered_nll)
    if uses & {"entropy", "logits"}:
        found["the mean entropy"] = partial(_mean, _entropy)
    if uses & {"logsumexp", "logits"}:
        found["the mean square of the logsumexp"] = partial(_mean, _z_loss)
    return found


def _mixtures(failing: Observed, what: str, other: Loss) -> Iterator[Counterfactual]:
    alone = mistake(what, what, loss=other)
    predicted = failing.predicted(alone)
    weights = _weights(failing, predicted)
    if weights is None:
        return
    for digits in _DIGITS_OF_WEIGHTS:
        own, more = (float(f"{weight:.{digits}g}") for weight in weights)
        if abs(own) < _LEAST or abs(more) < _LEAST:
            continue
        added = f"{more:g} times {what} is added to the loss"
        yield mistake(
            f"{own:g} of the loss and {more:g} of {what}",
            added if own == 1.0 else f"{added}, which is first multiplied by {own:g}",
            loss=partial(_mixture, own, more, other),
        )


def _weights(failing: Observed, other: Outputs) -> Sequence[float] | None:
    """Returns the weights of the right loss and of another one whose sum is nearest to what was
    returned, in the loss and in gradients. None if no weights come near it.
    """
    reference, wrong = failing.case.oracle.reference, [o for o in failing.wrong if o.kind != "metric"]
    if not wrong or any(o not in other or not bool(failing.got[o].isfinite().all()) for o in wrong):
        return None
    size = {o: float(reference[o].norm()) or 1.0 for o in wrong}

    def as_vector(outputs: Mapping[Output, Tensor]) -> Tensor:
        return torch.cat([outputs[o].double().flatten() / size[o] for o in wrong])

    right, more, got = as_vector(reference), as_vector(other), as_vector(failing.got)
    if not bool(right.isfinite().all() & more.isfinite().all()):
        return None
    norms = float(right @ right) * float(more @ more)
    if not norms or float(right @ more) ** 2 > (1 - _SINGULAR) * norms:
        return None
    both = torch.stack([right, more], 1)
    weights = torch.linalg.lstsq(both, got[:, None], driver="gelsd").solution[:, 0]
    left = float((both @ weights - got).norm())
    return None if left > _UNLIKE * float((got - right).norm()) else weights.tolist()


def _mixture(own: float, more: float, other: Loss, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    loss, metrics = bound.loss(values, fields)
    return own * loss + more * other(bound, values, fields)[0], metrics


def _mean(of_token: OfToken, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    trained = bound.spec.trained_of(fields)
    each = torch.where(trained, of_token(bound, values, fields), 0.0)
    return each.sum() / fields["valid_tokens"].clamp(min=1), {}


def _nll(bound: BoundSpec, values: TokenValues, fields: Fields) -> Tensor:
    return -values.logprobs if "logprobs" in values.given else _nll_of(values.logits, fields)


def _untempered_nll(bound: BoundSpec, values: TokenValues, fields: Fields) -> Tensor:
    return _nll_of(values.logits * bound.temperature, fields)


def _nll_of(logits: Tensor, fields: Fields) -> Tensor:
    return -logits.log_softmax(1).gather(1, fields["labels"][:, None])[:, 0]


def _entropy(bound: BoundSpec, values: TokenValues, fields: Fields) -> Tensor:
    return values.entropy if "entropy" in values.given else entropy_of(values.logits.log_softmax(1))


def _z_loss(bound: BoundSpec, values: TokenValues, fields: Fields) -> Tensor:
    return (values.logsumexp if "logsumexp" in values.given else values.logits.logsumexp(1)) ** 2


def whole_number(failing: Sequence[Observed]) -> list[Explanation]:
    """Returns the explanation that all wrong outputs are multiplied or divided by a whole number.

    The number must differ between problems, also of the same layout. Otherwise nothing is returned.

    Args:
        failing: what the kernel returned on problems where it is wrong.
    """
    outputs = words_of_several(scope_of(failing))
    for divided, words, todo in (
        (False, "multiplied", "divide the sum of all parts by their number, once"),
        (True, "divided", "leave the sum of all parts as it is: the parts are divided already"),
    ):
        numbers = [_number(observed, divided=divided) for observed in failing]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers) and len({*known}) > 1 and not _by_layout(failing, known):
            cause = Cause(
                name=f"{words} by a whole number",
                words=f"{outputs}: {words} by a whole number that differs between problems, from {min(known)} to "
                f"{max(known)}, such as the number of chunks or micro-batches",
                todo=todo,
            )
            return [Explanation(cause=cause, failing=failing)]
    return []


def _by_layout(failing: Sequence[Observed], numbers: Sequence[int]) -> bool:
    """Returns whether each layout has its own number, which then counts ranks, not parts."""
    layouts = [observed.case.problem.layout for observed in failing]
    return len({*layouts}) > 1 and len({*zip(layouts, numbers, strict=True)}) == len({*layouts})


def _number(observed: Observed, *, divided: bool) -> int | None:
    """Returns the number by which every wrong output is multiplied or divided; None if there is no
    such number.
    """
    found: set[int] = set()
    for output in observed.wrong:
        got, reference = observed.got[output], observed.case.oracle.reference[output]
        if not bool(reference.isfinite().all() & got.isfinite().all()):
            return None
        smaller, larger = (got, reference) if divided else (reference, got)
        smaller, larger = smaller.flatten().double(), larger.flatten().double()
        squares = float(smaller @ smaller)
        # The number that brings `smaller` nearest to `larger`, by least squares.
        number = round(float(smaller @ larger) / squares) if squares else 0
        if not 2 <= number <= _MOST_PARTS:
            return None
        dtype = observed.case.result.dtypes.get(output, got.dtype)
        exact = reference / number if divided else reference * number
        if not observed.case.oracle.would_agree(output, got, dtype, exact):
            return None
        found.add(number)
    return found.pop() if len(found) == 1 else None
