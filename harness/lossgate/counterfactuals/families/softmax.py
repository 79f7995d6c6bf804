# SPDX-License-Identifier: Apache-2.0
"""Softmax and label of each token: forward and backward."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, tempered
from lossgate.counterfactuals.families.options import with_values
from lossgate.counterfactuals.seams import RIGHT_STAGES, Stage, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def softmaxes(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of softmax and label."""
    if head not in ("hidden", "logits"):
        return
    seen = {"logprobs", "logsumexp", "mean_logprob", "entropy"} & {*spec.uses}
    if not seen:
        return
    yield mistake(
        "largest logit not subtracted",
        "exponentials are taken of the logits as they are: they overflow above 88.7, and sum to 0 below -103",
        "softmax",
        _overflows,
        "subtract the largest logit, over all tp ranks, before you take exponentials",
        logsumexp=_in_float32,
    )
    yield mistake(
        "largest logit not added back",
        "the largest logit is subtracted before the sum of exponentials, and is not added to its logarithm",
        "softmax",
        todo="subtract it from the logit of the label, too, or add it to the logarithm",
        logsumexp=lambda s, z: z.logsumexp(-1) - largest_logit(z)[:, 0],
    )
    yield mistake(
        "softmax missing in backward",
        "the gradient of the logits lacks the softmax: only the one-hot row of the label is left",
        "softmax",
        logsumexp=lambda s, z: z.logsumexp(-1).detach(),
    )
    if "logprobs" in spec.uses:
        yield mistake(
            "one-hot missing in backward",
            "the gradient of the logits lacks the one-hot row of the label: only the softmax is left",
            "softmax",
            picked=lambda s, z: picked_logit(s, z).detach(),
        )
        yield mistake(
            "logits in place of log-probabilities",
            "the logit of the label stands in place of its log-probability",
            "softmax",
            logsumexp=lambda s, z: torch.zeros_like(z[:, 0]),
        )
        yield mistake(
            "largest logit subtracted from the label's alone",
            "the largest logit is subtracted from the logit of the label, and the logsumexp has it",
            "softmax",
            picked=lambda s, z: picked_logit(s, z) - largest_logit(z)[:, 0],
        )
    if {"logprobs", "logsumexp"} <= {*spec.uses}:
        yield mistake(
            "one-hot in the gradient of logsumexp",
            "what weighs logsumexp in the loss multiplies softmax minus one-hot in backward, not the softmax alone",
            "softmax",
            todo="add it to what multiplies the softmax, and leave the one-hot entry as it is",
            values=_like_loss,
        )
    if "mean_logprob" in spec.uses:
        for option in (option for option in spec.options if isinstance(option.default, float)):
            yield mistake(
                f"{option.name} over the other classes",
                f"{option.name} is spread over the classes other than the label: V / (V - 1) times too much",
                "option",
                partial(_is_given, option.name),
                f"give each of the V classes {option.name} / V, the label too",
                options=partial(_over_others_than_label, option.name),
            )
    if not {*spec.uses} & {"logprobs", "logsumexp"}:
        return
    if spec.temperature is not None:
        yield mistake(
            "softmax of untempered logits in backward",
            "backward takes the softmax of logits that are not divided by the temperature",
            "temperature",
            tempered,
            logsumexp=_untempered_softmax,
        )
    if "logsumexp" in spec.uses:
        yield mistake(
            "logsumexp without the largest logit",
            "the logsumexp is that of logits less the largest, which is not added back",
            "softmax",
            todo="add the largest logit back after the logarithm",
            logsumexp=lambda s, z: z.logsumexp(-1) - z.detach().amax(-1),
            picked=lambda s, z: RIGHT_STAGES["picked"](s, z) - z.detach().amax(-1),
            mean=lambda s, z: RIGHT_STAGES["mean"](s, z) - z.detach().amax(-1),
        )


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
