# SPDX-License-Identifier: Apache-2.0
"""Losses on pairs of a chosen and a rejected response: DPO, IPO and Bradley-Terry.

The Bradley-Terry loss trains reward models.

Sequences are interleaved: 2p is the chosen one of pair p, 2p + 1 the rejected one. The whole batch
has N sequences, hence N / 2 pairs. g_p is the sample mask of the chosen sequence, m the mask of
trained tokens, and r_i the reward of sequence i.

    DPO and IPO:    r_i    = sum_t m_t log p_t - sum_t m_t log ref_t
    DPO:            L_pref = sum_p g_p (-log sigmoid(beta (r_2p - r_2p+1))) / (N / 2)
    IPO:            L_pref = sum_p g_p (r_2p - r_2p+1 - 1 / (2 beta))^2 / (N / 2)
    SFT term:       L_sft  = sum_p g_p (-sum_t m_t log p_t of sequence 2p) / (N / 2)
                    L      = w_pref L_pref + w_sft L_sft
    Bradley-Terry:  L      = sum_p g_p (-log sigmoid(r_2p - r_2p+1)) / (N / 2), where r_i is given

Sources: Rafailov et al. 2023 (DPO, arXiv 2305.18290, eq. 7); Azar et al. 2023 (IPO, arXiv
2310.12036, eq. 17, where beta is tau); NeMo-RL ``DPOLossFn`` and ``PreferenceLossFn``; Hugging Face
TRL ``DPOTrainer``. NeMo-RL multiplies masked values by zero, so that a NaN among them spoils the
batch, and multiplies by the sample mask twice, which squares weights other than 0 and 1. Here
masked values are selected away and the mask is boolean.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import divide, select, sequence_mean, sequence_sum

LossType = Literal["sigmoid", "ipo"]
ReferenceLayout = Literal["next", "token", "rolled"]

SigmoidLoss = Callable[[Tensor], Tensor]
"""A function that computes ``-log sigmoid(x)``."""


def align_reference(
    values: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"], layout: ReferenceLayout
) -> Float[Tensor, " tokens"]:
    """Brings per-token values to next-token alignment, within each sequence.

    In the result, the value at t belongs to the prediction of token t + 1.

    Args:
        values: ``[tokens]``, in one of three layouts:

            - ``"next"``: already in next-token alignment. Returned unchanged.
            - ``"token"``: the value at t belongs to the prediction of token t itself, and that of
              a sequence's first token is a placeholder (NeMo-RL ``get_logprobs``). Shifted left by
              one.
            - ``"rolled"``: the ``"token"`` layout, rolled left by one (NeMo-RL's DPO data, under
              the name that its GRPO uses for the ``"token"`` layout). The value that the roll
              brought into a sequence's last position, from its own start or from the next
              sequence's, is dropped.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        layout: The layout of ``values``.

    Returns:
        ``[tokens]``. The last two layouts have no value for the prediction after a sequence's last
        token; it gets 0 and must be masked.
    """
    if layout == "next":
        return values
    position = torch.arange(sequence.shape[0])
    last = (sequence != sequence.roll(-1)) | (position == sequence.shape[0] - 1)
    return torch.where(last, 0.0, values.roll(-1) if layout == "token" else values)


def sequence_total(
    x: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    average: bool,
) -> Float[Tensor, " sequences"]:
    """Sums or averages ``x`` over the trained tokens of each sequence.

    Args:
        x: ``[tokens]``, already 0 at masked tokens.
        mask: ``[tokens]``, true at trained tokens.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sequences: The number of sequences.
        average: Whether to return means instead of sums.

    Returns:
        ``[sequences]``; 0 for a sequence without a trained token.
    """
    return sequence_mean(x, mask, sequence, sequences) if average else sequence_sum(x, sequence, sequences)


def pair_gate(sample_mask: Bool[Tensor, " sequences"]) -> Bool[Tensor, " pairs"]:
    """Determines g, the pairs that count: those whose chosen sequence is in ``sample_mask``.

    Args:
        sample_mask: ``[sequences]``, chosen and rejected sequences in turn.

    Returns:
        g ``[pairs]``.

    Raises:
        ValueError: if the number of sequences is odd.
    """
    if sample_mask.shape[0] % 2:
        raise ValueError(
            f"sample_mask has {sample_mask.shape[0]} sequences; expected an even number, chosen and rejected in turn"
        )
    return sample_mask[0::2]


def pair_mean(
    x: Float[Tensor, " pairs"], gate: Bool[Tensor, " pairs"], valid_sequences: Int[Tensor, ""], epsilon: float
) -> Float[Tensor, ""]:
    """Computes ``sum_p g_p x_p / (N / 2 + epsilon)``, where N is ``valid_sequences``."""
    return divide(select(gate, x).sum(), valid_sequences.to(x.dtype) / 2, epsilon)


def sigmoid_loss(x: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    """Computes ``-log sigmoid(x)`` as ``log(exp(0) + exp(-x))``."""
    return torch.logaddexp(torch.zeros_like(x), -x)  # the backward of F.logsigmoid warns under vmap


def two_class_loss(x: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    """Computes ``-log sigmoid(x)`` as ``log(exp(x) + exp(0)) - x``, a cross-entropy of two classes.

    In float32 this loses digits where the loss is small, and so does its slope
    ``sigmoid(x) - 1``.
    """
    return torch.logaddexp(x, torch.zeros_like(x)) - x


def pair_loss(
    margin: Float[Tensor, " pairs"], beta: float, loss_type: LossType, sigmoid_loss: SigmoidLoss = sigmoid_loss
) -> Float[Tensor, " pairs"]:
    """Computes the preference loss of each pair.

    Args:
        margin: ``[pairs]``, the chosen reward minus the rejected one, in nats.
        beta: In 1 / nat.
        loss_type: ``"sigmoid"`` for DPO, ``"ipo"`` for IPO.
        sigmoid_loss: How to write ``-log sigmoid(x)``.

    Returns:
        ``[pairs]``, in nats for ``"sigmoid"`` and in squared nats for ``"ipo"``.
    """
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    return sigmoid_loss(beta * margin)


def reward_metrics(
    rewards: Float[Tensor, " sequences"],
    sample_mask: Bool[Tensor, " sequences"],
    valid_sequences: Int[Tensor, ""],
    epsilon: float,
) -> dict[str, Float[Tensor, ""]]:
    """Computes the metrics that ``dpo`` and ``preference`` have in common; see ``preference``."""
    rewards, gate = rewards.detach(), pair_gate(sample_mask)
    chosen, rejected = rewards[0::2], rewards[1::2]
    return {
        "accuracy": pair_mean((chosen > rejected).to(rewards.dtype), gate, valid_sequences, epsilon),
        "rewards_chosen_mean": pair_mean(chosen, gate, valid_sequences, epsilon),
        "rewards_rejected_mean": pair_mean(rejected, gate, valid_sequences, epsilon),
        "num_valid_samples": sample_mask.to(rewards.dtype).sum() / 2,
    }


def preference(
    *,
    rewards: Float[Tensor, " sequences"],
    sample_mask: Bool[Tensor, " sequences"],
    valid_sequences: Int[Tensor, ""],
    epsilon: float = 0.0,
    sigmoid_loss: SigmoidLoss = sigmoid_loss,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes the Bradley-Terry loss of a reward model and its metrics.

    Args:
        rewards: r ``[sequences]``, the outputs of a scalar head. The loss is differentiable in it.
        sample_mask: ``[sequences]``. The entry of a pair's chosen sequence decides whether the pair
            counts.
        valid_sequences: N, the number of sequences in ``sample_mask`` over every rank and
            microbatch.
        epsilon: Added to the number of pairs; 1e-8 in NeMo-RL.
        sigmoid_loss: How to write ``-log sigmoid(x)``.

    Returns:
        The loss, in nats per pair, and the metrics, which ranks sum and which carry no gradient:

        - ``loss``;
        - ``accuracy``, the share of pairs whose chosen reward is the larger one (a tie is not);
        - ``rewards_chosen_mean`` and ``rewards_rejected_mean``, over pairs;
        - ``num_valid_samples``, half the number of sequences in ``sample_mask``.

    Raises:
        ValueError: if the number of sequences is odd.
    """
    gate = pair_gate(sample_mask)
    rewards = select(gate.repeat_interleave(2), rewards)
    of_pairs = pair_loss(rewards[0::2] - rewards[1::2], 1.0, "sigmoid", sigmoid_loss)
    loss = pair_mean(of_pairs, gate, valid_sequences, epsilon)
    return loss, {"loss": loss.detach(), **reward_metrics(rewards, sample_mask, valid_sequences, epsilon)}


