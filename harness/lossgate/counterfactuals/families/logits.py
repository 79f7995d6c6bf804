# SPDX-License-Identifier: Apache-2.0
"""What becomes of logits on the way to log-probabilities: in which order, of which of them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, tempered
from lossgate.counterfactuals.seams import RIGHT_STAGES, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def logits(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of temperature, soft-cap, shift and filter together."""
    if head not in ("hidden", "logits") or not {*spec.uses} & {"logprobs", "logsumexp"}:
        return
    if spec.temperature is not None:
        yield mistake(
            "softmax of untempered logits in backward",
            "backward takes the softmax of logits that are not divided by the temperature",
            "temperature",
            tempered,
            logsumexp=_untempered_softmax,
        )
    if spec.softcap is not None:
        if spec.temperature is not None:
            yield mistake(
                "temperature before the soft-cap",
                "the temperature divides the logits before the soft-cap, not after it",
                "temperature",
                lambda setting: tempered(setting) and _capped(setting),
                cap=_as_is,
                temper=lambda s, z: s.bound_spec.capped(z / s.temperature),
            )
        yield mistake(
            "logit of the label not capped",
            "the logit of the label is taken before the soft-cap, and the others after it",
            "softcap",
            _capped,
            cap=_as_is,
            temper=_as_is,
            logsumexp=lambda s, z: (s.bound_spec.capped(z) / s.temperature).logsumexp(-1),
            picked=lambda s, z: RIGHT_STAGES["picked"](s, z) / s.temperature,
            entropy=lambda s, z, lp: torch.full_like(z[:, 0], torch.nan),  # nothing is said of entropies
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
    if "top_k" in {option.name for option in spec.options}:
        yield from _filters()


def _filters() -> Iterator[Counterfactual]:
    """Yields the mistakes of what a filter of logits keeps."""
    for what, (words, change) in {
        "without the last that it keeps": ("drops the smallest logit that it should keep", _without_last),
        "with one more than it keeps": ("keeps one logit more than it should", _with_next),
        "with the label in any case": ("keeps the label in any case", _with_label),
    }.items():
        yield mistake(
            f"filter {what}",
            f"the filter of logits {words}",
            "filter",
            lambda setting: LOGIT_FILTER in setting.fields,
            fields=lambda setting, change=change: {LOGIT_FILTER: change(setting, setting.fields[LOGIT_FILTER])},
        )
    yield mistake(
        "filtered labels of log-probability 0",
        "a label that the filter leaves out gets a log-probability of 0, and stays in the loss",
        "filter",
        lambda setting: LOGIT_FILTER in setting.fields,
        values=_filtered_as_certain,
    )
    yield mistake(
        "filtered labels of log-probability 0, before too",
        "labels that the filter leaves out get a log-probability of 0, those of before too, and stay in the loss",
        "filter",
        lambda setting: LOGIT_FILTER in setting.fields,
        "leave tokens out of the loss whose label the filter leaves out",
        values=_filtered_as_certain,
        loss=_all_as_certain,
    )


def _capped(setting: Setting) -> bool:
    return setting.bound_spec.softcap is not None


def _as_is(setting: Setting, z: Tensor) -> Tensor:
    return z


def _untempered_softmax(setting: Setting, z: Tensor) -> Tensor:
    softmax = (z * setting.temperature).detach().softmax(-1)
    return with_gradient_of(z.logsumexp(-1), (softmax * torch.where(z.isfinite(), z, 0.0)).sum(-1))


def _logits(setting: Setting) -> Tensor:
    return setting.bound_spec.capped(setting.head.logits(setting.batch.leaves)).detach()


def _without_last(setting: Setting, kept: Tensor) -> Tensor:
    z = torch.where(kept, _logits(setting), torch.inf)
    several = kept.sum(1, keepdim=True) > 1
    return kept & ~((z == z.amin(1, keepdim=True)) & several)


def _with_next(setting: Setting, kept: Tensor) -> Tensor:
    z = torch.where(kept, -torch.inf, _logits(setting))
    return kept | ((z == z.amax(1, keepdim=True)) & z.isfinite())


def _with_label(setting: Setting, kept: Tensor) -> Tensor:
    return kept | torch.nn.functional.one_hot(setting.fields["labels"], kept.shape[1]).bool()


def _all_as_certain(bound: BoundSpec, values: TokenValues, fields: Fields) -> tuple[Tensor, dict[str, Tensor]]:
    certain = {
        name: torch.where(x.isneginf(), 0.0, x)
        for name, x in fields.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return bound.loss(values, {**fields, **certain})


def _filtered_as_certain(setting: Setting, values: TokenValues) -> TokenValues:
    logprobs = values.logprobs
    return values.replace(logprobs=torch.where(logprobs.isneginf(), 0.0, logprobs))
