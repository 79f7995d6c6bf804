# SPDX-License-Identifier: Apache-2.0
"""Dense reference implementations of post-training losses.

Written to be read beside their formulas and run in float64; nothing here is fast, fused or sharded. This package
imports neither ``fused_losses`` nor ``lossgate``: an oracle that shares code with what it judges judges nothing.
"""

from dense_losses.heads import linear_logits, token_entropy, token_logprobs
from dense_losses.nll import mean_entropy, nll

__all__ = ["linear_logits", "mean_entropy", "nll", "token_entropy", "token_logprobs"]
