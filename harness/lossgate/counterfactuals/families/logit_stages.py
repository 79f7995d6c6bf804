# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the stages between logits and softmax: soft-cap, temperature, and the filter by top-k
and top-p.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, tempered
from lossgate.counterfactuals.seams import Outputs, Reduced, picked_logit, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def temperatures(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the temperature."""
    if spec.temperature is None or head not in ("hidden", "logits"):
        return
    for what, sentence, power in (
        ("ignored", "the temperature is ignored", 0),
        ("applied twice", "the temperature is applied twice", 2),
        ("multiplied in place of divided", "the logits are multiplied, not divided, by the temperature", -1),
    ):
        for side, words, temper in (
            ("", "", _to_power),
            (" in backward", " in backward", _backward_power),
            (" in forward", " in forward, but backward is right", _forward_power),
        ):
            yield mistake(f"temperature {what}{side}", f"{sentence}{words}", tempered, temper=partial(temper, power))
    for what, words, whole in (("rounded", "rounded", round), ("cut", "rounded towards 0", int)):
        yield mistake(
            f"temperature {what} to a whole number",
            f"the temperature is {words} to a whole number",
            partial(_is_broken, whole),
            "keep it as a float",
            temper=partial(_whole_temperature, whole),
        )
    for what, power in _FACTORS.items() if spec.reference is not None else ():
        yield mistake(f"outputs {what}", f"{{outputs}}: {what}", tempered, outputs=partial(_times_power, power))
    for name in ("logprobs", "entropy", "logsumexp"):
        if name in spec.uses:
            divided = partial(_divided_values, name)
            yield mistake(
                f"{name} divided by the temperature",
                f"both the logits and {name} are divided by the temperature",
                tempered,
                "divide the logits alone",
                values=divided,
            )
            yield mistake(
                f"{name} divided by the temperature in place of the logits",
                f"{name} is divided by the temperature, but the logits are not",
                tempered,
                "divide the logits by the temperature, before the softmax",
                temper=_as_is,
                values=divided,
            )


_FACTORS: Mapping[str, int] = {
    "multiplied by the temperature squared": 2,
    "divided by the temperature squared": -2,
}


def _times_power(power: int, setting: Setting, outputs: Outputs) -> Outputs:
    factor = setting.temperature**power
    return {output: x if output.kind == "metric" else factor * x for output, x in outputs.items()}


def _is_broken(whole: Callable[[float], int], setting: Setting) -> bool:
    """Returns whether a temperature changes as a whole number, and not to 0."""
    return setting.head.has_logits and whole(setting.temperature) not in (0, setting.temperature)


def _whole_temperature(whole: Callable[[float], int], setting: Setting, z: Tensor) -> Tensor:
    return z / whole(setting.temperature)


def _to_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return z / setting.temperature**power


def _backward_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return with_gradient_of(z / setting.temperature, z / setting.temperature**power)


def _forward_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return with_gradient_of(z / setting.temperature**power, z / setting.temperature)


def _divided_values(name: str, setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(**{name: values.given[name] / setting.temperature})


def softcaps(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the soft-cap."""
    if head not in ("hidden", "logits") or spec.softcap is None:
        return
    yield from _SOFTCAP
    if {*spec.uses} & {"logprobs", "logsumexp"}:
        if spec.temperature is not None:
            yield _TEMPERED_FIRST
        yield _LABEL_NOT_CAPPED


def _slope_of_capped(setting: Setting, z: Tensor) -> Tensor:
    capped, cap = setting.bound_spec.capped(z), setting.bound_spec.softcap or 1.0
    return with_gradient_of(capped, z * (1 - torch.tanh(capped / cap) ** 2).detach())


def _has_cap(setting: Setting) -> bool:
    return setting.bound_spec.softcap is not None


def _as_is(setting: Setting, z: Tensor) -> Tensor:
    return z


def _is_tempered_and_capped(setting: Setting) -> bool:
    return tempered(setting) and _has_cap(setting)


_SOFTCAP = (
    mistake("soft-cap ignored", "the soft-cap is ignored", _has_cap, cap=_as_is),
    mistake(
        "soft-cap straight through",
        "the gradient lacks the factor 1 - tanh^2 of the soft-cap",
        _has_cap,
        cap=lambda s, z: with_gradient_of(s.bound_spec.capped(z), z),
    ),
    mistake(
        "soft-cap twice",
        "the soft-cap is applied twice",
        _has_cap,
        cap=lambda s, z: s.bound_spec.capped(s.bound_spec.capped(z)),
    ),
    mistake(
        "soft-cap's slope of capped logits",
        "backward takes the slope of the soft-cap at the capped logits, not at the logits before the soft-cap",
        _has_cap,
        "compute the slope from the result of forward as 1 - (capped / cap)^2",
        cap=_slope_of_capped,
    ),
    mistake(
        "soft-cap z tanh(z / cap)",
        "the soft-cap is z tanh(z / cap), not cap tanh(z / cap)",
        _has_cap,
        cap=lambda s, z: z * torch.tanh(z / (s.bound_spec.softcap or 1.0)),
    ),
)
_TEMPERED_FIRST = mistake(
    "temperature before the soft-cap",
    "the temperature divides the logits before the soft-cap, not after it",
    _is_tempered_and_capped,
    cap=_as_is,
    temper=lambda s, z: s.bound_spec.capped(z / s.temperature),
)
_LABEL_NOT_CAPPED = mistake(
    "logit of the label not capped",
    "the logit of the label is taken before the soft-cap, but the others after it",
    _has_cap,
    cap=_as_is,
    temper=_as_is,
    logsumexp=lambda s, z: (s.bound_spec.capped(z) / s.temperature).logsumexp(-1),
    picked=lambda s, z: picked_logit(s, z) / s.temperature,
    entropy=lambda s, z, lp: torch.full_like(z[:, 0], torch.nan),  # the mistake does not define the entropy
)


def filters(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the filter of logits."""
    if head not in ("hidden", "logits") or "top_k" not in {option.name for option in spec.options}:
        return
    for what, (words, change) in _KEPT.items():
        yield mistake(f"filter {what}", f"the filter of logits {words}", _has_filter, fields=partial(_filtered, change))
    yield mistake(
        "filtered labels of log-probability 0",
        "a label that the filter leaves out gets a log-probability of 0, and stays in the loss",
        _has_filter,
        "leave tokens out of the loss whose label the filter leaves out",
        values=_filtered_as_certain,
    )
    yield mistake(
        "filtered labels of log-probability 0, before too",
        "a label that the filter leaves out gets a log-probability of 0, in the log-probabilities of the batch, too, "
        "and stays in the loss",
        _has_filter,
        "leave tokens out of the loss whose label the filter leaves out",
        values=_filtered_as_certain,
        loss=_all_as_certain,
    )


def _has_filter(setting: Setting) -> bool:
    return LOGIT_FILTER in setting.fields


def _filtered(change: Callable[[Setting, Tensor], Tensor], setting: Setting) -> Fields:
    return {LOGIT_FILTER: change(setting, setting.fields[LOGIT_FILTER])}


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


def _all_as_certain(bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    certain = {
        name: torch.where(x.isneginf(), 0.0, x)
        for name, x in fields.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return bound.loss(values, {**fields, **certain})


def _filtered_as_certain(setting: Setting, values: TokenValues) -> TokenValues:
    logprobs = values.logprobs
    return values.replace(logprobs=torch.where(logprobs.isneginf(), 0.0, logprobs))


_KEPT: Mapping[str, tuple[str, Callable[[Setting, Tensor], Tensor]]] = {
    "without the last that it keeps": ("drops the smallest logit that it should keep", _without_last),
    "with one more than it keeps": ("keeps one logit more than it should", _with_next),
    "with the label in any case": ("keeps the label in any case", _with_label),
}
"""The wrong logits that a filter may keep: in words, and as a function of those that are right."""
