# SPDX-License-Identifier: Apache-2.0
"""Mistakes of rounding to bfloat16 once: a field, a value per token, or the softmax that backward
uses is rounded.

It is known to which number each entry is rounded. So a mistake of this kind can be compared entry
by entry, unlike a running sum that is too coarse. These mistakes only name causes. No problem must
show them, because they are invisible in a kernel that rounds as much by its declared precision.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.token_values import TokenValues

_LATER = "keep it in float32"
_OF_LOGITS = ("logprobs", "entropy", "logsumexp", "unfiltered", "mean_logprob")


def rounded(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes of rounding a field, a value per token, or the softmax of backward."""
    for name, field in setting.spec.added.items():
        if field.dtype == "float32" and name in setting.fields and not field.unused:
            yield mistake(
                f"{name} rounded to bfloat16",
                f"{name} is rounded to bfloat16",
                todo=_LATER,
                fields=partial(_field, name),
            )
    own: tuple[str, ...] = ()
    if setting.head.has_logits:
        own = _OF_LOGITS
    elif setting.head.name == "logprobs":
        own = ("logprobs",)
    for name in own:
        if name in setting.spec.uses and setting.spec.reference is not None:
            for gradient, words in ((True, ""), (False, ", and its gradient is not")):
                yield mistake(
                    f"{name} rounded to bfloat16{words}",
                    f"{name} is rounded to bfloat16 before the loss is computed from it{words}",
                    todo=_LATER,
                    values=partial(_value, name, gradient),
                )
    if setting.head.has_logits:
        for less_one_hot, what, words in (
            (False, "softmax", "softmax"),
            (True, "softmax less the one-hot", "softmax minus the one-hot row of the label"),
        ):
            yield mistake(
                f"{what} rounded to bfloat16 for backward",
                f"the {words}, which backward uses, is rounded to bfloat16",
                todo="save it in float32, or compute it anew in backward",
                logsumexp=partial(_saved_softmax, less_one_hot),
            )


def to_bfloat16(x: Tensor) -> Tensor:
    """Returns values rounded to bfloat16. Their gradients are rounded, too."""
    return x.to(torch.bfloat16).to(x.dtype) if x.is_floating_point() else x


def _field(name: str, setting: Setting) -> Fields:
    return {name: to_bfloat16(setting.fields[name])}


def _value(name: str, gradient: bool, setting: Setting, values: TokenValues) -> TokenValues:
    if name not in values.given:
        return values
    x = values.given[name]
    rounded = to_bfloat16(x) if gradient else with_gradient_of(to_bfloat16(x.detach()), x)
    return values.replace(**{name: rounded})


def _saved_softmax(less_one_hot: bool, setting: Setting, z: Tensor) -> Tensor:
    """Returns the logsumexp. Its gradient is the rounded softmax. The one-hot row of the label may
    be subtracted before the rounding, and is then added back.
    """
    held = z.detach().softmax(-1)
    if less_one_hot:
        one_hot = torch.nn.functional.one_hot(setting.fields["labels"], z.shape[1]).to(z.dtype)
        held = to_bfloat16(held - one_hot) + one_hot
    else:
        held = to_bfloat16(held)
    return with_gradient_of(z.logsumexp(-1), (held * torch.where(z.isfinite(), z, 0.0)).sum(-1))
