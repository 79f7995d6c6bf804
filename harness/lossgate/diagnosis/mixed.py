# SPDX-License-Identifier: Apache-2.0
"""Another loss that is mixed into the loss, with weights that nobody knew beforehand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Loss, Outputs, entropy_of
from lossgate.counterfactuals.setting import Fields
from lossgate.diagnosis.observed import Observed
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.token_values import TokenValues

_DIGITS = (2, 3)
"""Significant digits to which the weights may be round."""
_SINGULAR = 1e-6
"""Two losses are too alike to weigh if the square of the cosine between them is closer to 1."""
_LEAST = 1e-4
"""The smallest weight that is not the rounding of 0."""
_UNLIKE = 0.5
"""The largest share of a disagreement that two weights may leave; above it they are not tried."""

OfToken = Callable[[BoundSpec, TokenValues, Fields], Tensor]


def mixed_in(failing: Observed) -> list[Counterfactual]:
    """Returns the losses whose mixture with the right one may be what a kernel returned.

    Whether the weights are the same in other problems is for them to say.
    """
    spec, head = failing.setting.spec, failing.setting.head
    if spec.reference is None or not (head.has_logits or head.name == "logprobs"):
        return []
    found = [one for what, other in _others(failing).items() for one in _mixtures(failing, what, other)]
    return list({one.name: one for one in found}.values())


def _others(failing: Observed) -> Mapping[str, Loss]:
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
    alone = mistake(what, what, "term", loss=other)
    predicted = failing.predicted(alone)
    weights = _weights(failing, predicted)
    if weights is None:
        return
    for digits in _DIGITS:
        own, more = (float(f"{weight:.{digits}g}") for weight in weights)
        if abs(own) < _LEAST or abs(more) < _LEAST:
            continue
        said = f"{more:g} times {what} is added to the loss"
        yield mistake(
            f"{own:g} of the loss and {more:g} of {what}",
            said if own == 1.0 else f"{said}, which itself is multiplied by {own:g}",
            "term",
            loss=partial(_mixture, own, more, other),
        )


def _weights(failing: Observed, other: Outputs) -> Sequence[float] | None:
    """Returns the weights of the right loss and of another that come nearest to what was returned,
    by the gradients and the loss; None if nothing does.
    """
    reference, wrong = failing.case.oracle.reference, [o for o in failing.wrong if o.kind != "metric"]
    if not wrong or any(o not in other or not bool(failing.got[o].isfinite().all()) for o in wrong):
        return None
    size = {o: float(reference[o].norm()) or 1.0 for o in wrong}
    right, more, got = (
        torch.cat([x[o].double().flatten() / size[o] for o in wrong]) for x in (reference, other, failing.got)
    )
    if not bool(right.isfinite().all() & more.isfinite().all()):
        return None
    together, norms = float(right @ more) ** 2, float(right @ right) * float(more @ more)
    if not norms or together > (1 - _SINGULAR) * norms:
        return None
    both = torch.stack([right, more], 1)
    weights = torch.linalg.lstsq(both, got[:, None], driver="gelsd").solution[:, 0]
    left = float((both @ weights - got).norm())
    return None if left > _UNLIKE * float((got - right).norm()) else weights.tolist()


Reduced = tuple[Tensor, dict[str, Tensor]]


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
