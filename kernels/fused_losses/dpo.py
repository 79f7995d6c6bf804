# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation (DPO) on the log-probabilities of a pack of sequences.

The tokens of the pack may be split over ranks.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fused_losses.arguments import (
    as_count,
    as_mask,
    as_sample_mask,
    as_sequence,
    check_choice,
    check_constants,
    check_flags,
    check_setting,
    check_tokens,
)
from fused_losses.metrics import Metrics
from fused_losses.names import named
from fused_losses.numerics import divisor
from fused_losses.ranks import is_first, sum_over


@named
def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    mask: Tensor,
    sequence: Tensor,
    sample_mask: Tensor,
    valid_sequences: Tensor | float,
    reference_policy_kl_penalty: float = 0.05,
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid",
    preference_loss_weight: float = 1.0,
    sft_loss_weight: float = 0.0,
    preference_average_log_probs: bool = False,
    sft_average_log_probs: bool = False,
    epsilon: float = 0.0,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """Computes the loss of DPO or IPO, with an optional SFT term on the chosen sequences.

    r_i is the sum of log p - log p_ref over sequence i, or the mean with
    ``preference_average_log_probs``. beta is ``reference_policy_kl_penalty``. The loss of pair p is

    - ``"sigmoid"``: ``-log sigmoid(beta (r_2p - r_2p+1))`` (Rafailov et al. 2023),
    - ``"ipo"``: ``(r_2p - r_2p+1 - 1 / (2 beta))^2`` (Azar et al. 2023).

    Args:
        logprobs: ``[tokens]``, log-probabilities of the labels of this rank's tokens, from
            ``linear_logprobs``; gradients flow.
        reference_logprobs: ``[tokens]``, under the reference model, without gradient.
        mask: ``[tokens]`` of bool, or of numbers 0 and 1: the tokens that count. Values at other
            tokens have no effect.
        sequence: ``[tokens]`` integers, each token's sequence in the pack. Sequence 2p is the
            chosen one of pair p, sequence 2p + 1 the rejected one.
        sample_mask: ``[sequences]`` of bool, or of numbers 0 and 1, for every sequence in the pack.
            The entry of the chosen sequence decides whether its pair counts.
        valid_sequences: the number of sequences that count in the whole batch, over every
            data-parallel rank and microbatch, two for each pair: a number, or a tensor with one
            number. Losses and metrics of ranks and microbatches then add up.
        reference_policy_kl_penalty: how strongly the loss holds the policy to the reference, in
            1 / nat; positive for ``"ipo"``.
        loss_type: ``"sigmoid"`` or ``"ipo"``.
        preference_loss_weight: weight of the preference term.
        sft_loss_weight: weight of the SFT term, the negative log-likelihood of chosen sequences.
        preference_average_log_probs: whether r_i is a mean over tokens instead of a sum.
        sft_average_log_probs: whether the SFT term takes the mean over a sequence's tokens.
        epsilon: added to the number of pairs, which is ``valid_sequences / 2``.
        cp_group: the ranks over which the tokens of the pack are split, in any way.

    Returns:
        The loss, a scalar, and ``Metrics``. The loss is the same on every rank of ``cp_group``, and
        each rank has the gradient of its own tokens: do not add up the losses of ``cp_group``. The
        metrics are parts and all are sums: the first rank of ``cp_group`` reports them, and the
        others have 0. ``preference_loss``, ``sft_loss`` (0 at weight 0), ``accuracy``,
        ``rewards_chosen_mean`` and ``rewards_rejected_mean`` (in nats, without beta) are divided by
        the number of pairs; ``num_valid_samples`` is half the number of sequences with
        ``sample_mask`` here, as in NeMo-RL.

    Raises:
        ValueError: A shape or option does not fit; the message names it.

    Collectives:
        Forward: one all-reduce SUM of ``[3, sequences]`` over ``cp_group``. Backward: none.
    """
    check_choice("loss_type", loss_type, ("sigmoid", "ipo"))
    numbers = {"reference_policy_kl_penalty": reference_policy_kl_penalty, "epsilon": epsilon}
    numbers |= {"preference_loss_weight": preference_loss_weight, "sft_loss_weight": sft_loss_weight}
    for name, number in numbers.items():
        check_setting(name, number, least=0)
    if loss_type == "ipo":
        check_setting("reference_policy_kl_penalty", reference_policy_kl_penalty, above=0, otherwise="for IPO's target")
    check_flags(preference_average_log_probs=preference_average_log_probs, sft_average_log_probs=sft_average_log_probs)
    check_tokens({"logprobs": logprobs, "reference_logprobs": reference_logprobs, "sequence": sequence})
    check_constants({"reference_logprobs": reference_logprobs})
    mask, sample_mask = as_mask("mask", mask, logprobs), _as_masks_of_pairs(sample_mask, logprobs)
    sequence = as_sequence(sequence, mask, len(sample_mask), cp_group)
    gate = sample_mask[0::2]
    live = mask & gate.repeat_interleave(2)[sequence]
    policy = torch.where(live, logprobs, 0.0)
    ratio = policy - torch.where(live, reference_logprobs.to(logprobs.dtype), 0.0)
    per_token = torch.stack([ratio, policy, live.to(logprobs.dtype)])
    sums = sum_over(cp_group, logprobs.new_zeros(3, len(sample_mask)).index_add(1, sequence, per_token))
    own = (sample_mask & (sums[2] > 0)).sum()
    pairs = divisor(as_count("valid_sequences", valid_sequences, logprobs, own) / 2, epsilon)
    rewards, of_policy, tokens = sums[0], sums[1], sums[2].detach().clamp(min=1)
    if preference_average_log_probs:
        rewards = rewards / tokens
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    beta = reference_policy_kl_penalty
    pair = F.softplus(-beta * margin) if loss_type == "sigmoid" else (margin - 1 / (2 * beta)).square()

    def mean(x: Tensor) -> Tensor:
        return torch.where(gate, x, 0.0).sum() / pairs

    preference = mean(pair)
    loss, sft = preference_loss_weight * preference, torch.zeros_like(preference)
    if sft_loss_weight:
        log_likelihood = of_policy / tokens if sft_average_log_probs else of_policy
        sft = -mean(log_likelihood[0::2])
        loss = loss + sft_loss_weight * sft
    metrics = {
        "preference_loss": preference,
        "sft_loss": sft,
        "accuracy": mean((chosen > rejected).to(pair.dtype)),
        "rewards_chosen_mean": mean(chosen),
        "rewards_rejected_mean": mean(rejected),
        "num_valid_samples": sample_mask.sum() / 2,
    }
    normalisers = dict.fromkeys(metrics.keys() - {"num_valid_samples"}, "valid_sequences")
    if not is_first(cp_group):  # Every rank of the group holds the whole, and a sum counts it once.
        metrics = {name: torch.zeros_like(value) for name, value in metrics.items()}
    return loss, Metrics(metrics, normalisers=normalisers)


def _as_masks_of_pairs(sample_mask: Tensor, like: Tensor) -> Tensor:
    sample_mask = as_sample_mask(sample_mask, like)
    if len(sample_mask) % 2:
        raise ValueError(
            f"sample_mask {list(sample_mask.shape)}: expected one for each of an even number of sequences, "
            "chosen and rejected in turn"
        )
    return sample_mask
