# SPDX-License-Identifier: Apache-2.0
"""The filter of logits by top-k and top-p: what it keeps, and labels that it leaves out."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def filters(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of what a filter of logits keeps."""
    if head not in ("hidden", "logits") or "top_k" not in {option.name for option in spec.options}:
        return
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
