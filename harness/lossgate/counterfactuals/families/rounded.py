# SPDX-License-Identifier: Apache-2.0
"""What is rounded to bfloat16 once: a field, a value per token, the softmax that backward uses, or
what one operation of the loss gives.

Each entry is rounded to one number, so a mistake of this kind is seen entry by entry, unlike a
running sum that is too coarse. They are for naming a cause alone: in a kernel that rounds as much
anyhow they can't be seen, so no problems are asked for them.
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
    """Yields the mistakes of rounding what a problem has."""
    for name, field in setting.spec.added.items():
        if field.dtype == "float32" and name in setting.fields and not field.unused:
            yield mistake(
                f"{name} rounded to bfloat16",
                f"{name} is rounded to bfloat16",
                todo=_LATER,
                fields=partial(_field, name),
            )
    own = _OF_LOGITS if setting.head.has_logits else ("logprobs",) if setting.head.name == "logprobs" else ()
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
        for less_one_hot, what in ((False, "softmax"), (True, "softmax less the one-hot")):
            yield mistake(
                f"{what} rounded to bfloat16 for backward",
                f"the {what} that backward uses is rounded to bfloat16",
                todo="save it in float32, or compute it anew in backward",
                logsumexp=partial(_saved_softmax, less_one_hot),
            )


def to_bfloat16(x: Tensor) -> Tensor:
    """Returns values as bfloat16 holds them; gradients that come back through it are, too."""
    return x.to(torch.bfloat16).to(x.dtype) if x.is_floating_point() else x


def _field(name: str, setting: Setting) -> Fields:
    return {name: to_bfloat16(setting.fields[name])}


def _value(name: str, gradient: bool, setting: Setting, values: TokenValues) -> TokenValues:
    if name not in values.given:
        return values
    x = values.given[name]
    return values.replace(**{name: to_bfloat16(x) if gradient else with_gradient_of(to_bfloat16(x.detach()), x)})


def _saved_softmax(less_one_hot: bool, setting: Setting, z: Tensor) -> Tensor:
    """Gives backward a softmax that is rounded as it is, or after 1 was taken from the label's."""
    held = z.detach().softmax(-1)
    if less_one_hot:
        one_hot = torch.nn.functional.one_hot(setting.fields["labels"], z.shape[1]).to(z.dtype)
        held = to_bfloat16(held - one_hot) + one_hot
    else:
        held = to_bfloat16(held)
    return with_gradient_of(z.logsumexp(-1), (held * torch.where(z.isfinite(), z, 0.0)).sum(-1))
