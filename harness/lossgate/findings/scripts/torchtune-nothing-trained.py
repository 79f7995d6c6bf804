# SPDX-License-Identifier: Apache-2.0
"""The chunked loss of a batch whose labels are all ignored is NaN: 0 / 0.

Cause: torchtune/modules/loss/ce_chunked_output_loss.py
    return total_loss / total_elements

It divides by the number of trained tokens.
"""

import torch
from torchtune.modules.loss import CEWithChunkedOutputLoss

logits, labels = torch.zeros(1, 4, 8), torch.full((1, 4), -100)
loss = CEWithChunkedOutputLoss(num_output_chunks=2)([*logits.chunk(2, dim=1)], labels)
print("loss:", loss.item())
raise SystemExit(bool(loss.isnan()))
