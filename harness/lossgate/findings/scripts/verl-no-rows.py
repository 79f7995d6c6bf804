# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of no rows raise an error.

Cause: verl/utils/torch_functional.py
    logsumexp_values = torch.stack([torch.logsumexp(logit, dim=-1) for logit in logits])

There is nothing to stack.
"""

import torch
from verl.utils.torch_functional import logprobs_from_logits_v2

try:
    logprobs_from_logits_v2(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long))
except RuntimeError as error:
    print("RuntimeError:", error)
    raise SystemExit(1) from None
