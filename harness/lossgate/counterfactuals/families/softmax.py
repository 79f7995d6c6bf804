# SPDX-License-Identifier: Apache-2.0
"""The softmax of each token, its label and its entropy: forward and backward."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split, tempered
from lossgate.counterfactuals.families.option_choices import with_values
from lossgate.counterfactuals.seams import RIGHT_STAGES, Stage, entropy_of, scaled_gradient, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def softmaxes(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of softmax and label."""
    uses = {*spec.uses}
    if head not in ("hidden", "logits") or not uses & {"logprobs", "logsumexp", "mean_logprob", "entropy"}:
        return
    yield from (one for needed, mistakes in _OF_SOFTMAX.items() if uses.issuperset(needed) for one in mistakes)
    for option in spec.options if "mean_logprob" in uses else ():
        if isinstance(option.default, float):
            yield mistake(
                f"{option.name} over the other classes",
                f"{option.name} is spread over the classes other than the label: V / (V - 1) times too much",
                partial(_is_given, option.name),
                f"give each of the V classes {option.name} / V, the label too",
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


def picked_logit(setting: Setting, z: Tensor) -> Tensor:
    """Returns the logit of each label, ``[tokens]``."""
    return z.gather(-1, setting.fields["labels"][:, None]).squeeze(-1)


def largest_logit(z: Tensor) -> Tensor:
    """Returns the largest logit of each token, ``[tokens, 1]``, without a gradient."""
    return z.detach().amax(1, keepdim=True)


def rebuilt(combine: Stage, setting: Setting, z: Tensor) -> Tensor:
    """Gives backward exp(z - logsumexp), which adds up to 1 only if the logsumexp is right."""
    value = combine(setting, z).detach()
    shares = (z.detach() - value[:, None]).exp()
    return with_gradient_of(value, (shares * torch.where(z.isfinite(), z, 0.0)).sum(1))


def _overflows(setting: Setting) -> bool:
    return setting.once("overflows", lambda: bool(_without_shift(setting).isinf().any()))


def _without_shift(setting: Setting) -> Tensor:
    """Returns the logarithm of a float32 sum of exponentials of the tempered logits."""
    with torch.no_grad():
        logits = setting.head.logits(setting.batch.leaves)
        return _in_float32(setting, setting.bound_spec.capped(logits) / setting.temperature)


def _in_float32(setting: Setting, z: Tensor) -> Tensor:
    return _Unshifted.apply(z)


class _Unshifted(torch.autograd.Function):
    """A logsumexp in float32 without a shift: what it overflows to has a gradient of NaN or 0."""

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
        sure = ((total > 0) & total.isfinite())[:, None]
        shares = torch.where(sure, z.softmax(-1), (exponentials / total[:, None]).to(z.dtype))
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
    """Gives a logit -p (log p + H of its own rows) in backward, where H should be the whole."""
    whole, p = entropy_of(logprobs), logprobs.detach().exp()
    also, finite = whole, torch.where(z.isfinite(), z, 0.0)
    for rows in setting.vocab_rows:
        own = entropy_of(logprobs[:, rows])
        also = also + (whole - own).detach() * (p[:, rows] * finite[:, rows]).sum(1)
    return with_gradient_of(whole, also)


_OF_SOFTMAX: Mapping[Collection[str], Sequence[Counterfactual]] = {
    (): (
        mistake(
            "largest logit not subtracted",
            "exponentials are taken of the logits as they are: they overflow above 88.7, and sum to 0 below -103",
            _overflows,
            "subtract the largest logit, over all tp ranks, before you take exponentials",
            logsumexp=_in_float32,
        ),
        mistake(
            "largest logit not added back",
            "the largest logit is subtracted before the sum of exponentials, and is not added to its logarithm",
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
            "the largest logit is subtracted from the logit of the label, and the logsumexp has it",
            picked=lambda s, z: picked_logit(s, z) - largest_logit(z)[:, 0],
        ),
    ),
    ("logprobs", "logsumexp"): (
        mistake(
            "one-hot in the gradient of logsumexp",
            "what weighs logsumexp in the loss multiplies softmax minus one-hot in backward, not the softmax alone",
            todo="add it to what multiplies the softmax, and leave the one-hot entry as it is",
            values=_like_loss,
        ),
    ),
    ("logsumexp",): (
        mistake(
            "logsumexp without the largest logit",
            "the logsumexp is that of logits less the largest, which is not added back",
            todo="add the largest logit back after the logarithm",
            logsumexp=lambda s, z: z.logsumexp(-1) - z.detach().amax(-1),
            picked=lambda s, z: RIGHT_STAGES["picked"](s, z) - z.detach().amax(-1),
            mean=lambda s, z: RIGHT_STAGES["mean"](s, z) - z.detach().amax(-1),
        ),
    ),
}
"""Mistakes by the values per token that a loss must use for them."""
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
        mistake(
            f"entropy {what} the temperature{often}",
            f"the entropy is that of logits {what} the temperature{often}",
            tempered,
            entropy=partial(_entropy_at, power),
        )
        for what, often, power in (("without", "", 1), ("with", " twice", -1))
    ),
    *(
        mistake(
            f"entropy centred by {instead} in backward",
            f"the gradient of the entropy is -p (log p + H), with {instead} in place of H",
            entropy=partial(_centred_by, centre),
        )
        for centre, instead in ((0.0, "nothing"), (1.0, "1"))
    ),
    mistake(
        "entropy of each shard in backward",
        "the gradient of the entropy has the part of it that a tp rank's own rows give, not the whole",
        split("tp"),
        "sum the entropy over tp before you keep it for backward",
        entropy=_of_shards_in_backward,
    ),
)
