# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation (DPO) on the log-probabilities of a pack of sequences.

The tokens of the pack may be split over ranks.
"""

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
    """Computes the loss of DPO or IPO, with an optional SFT term on the chosen sequences.

    r_i is the sum over sequence i of log p - log p_ref; with ``preference_average_log_probs`` it is
    the mean. The loss of pair p is

    - ``"sigmoid"``: ``-log sigmoid(beta (r_2p - r_2p+1))`` (Rafailov et al. 2023),
    - ``"ipo"``: ``(r_2p - r_2p+1 - 1 / (2 beta))^2`` (Azar et al. 2023).

    Args:
        logprobs: ``[tokens]``, log-probabilities of the labels of this rank's tokens, from
            ``linear_logprobs``; gradients flow.
        reference_logprobs: ``[tokens]``, those of the reference model, without gradient.
        mask: ``[tokens]`` bool, the tokens that count.
        sequence: ``[tokens]`` integers, each token's sequence in the pack. Sequence 2p is the
            chosen one of pair p, sequence 2p + 1 the rejected one.
        sample_mask: ``[sequences]`` bool, for every sequence in the pack. That of the chosen
            sequence decides whether its pair counts.
        valid_pairs: the number of pairs that count in the whole batch, over every data-parallel
            rank and microbatch. Losses and metrics of those then add up.
        beta: the weight of the reference, in 1 / nat.
        loss_type: ``"sigmoid"`` or ``"ipo"``.
        preference_loss_weight: weight of the preference term.
        sft_loss_weight: weight of the SFT term, the negative log-likelihood of chosen sequences.
        preference_average_log_probs: whether r_i is a mean over tokens instead of a sum.
        sft_average_log_probs: whether the SFT term takes the mean over a sequence's tokens.
        epsilon: added to ``valid_pairs``.
        cp_group: the ranks over which the tokens of the pack are split, in any way.

    Returns:
        The loss, a scalar, and metrics without gradients. Both are the same on every rank of
        ``cp_group``; each rank has the gradient of its own tokens. The metrics ``preference_loss``,
        ``sft_loss`` (0 at weight 0), ``accuracy``, ``rewards_chosen_mean`` and
        ``rewards_rejected_mean`` (in nats, without beta) are divided by ``valid_pairs``;
        ``num_valid_samples`` is half the number of sequences with ``sample_mask`` here, as in
        NeMo-RL.

    Raises:
        ValueError: A shape or option does not fit; the message names it.

    Collectives:
        Forward: one all-reduce SUM of ``[3, sequences]`` over ``cp_group``. Backward: none.
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
            f"{', '.join(f'{name} {list(x.shape)}' for name, x in shapes.items())}: "
            "expected [T] each, one number for each token"
        )
    if sample_mask.dim() != 1 or len(sample_mask) % 2:
        raise ValueError(
            f"sample_mask {list(sample_mask.shape)}: expected one for each of an even number of sequences, "
            "chosen and rejected in turn"
        )
    if loss_type not in ("sigmoid", "ipo"):
        raise ValueError(f"loss_type {loss_type!r}: expected 'sigmoid' or 'ipo'")
    if not beta >= 0 or (loss_type == "ipo" and beta == 0):
        raise ValueError(
            f"beta {beta}: expected a positive number (0 is allowed for 'sigmoid', where nothing is learned)"
        )
