# SPDX-License-Identifier: Apache-2.0
"""Loss kernels for LLM post-training that never form the ``[tokens, vocab]`` logits.

The kernels are plain PyTorch and run on one rank or split over tensor-, context- and
data-parallel ranks. They import neither ``dense_losses`` nor ``lossgate``, which judges them.
"""

from fused_losses.arguments import unchecked_values
from fused_losses.clipped_pg import clipped_pg_loss
from fused_losses.clipped_pg_config import ClippedPGConfig
from fused_losses.cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy, vocab_parallel_cross_entropy
from fused_losses.dpo import dpo_loss
from fused_losses.grpo import grpo_loss
from fused_losses.linear_logprobs import linear_logprobs
from fused_losses.megatron import MegatronLmHead
from fused_losses.memory_snapshots import MemorySnapshots
from fused_losses.metrics import Metrics
from fused_losses.models import backbone_and_lm_head
from fused_losses.packing import Pack
from fused_losses.rho import RhoCorrection, RhoWeights, rho_weights
from fused_losses.sft import SFTStatistics, linear_sft_loss
from fused_losses.softmax import TokenLogprobs
from fused_losses.tiled import tiled_token_logprobs
from fused_losses.tiled_loss import tiled_grpo_loss, tiled_loss
from fused_losses.token_layouts import flatten_like, flatten_tokens
from fused_losses.up_to_lm_head import UpToLmHead
from fused_losses.vocab_parallel import vocab_parallel_logprobs
from fused_losses.wrappers import run_in_forward

__all__ = [
    "ClippedPGConfig",
    "LinearCrossEntropyLoss",
    "MegatronLmHead",
    "MemorySnapshots",
    "Metrics",
    "Pack",
    "RhoCorrection",
    "RhoWeights",
    "SFTStatistics",
    "TokenLogprobs",
    "UpToLmHead",
    "backbone_and_lm_head",
    "clipped_pg_loss",
    "dpo_loss",
    "flatten_like",
    "flatten_tokens",
    "grpo_loss",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_sft_loss",
    "rho_weights",
    "run_in_forward",
    "tiled_grpo_loss",
    "tiled_loss",
    "tiled_token_logprobs",
    "unchecked_values",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logprobs",
]
