# SPDX-License-Identifier: Apache-2.0
"""The property ``autocast``: a kernel stays right under autocast to bfloat16."""

from dataclasses import replace

import torch

from lossgate.cases.case import Case
from lossgate.cases.oracle import Oracle
from lossgate.cases.rank_call import RankCall, RankOutputs
from lossgate.declaration.precision import Precision
from lossgate.properties.registry import Checked, property
from lossgate.properties.would_show import all_of, gradients, values

_BFLOAT16 = "bfloat16"
_STEP = 8
"""Tokens, and rows of the vocabulary, after which a sum is rounded."""
_COARSE = Precision(
    logits=_BFLOAT16,
    logsumexp=_BFLOAT16,
    logprobs=_BFLOAT16,
    entropy=_BFLOAT16,
    dlogits=_BFLOAT16,
    accumulate=_BFLOAT16,
    chunk=_STEP,
    accumulate_hidden=_BFLOAT16,
    vocab_chunk=_STEP,
    reduce=_BFLOAT16,
    loss=_BFLOAT16,
)
"""The precision that is judged by: under autocast anything may be rounded to bfloat16."""


def _coarse_judge(case: Case) -> Oracle:
    coarse = replace(case.candidate, precision={**case.candidate.precision, _BFLOAT16: _COARSE})
    return Oracle(coarse, case.placed, case.result.outputs)


@property(
    "autocast",
    mistakes=all_of(values("is halved", 0.5, _coarse_judge), gradients("is halved", 0.5, _coarse_judge)),
    fits=lambda case: case.problem.dtype == _BFLOAT16,
    remedy="decorate forward and backward with torch.amp.custom_fwd and custom_bwd, or turn autocast off inside",
)
def autocast(case: Case) -> Checked:
    """Under autocast to bfloat16 everything is right, up to rounding to bfloat16."""
    result = case.whole(case.on_ranks(_under_autocast))
    oracle = _coarse_judge(case)
    return Checked(comparisons=tuple(case.compare(result, oracle.gradients, oracle)))


def _under_autocast(call: RankCall) -> RankOutputs:
    with torch.autocast(call.context.device.type, torch.bfloat16):
        outputs = call.forward(own_dtypes=False)
    call.backward(outputs)
    return call.collect(outputs)
