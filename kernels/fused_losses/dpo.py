# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation on the log-probabilities of a pack of sequences, whose tokens may be split over ranks."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fused_losses.ranks import sum_over


def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    mask: Tensor,
    sequence: Tensor,
    sample_mask: Tensor,
    valid_pairs: Tensor | float,
    beta: float = 0.05,
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid",
    preference_loss_weight: float = 1.0,
    sft_loss_weight: float = 0.0,
    preference_average_log_probs: bool = False,
    sft_average_log_probs: bool = False,
    epsilon: float = 0.0,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of DPO or IPO, with an optional SFT term on chosen sequences; and metrics.

    logprobs, reference_logprobs: ``[T]``, of the labels of this rank's tokens, from ``linear_logprobs``; that of the reference model under
    ``torch.no_grad``. mask: ``[T]`` bool, the tokens that count. sequence: ``[T]`` integers, each token's sequence in the pack: 2p is
    the chosen, 2p + 1 the rejected one of pair p. sample_mask: ``[S]`` bool, of every sequence in the pack; that of the chosen
    one decides about its pair. valid_pairs: the number of pairs that count in the whole batch, over every data-parallel rank and
    microbatch; losses and metrics of those add up. epsilon is added to it.

    cp_group: the ranks over which the tokens of the pack are split, in any way. Every rank of it returns the same loss
    and metrics, and has the gradient of its own tokens. One all-reduce of 3 S numbers in forward, none in backward.

    With r_i the sum (or mean, by ``preference_average_log_probs``) over a sequence of log p - log p_ref, the loss of a pair is
    ``-log sigmoid(beta (r_2p - r_2p+1))`` (Rafailov et al. 2023), for ``"ipo"`` ``(r_2p - r_2p+1 - 1 / (2 beta))^2`` (Azar et al. 2023).
    Metrics, without gradients: ``preference_loss``, ``sft_loss`` (0 at weight 0), ``accuracy``, ``rewards_chosen_mean`` and
    ``rewards_rejected_mean`` (in nats, without beta), each over valid_pairs, and ``num_valid_samples``, half the sequences
    of ``sample_mask`` here (NeMo-RL's definition).

    Raises ``ValueError`` for shapes and numbers that do not fit.
    """
    _check(logprobs, reference_logprobs, mask, sequence, sample_mask, beta, loss_type)
    gate = sample_mask[0::2]
    live = mask & gate.repeat_interleave(2)[sequence]
    policy = torch.where(live, logprobs, 0.0)
    ratio = policy - torch.where(live, reference_logprobs.to(logprobs.dtype), 0.0)
    per_token = torch.stack([ratio, policy, live.to(logprobs.dtype)])
    sums = sum_over(cp_group, logprobs.new_zeros(3, len(sample_mask)).index_add(1, sequence, per_token))
    rewards, of_policy, tokens = sums[0], sums[1], sums[2].detach().clamp(min=1)
    if preference_average_log_probs:
        rewards = rewards / tokens
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    pair = F.softplus(-beta * margin) if loss_type == "sigmoid" else (margin - 1 / (2 * beta)).square()
    pairs = torch.as_tensor(valid_pairs, dtype=logprobs.dtype, device=logprobs.device)
    pairs = pairs + epsilon if epsilon else torch.where(pairs == 0, 1.0, pairs)

    def mean(x: Tensor) -> Tensor:
        return torch.where(gate, x, 0.0).sum() / pairs

    preference = mean(pair)
    loss, sft = preference_loss_weight * preference, torch.zeros_like(preference)
    if sft_loss_weight:
        sft = -mean((of_policy / tokens if sft_average_log_probs else of_policy)[0::2])
        loss = loss + sft_loss_weight * sft
    metrics = {
        "preference_loss": preference,
        "sft_loss": sft,
        "accuracy": mean((chosen > rejected).to(pair.dtype)),
        "rewards_chosen_mean": mean(chosen),
        "rewards_rejected_mean": mean(rejected),
        "num_valid_samples": sample_mask.sum() / 2,
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def _check(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    sequence: Tensor,
    sample_mask: Tensor,
    beta: float,
    loss_type: str,
) -> None:
    shapes = {"logprobs": logprobs, "reference_logprobs": reference, "mask": mask, "sequence": sequence}
    if any(x.shape != logprobs.shape[:1] for x in shapes.values()):
        raise ValueError(
            f"{', '.join(f'{name} {list(x.shape)}' for name, x in shapes.items())}: expected [T] each, one number for each token"
        )
    if sample_mask.dim() != 1 or len(sample_mask) % 2:
        raise ValueError(
            f"sample_mask {list(sample_mask.shape)}: expected one for each of an even number of sequences, chosen and rejected in turn"
        )
    if loss_type not in ("sigmoid", "ipo"):
        raise ValueError(f"loss_type {loss_type!r}: expected 'sigmoid' or 'ipo'")
    if not beta >= 0 or (loss_type == "ipo" and beta == 0):
        raise ValueError(f"beta {beta}: expected a positive number (0 is allowed for 'sigmoid', and trains nothing)")