def dpo(
    *,
    logprobs: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sample_mask: Bool[Tensor, " sequences"],
    valid_sequences: Int[Tensor, ""],
    options: Any,
    sigmoid_loss: SigmoidLoss = sigmoid_loss,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes the DPO or IPO loss, with an optional SFT term, and its metrics.

    NeMo-RL averages the rejected rewards over the pairs whose rejected sequence is in
    ``sample_mask``. Where the two masks of a pair differ, these are other pairs than those of the
    loss; we do not reproduce that.

    Args:
        logprobs: log p ``[tokens]``, in nats. The loss is differentiable in it.
        reference_logprobs: log ref ``[tokens]``, in nats, of the frozen reference policy, in
            ``options.reference_layout``.
        mask: m ``[tokens]``, the token mask alone, without ``sample_mask``.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sample_mask: ``[sequences]``. The entry of a pair's chosen sequence decides whether the pair
            counts.
        valid_sequences: N, the number of sequences in ``sample_mask`` over every rank and
            microbatch.
        options: The options of ``lossgate.options.DpoOptions``, as attributes.
        sigmoid_loss: How to write ``-log sigmoid(x)``.

    Returns:
        The loss per pair and the metrics, which ranks sum and which carry no gradient:

        - ``loss``;
        - ``preference_loss`` and ``sft_loss``, its terms before their weights (``sft_loss`` is 0 if
          its weight is 0);
        - ``accuracy``, the share of pairs whose chosen reward is the larger one (a tie is not);
        - ``rewards_chosen_mean`` and ``rewards_rejected_mean``, over pairs, in nats. TRL multiplies
          them by beta;
        - ``num_valid_samples``, half the number of sequences in ``sample_mask``.

    Raises:
        ValueError: if the number of sequences is odd.
    """
    gate = pair_gate(sample_mask)
    mask = mask & gate.repeat_interleave(2)[sequence]
    logprobs = select(mask, logprobs)
    reference = select(mask, align_reference(reference_logprobs, sequence, options.reference_layout))
    total = partial(sequence_total, mask=mask, sequence=sequence, sequences=sample_mask.shape[0])
    mean = partial(pair_mean, gate=gate, valid_sequences=valid_sequences, epsilon=options.epsilon)

    average = options.preference_average_log_probs
    rewards = total(logprobs, average=average) - total(reference, average=average)
    preference_loss = mean(
        pair_loss(rewards[0::2] - rewards[1::2], options.reference_policy_kl_penalty, options.loss_type, sigmoid_loss)
    )
    sft_loss = torch.zeros_like(preference_loss)
    if options.sft_loss_weight > 0:
        sft_loss = mean(-total(logprobs, average=options.sft_average_log_probs)[0::2])
    loss = options.preference_loss_weight * preference_loss + options.sft_loss_weight * sft_loss
    metrics = {"loss": loss.detach(), "sft_loss": sft_loss.detach(), "preference_loss": preference_loss.detach()}
    return loss, metrics | reward_metrics(rewards, sample_mask, valid_sequences, options.epsilon)
