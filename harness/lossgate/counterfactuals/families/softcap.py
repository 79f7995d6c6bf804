# SPDX-License-Identifier: Apache-2.0
"""The soft-cap of logits: ignored, at the wrong place, its slope."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, tempered
from lossgate.counterfactuals.seams import RIGHT_STAGES, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec


def softcaps(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the soft-cap."""
    if head not in ("hidden", "logits") or spec.softcap is None:
        return
    capped = _has_cap
    yield mistake("soft-cap ignored", "the soft-cap is ignored", "softcap", capped, cap=lambda s, z: z)
    yield mistake(
        "soft-cap straight through",
        "the gradient lacks the factor 1 - tanh^2 of the soft-cap",
        "softcap",
        capped,
        cap=lambda s, z: with_gradient_of(s.bound_spec.capped(z), z),
    )
    yield mistake(
        "soft-cap twice",
        "the soft-cap is applied twice",
        "softcap",
        capped,
        cap=lambda s, z: s.bound_spec.capped(s.bound_spec.capped(z)),
    )
    yield mistake(
        "soft-cap's slope of capped logits",
        "backward takes the slope of the soft-cap at logits that are capped already",
        "softcap",
        capped,
        "take the slope from tanh as forward has it: 1 - (capped / cap)^2",
        cap=_slope_of_capped,
    )
    yield mistake(
        "soft-cap z tanh(z / cap)",
        "the soft-cap is z tanh(z / cap), not cap tanh(z / cap)",
        "softcap",
        capped,
        cap=lambda s, z: z * torch.tanh(z / (s.bound_spec.softcap or 1.0)),
    )
    if not {*spec.uses} & {"logprobs", "logsumexp"}:
        return
    if spec.temperature is not None:
        yield mistake(
            "temperature before the soft-cap",
            "the temperature divides the logits before the soft-cap, not after it",
            "temperature",
            lambda setting: tempered(setting) and _has_cap(setting),
            cap=_as_is,
            temper=lambda s, z: s.bound_spec.capped(z / s.temperature),
        )
    yield mistake(
        "logit of the label not capped",
        "the logit of the label is taken before the soft-cap, and the others after it",
        "softcap",
        capped,
        cap=_as_is,
        temper=_as_is,
        logsumexp=lambda s, z: (s.bound_spec.capped(z) / s.temperature).logsumexp(-1),
        picked=lambda s, z: RIGHT_STAGES["picked"](s, z) / s.temperature,
        entropy=lambda s, z, lp: torch.full_like(z[:, 0], torch.nan),  # nothing is said of entropies
    )


def _slope_of_capped(setting: Setting, z: Tensor) -> Tensor:
    capped, cap = setting.bound_spec.capped(z), setting.bound_spec.softcap or 1.0
    return with_gradient_of(capped, z * (1 - torch.tanh(capped / cap) ** 2).detach())


def _has_cap(setting: Setting) -> bool:
    return setting.bound_spec.softcap is not None


def _as_is(setting: Setting, z: Tensor) -> Tensor:
    return z
