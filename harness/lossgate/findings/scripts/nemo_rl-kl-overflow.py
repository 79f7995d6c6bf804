# SPDX-License-Identifier: Apache-2.0
"""With use_on_policy_kl_approximation, the gradient is NaN where a weight overflows float32.

Cause: nemo_rl/algorithms/loss/loss_functions.py
    kl_importance_weights = torch.nan_to_num(

It gives 0 for infinity; backward multiplies this 0 by the gradient of exp, which is infinite. The
policy is then more than 88 nats above the sampler, as with a log-probability that is wrong or old.
"""

import torch
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

B, S = 2, 3
logprobs, ones = torch.full((B, S + 1), -1.0), torch.ones(B, S + 1)
generated = logprobs.clone()
generated[0, 2] = -100.0  # wrong, or of another policy
given = {"token_mask": ones, "sample_mask": torch.ones(B), "advantages": ones}
given |= {"prev_logprobs": logprobs, "generation_logprobs": generated, "reference_policy_logprobs": logprobs}
new = logprobs[:, 1:].clone().requires_grad_()
loss, _ = ClippedPGLossFn(ClippedPGLossConfig(use_on_policy_kl_approximation=True))(
    new, given, torch.tensor(float(B)), torch.tensor(float(B * S))
)
loss.backward()
print("loss:", loss.item())
print("gradients of log-probs:", new.grad[0].tolist())
raise SystemExit(bool(new.grad.isnan().any()))
