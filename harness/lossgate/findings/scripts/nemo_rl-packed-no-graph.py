# SPDX-License-Identifier: Apache-2.0
"""The fused packing loss has no graph if no row of a microbatch has a second token.

Cause: nemo_rl/distributed/model_utils.py
    out_logprobs = torch.zeros(

Log-probabilities are copied into zeros: without any, the loss is a constant, and backward fails.
"""

import tempfile

import torch
import torch.distributed as dist
from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.algorithms.loss.utils import prepare_packed_loss_input
from nemo_rl.algorithms.loss.wrapper import SequencePackingFusionLossWrapper

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    ids = torch.tensor([[3], [5]])  # two sequences of one token, as rollouts that were cut
    given = {"input_ids": ids, "token_mask": torch.ones(2, 1), "sample_mask": torch.ones(2)}
    packed = SequencePackingFusionLossWrapper(
        NLLLossFn(), prepare_packed_loss_input, torch.tensor([0, 1, 2]), None, 0, dist.group.WORLD
    )
    logits = torch.randn(1, 2, 8, requires_grad=True)
    loss, _ = packed(logits, given, torch.tensor(2.0), torch.tensor(4.0))
    print("loss:", loss.item(), "requires_grad:", loss.requires_grad)
    try:
        loss.backward()
    except RuntimeError as error:
        print("backward:", str(error).splitlines()[0])
    dist.destroy_process_group()
raise SystemExit(not loss.requires_grad)
