# SPDX-License-Identifier: Apache-2.0
"""The losses of tiny_training.py: dense ones, fused ones, and fused ones with a defect."""

from dataclasses import replace
from typing import Any, Protocol

import torch
from tiny_policy import SPLIT, Ranks, Share
from torch import Tensor

from dense_losses import dpo, grpo, linear_logits, nll, token_logprobs
from fused_losses import dpo_loss, grpo_loss, linear_cross_entropy, linear_logprobs
from kernel_bank.bugs import lose_label, scale_gradient, temper_logprobs
from lossgate.options import DpoOptions, GrpoOptions

CHUNK = 48
"""Number of tokens whose logits exist at a time in the kernels; fewer than a batch has."""
DPO_BETA, GRPO_BETA = 0.1, 0.05


class Losses(Protocol):
    """The losses of the three phases.

    hidden is ``[tokens, WIDTH]``, head is this rank's rows of the lm-head, and log-probabilities
    are ``[tokens]``, those of the labels.
    """

    def sft(self, hidden: Tensor, head: Tensor, share: Share) -> Tensor: ...
    def logprobs(self, hidden: Tensor, head: Tensor, share: Share, temperature: float) -> Tensor: ...
    def dpo(self, logprobs: Tensor, reference: Tensor, share: Share) -> Tensor: ...
    def grpo(self, logprobs: Tensor, old: Tensor, reference: Tensor, share: Share) -> Tensor: ...


class DenseLosses:
    """The reference losses, from the log-softmax of all logits, for one rank."""

    def __init__(self, ranks: Ranks, vocab_start: int) -> None:
        assert ranks.dp.size() == ranks.cp.size() == ranks.tp.size() == 1

    def sft(self, hidden: Tensor, head: Tensor, share: Share) -> Tensor:
        return nll(self.logprobs(hidden, head, share, 1.0), share.mask, share.trained_tokens)

    def logprobs(self, hidden: Tensor, head: Tensor, share: Share, temperature: float) -> Tensor:
        return token_logprobs(linear_logits(hidden, head), share.labels, temperature)

    def dpo(self, logprobs: Tensor, reference: Tensor, share: Share) -> Tensor:
        loss, _ = dpo(
            logprobs=logprobs,
            reference_logprobs=reference,
            mask=share.mask,
            sequence=share.pack.sequence,
            sample_mask=torch.ones(share.sequences, dtype=torch.bool),
            valid_sequences=torch.tensor(share.sequences),
            options=DpoOptions(reference_policy_kl_penalty=DPO_BETA),
        )
        return loss

    def grpo(self, logprobs: Tensor, old: Tensor, reference: Tensor, share: Share) -> Tensor:
        loss, _ = grpo(
            logprobs=logprobs,
            old_logprobs=old,
            reference_logprobs=reference,
            vllm_logprobs=old,
            advantages=share.advantages,
            mask=share.mask,
            sequence=share.pack.sequence,
            sequences=share.sequences,
            valid_tokens=share.trained_tokens,
            options=GrpoOptions(beta=GRPO_BETA, use_rho_correction=False),
        )
        return loss


class FusedLosses:
    """The kernels, for any number of ranks.

    Losses are this rank's part of the batch loss. That of DPO is the same on every cp rank, since
    every one of them computes it in full.
    """

    def __init__(self, ranks: Ranks, vocab_start: int) -> None:
        self.ranks = ranks
        self.head: dict[str, Any] = {"vocab_start": vocab_start, "tp_group": ranks.tp, "chunk": CHUNK}

    def sft(self, hidden: Tensor, head: Tensor, share: Share) -> Tensor:
        return linear_cross_entropy(
            hidden, head, share.labels, mask=share.mask, valid_tokens=share.trained_tokens, **self.head
        )

    def logprobs(self, hidden: Tensor, head: Tensor, share: Share, temperature: float) -> Tensor:
        return linear_logprobs(hidden, head, share.labels, temperature=temperature, **self.head).logprobs

    def dpo(self, logprobs: Tensor, reference: Tensor, share: Share) -> Tensor:
        loss, _ = dpo_loss(
            logprobs,
            reference,
            mask=share.mask,
            sequence=share.pack.sequence,
            sample_mask=torch.ones(share.pack.sequences, dtype=torch.bool),
            valid_sequences=share.sequences,
            reference_policy_kl_penalty=DPO_BETA,
            cp_group=self.ranks.cp,
        )
        return loss

    def grpo(self, logprobs: Tensor, old: Tensor, reference: Tensor, share: Share) -> Tensor:
        loss, _ = grpo_loss(
            logprobs,
            old_logprobs=old,
            reference_logprobs=reference,
            advantages=share.advantages,
            mask=share.mask,
            valid_tokens=share.trained_tokens,
            beta=GRPO_BETA,
            cp_group=self.ranks.cp,
        )
        return loss


# Defects from the bank of known bugs, to show that training with them goes astray


class LostBoundaryLabel(FusedLosses):
    """No rank owns the first label of the vocabulary's second part (``>`` instead of ``>=``)."""

    def sft(self, hidden: Tensor, head: Tensor, share: Share) -> Tensor:
        lost = self._lost(share)  # the loss refuses a label of -100 where the mask counts it
        return super().sft(hidden, head, replace(lost, mask=lost.mask & (lost.labels != -100)))

    def logprobs(self, hidden: Tensor, head: Tensor, share: Share, temperature: float) -> Tensor:
        return super().logprobs(hidden, head, self._lost(share), temperature)

    def _lost(self, share: Share) -> Share:
        if self.ranks.tp.size() == 1:
            return share
        return replace(share, labels=lose_label(share.labels, SPLIT, -100))


class TemperedLogprobs(FusedLosses):
    """The temperature divides log-probabilities instead of logits."""

    def logprobs(self, hidden: Tensor, head: Tensor, share: Share, temperature: float) -> Tensor:
        return temper_logprobs(super().logprobs(hidden, head, share, 1.0), temperature)


class GradientTimesCp(FusedLosses):
    """Gradients of all cp ranks are added up, although each rank has the whole gradient already.

    ``torch.distributed.nn`` does that.
    """

    def dpo(self, logprobs: Tensor, reference: Tensor, share: Share) -> Tensor:
        return scale_gradient(super().dpo(logprobs, reference, share), self.ranks.cp.size())


FAULTS: dict[str, type[FusedLosses]] = {
    "boundary": LostBoundaryLabel,
    "temperature": TemperedLogprobs,
    "cp-gradient": GradientTimesCp,
}
