# SPDX-License-Identifier: Apache-2.0
"""Bugs that show on large problems only, put into kernels that are otherwise right."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_bank.bugs import Bug, on_inputs
from kernel_bank.cross_entropy import Style, make
from lossgate.declaration.candidate import Candidate, Outputs


def _only_first(inputs: Any, count: int) -> Any:
    return replace(inputs, mask=inputs.mask & (torch.arange(len(inputs.mask)) < count))


def _without_tail(inputs: Any, block: int) -> Any:
    """Drops the tokens behind the last whole block, if there is a whole one."""
    whole = len(inputs.mask) // block * block
    return _only_first(inputs, whole) if whole else inputs


def _through_float16(labels: Tensor) -> Tensor:
    return labels.to(torch.float16).long().clamp(max=int(labels.max())) if len(labels) else labels


LARGE_BUGS: Mapping[str, Bug] = {
    bug.name: bug
    for bug in (
        Bug(
            "tail of a block of 1,024 lost",
            "tokens behind the last whole block of 1,024 do not count",
            on_inputs(lambda inputs, mesh: _without_tail(inputs, 1024)),
        ),
        Bug(
            "tail of a chunk of 128 lost",
            "tokens behind the last whole chunk of 128 do not count",
            on_inputs(lambda inputs, mesh: _without_tail(inputs, 128)),
        ),
        Bug(
            "labels through float16",
            "labels pass through float16, which holds whole numbers up to 2,048 only",
            on_inputs(lambda inputs, mesh: replace(inputs, labels=_through_float16(inputs.labels))),
        ),
        Bug(
            "seventh sequence dropped",
            "the seventh sequence of a rank and all later ones do not count",
            on_inputs(lambda inputs, mesh: replace(inputs, mask=inputs.mask & (inputs.sequence < 6))),
        ),
    )
}
"""Bugs that can be put into any candidate with labels."""


def without_maximum(style: Style) -> Candidate:
    """Returns a kernel on one rank that computes ``log(sum(exp(logits)))`` as it stands."""
    own = make(style)

    def kernel(inputs: Any, options: Any, mesh: Any) -> Outputs:
        logits = inputs.hidden.float() @ inputs.weight.float().T
        logits = (logits if inputs.bias is None else logits + inputs.bias.float()) / options.temperature
        logprobs = logits.gather(1, inputs.labels[:, None]).squeeze(1) - logits.exp().sum(1).log()
        total = -torch.where(inputs.mask, logprobs, 0.0).sum()
        loss = total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)
        return Outputs(loss=loss, logprobs=logprobs)

    return replace(own, kernel=kernel, axes=(), name=f"{own.name}; no maximum")
