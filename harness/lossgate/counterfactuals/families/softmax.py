# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the softmax of each token, of its label, and of its entropy."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split, tempered
from lossgate.counterfactuals.families.option_values import with_values
from lossgate.counterfactuals.seams import Stage, entropy_of, picked_logit, scaled_gradient, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def softmaxes(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the softmax and of the label."""
    uses = {*spec.uses}
    if head not in ("hidden", "logits") or not uses & {"logprobs", "logsumexp", "mean_logprob", "entropy"}:
        return
    for needed, mistakes in _OF_SOFTMAX.items():
        if uses.issuperset(needed):
            yield from mistakes
    for option in spec.options:
        if "mean_logprob" in uses and isinstance(option.default, float):
            yield mistake(
                f"{option.name} over the other classes",
                f"{option.name} is spread over the V - 1 classes other than the label, V / (V - 1) times too much",
                partial(_is_given, option.name),
                f"give {option.name} / V to each of the V classes, the label included",
                options=partial(_over_others_than_label, option.name),
            )
    if spec.temperature is not None and uses & {"logprobs", "logsumexp"}:
        yield _UNTEMPERED


def entropies(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the entropy of each token."""
    if head in ("hidden", "logits") and "entropy" in spec.uses and "token_entropy" in spec.outputs:
        yield from _OF_ENTROPY


def _is_given(option: str, setting: Setting) -> bool:
    return bool(getattr(setting.bound_spec.options, option))


def _over_others_than_label(option: str, setting: Setting) -> BoundSpec:
    vocab = setting.bound.problem.vocab
    return with_values(setting, {option: getattr(setting.bound_spec.options, option) * vocab / max(vocab - 1, 1)})


def _like_loss(setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(logsumexp=with_gradient_of(values.given["logsumexp"], -values.logprobs))


def largest_logit(z: Tensor) -> Tensor:
    """Returns the largest logit of each token, ``[tokens, 1]``, without a gradient."""
    return z.detach().amax(1, keepdim=True)


def rebuilt(combine: Stage, setting: Setting, z: Tensor) -> Tensor:
    """Returns a wrong logsumexp, with exp(z - logsumexp) as its gradient.

    This is what backward computes if it rebuilds the softmax from the logsumexp of forward.

    Args:
        combine: the stage that computes the wrong logsumexp.
        setting: the problem.
        z: tempered logits ``[tokens, vocab]``.
    """
    value = combine(setting, z).detach()
    shares = (z.detach() - value[:, None]).exp()
    return with_gradient_of(value, (shares * torch.where(z.isfinite(), z, 0.0)).sum(1))


def _overflows(setting: Setting) -> bool:
    return setting.once("overflows", lambda: bool(_without_shift(setting).isinf().any()))


def _without_shift(setting: Setting) -> Tensor:
    """Returns the logsumexp of each token in float32, without subtracting the largest logit."""
    with torch.no_grad():
        logits = setting.head.logits(setting.batch.leaves)
        return _in_float32(setting, setting.bound_spec.capped(logits) / setting.temperature)


def _in_float32(setting: Setting, z: Tensor) -> Tensor:
    return _Unshifted.apply(z)


class _Unshifted(torch.autograd.Function):
    """A logsumexp in float32 that does not subtract the largest logit. Where it overflows, its
    gradient is NaN or 0.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        exponentials = z.float().exp()
        total = exponentials.sum(-1)
        ctx.save_for_backward(z, exponentials, total)
        exact = z.logsumexp(-1)
        return torch.where((total > 0) & total.isfinite(), exact, total.double().log().to(z.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        z, exponentials, total = ctx.saved_tensors
        is_exact = ((total > 0) & total.isfinite())[:, None]
        shares = torch.where(is_exact, z.softmax(-1), (exponentials / total[:, None]).to(z.dtype))
        return shares * upstream[:, None]


def _untempered_softmax(setting: Setting, z: Tensor) -> Tensor:
    softmax = (z * setting.temperature).detach().softmax(-1)
    return with_gradient_of(z.logsumexp(-1), (softmax * torch.where(z.isfinite(), z, 0.0)).sum(-1))


def _centred_by(centre: float, setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    p, finite = logprobs.detach().exp(), torch.where(z.isfinite(), z, 0.0)
    centred = torch.where(p > 0, logprobs.detach() + centre, 0.0)
    return with_gradient_of(entropy_of(logprobs), -(p * centred * finite).sum(-1))


def _entropy_at(power: int, setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    return entropy_of((z * setting.temperature**power).log_softmax(-1))


def _of_shards_in_backward(setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    """Returns the entropy H with the gradient -p (log p + h). Here h is the tp rank's part of H."""
    whole, p = entropy_of(logprobs), logprobs.detach().exp()
    wrong, finite = whole, torch.where(z.isfinite(), z, 0.0)
    for rows in setting.vocab_rows:
        own = entropy_of(logprobs[:, rows])
        wrong = wrong + (whole - own).detach() * (p[:, rows] * finite[:, rows]).sum(1)
    return with_gradient_of(whole, wrong)


_OF_SOFTMAX: Mapping[Collection[str], Sequence[Counterfactual]] = {
    (): (
        mistake(
            "largest logit not subtracted",
            "the largest logit is not subtracted before the exponentials: they overflow above 88.7, and sum to 0 below "
            "-103",
            _overflows,
            "subtract the largest logit, over all tp ranks, before you take exponentials",
            logsumexp=_in_float32,
        ),
        mistake(
            "largest logit not added back",
            "the largest logit is subtracted before the sum of exponentials, but not added back to its logarithm",
            todo="subtract it from the logit of the label, too, or add it to the logarithm",
            logsumexp=lambda s, z: z.logsumexp(-1) - largest_logit(z)[:, 0],
        ),
        mistake(
            "softmax missing in backward",
            "the gradient of the logits lacks the softmax: only the one-hot row of the label is left",
            logsumexp=lambda s, z: z.logsumexp(-1).detach(),
        ),
    ),
    ("logprobs",): (
        mistake(
            "one-hot missing in backward",
            "the gradient of the logits lacks the one-hot row of the label: only the softmax is left",
            picked=lambda s, z: picked_logit(s, z).detach(),
        ),
        mistake(
            "logits in place of log-probabilities",
            "the logit of the label stands in place of its log-probability",
            logsumexp=lambda s, z: torch.zeros_like(z[:, 0]),
        ),
        mistake(
            "largest logit subtracted from the label's alone",
            "the largest logit is subtracted from the logit of the label, but not from the logsumexp",
            picked=lambda s, z: picked_logit(s, z) - largest_logit(z)[:, 0],
        ),
    ),
    ("logprobs", "logsumexp"): (
        mistake(
            "one-hot in the gradient of logsumexp",
            "in backward, the weight of logsumexp in the loss multiplies the softmax minus the one-hot row, not the "
            "softmax alone",
            todo="add this weight to the factor of the softmax, and leave the one-hot entry as it is",
            values=_like_loss,
        ),
    ),
    ("logsumexp",): (
        mistake(
            "logsumexp without the largest logit",
            "the logsumexp lacks the largest logit, which is subtracted from the logits and not added back",
            todo="add the largest logit back after the logarithm",
            logsumexp=lambda s, z: z.logsumexp(-1) - largest_logit(z)[:, 0],
            picked=lambda s, z: picked_logit(s, z) - largest_logit(z)[:, 0],
            mean=lambda s, z: z.mean(-1) - largest_logit(z)[:, 0],
        ),
    ),
}
"""The mistakes of the softmax, by the values per token that a loss must use for them."""
_UNTEMPERED = mistake(
    "softmax of untempered logits in backward",
    "backward takes the softmax of logits that are not divided by the temperature",
    tempered,
    logsumexp=_untempered_softmax,
)
_OF_ENTROPY = (
    mistake("entropy detached", "the entropy has no gradient", entropy=lambda s, z, lp: entropy_of(lp).detach()),
    mistake(
        "entropy with the other sign in backward",
        "the gradient of the entropy has the other sign",
        entropy=lambda s, z, lp: scaled_gradient(entropy_of(lp), -1.0),
    ),
    *(
        mistake(what, f"the entropy is that of logits that are {words}", tempered, entropy=partial(_entropy_at, power))
        for what, words, power in (
            ("entropy without the temperature", "not divided by the temperature", 1),
            ("entropy with the temperature twice", "divided by the temperature twice", -1),
        )
    ),
    *(
        mistake(
            f"entropy centred by {instead} in backward",
            f"the gradient of the entropy is -p (log p + {words}), not -p (log p + H)",
            entropy=partial(_centred_by, centre),
        )
        for centre, instead, words in ((0.0, "nothing", "0"), (1.0, "1", "1"))
    ),
    mistake(
        "entropy of each shard in backward",
        "the gradient of the entropy takes each tp rank's own part of the entropy, not the whole",
        split("tp"),
        "sum the entropy over tp before you keep it for backward",
        entropy=_of_shards_in_backward,
    ),
)
