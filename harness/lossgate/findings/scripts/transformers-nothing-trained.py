# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch whose labels are all ignored is NaN: 0 / 0.

Cause: transformers/loss/loss_utils.py
    reduction = "sum" if num_items_in_batch is not None else "mean"

It is torch's mean.
"""

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

logits, labels = torch.zeros(1, 4, 8), torch.full((1, 4), -100)
alone = ForCausalLMLoss(logits, labels, vocab_size=8)
counted = ForCausalLMLoss(logits, labels, vocab_size=8, num_items_in_batch=torch.tensor(0))
print("loss:", alone.item(), "; with num_items_in_batch=0:", counted.item())
raise SystemExit(bool(alone.isnan()))
