# SPDX-License-Identifier: Apache-2.0
"""The statistics that a run of supervised fine-tuning reports.

They are counts of tokens and sequences, the loss, the perplexity, the entropy, and the range of the
logits.

    ppl_i = exp(-mean_t log p(y_t))          of each sequence i with a trained token
    x_avg = sum x / count                    count of the *whole* batch
    x_min, x_max                             over the same items

    statistic                                items
    ppl                                      sequences with a trained token (AReaL's n_seqs)
    loss = -log p(y), entropy                trained tokens (n_valid_tokens)
    vocab_min_logits, vocab_max_logits       tokens that are not padding (n_tokens)

Averages are linear in 1 / count, so they add up over ranks. The perplexity of a sequence needs all
of its tokens before the exp, so a sequence that context parallelism has split must be put together
first (AReaL #1223 did not, and reported perplexities off by up to a quarter).

Source: AReaL ``compute_packed_sft_loss``.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import divide, largest, select, sequence_mean, sequence_sum, smallest


def sft_statistics(
    *,
    logprobs: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"],
    vocab_min: Float[Tensor, " tokens"],
    vocab_max: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    real: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    valid_sequences: Int[Tensor, ""],
    real_tokens: Int[Tensor, ""],
    valid_tokens: Int[Tensor, ""],
) -> dict[str, Float[Tensor, ""]]:
    """Computes all statistics, which carry no gradient.

    Entropy is averaged over trained tokens, as in AReaL's RL trainer; AReaL's SFT trainer computes
    the entropy and drops it.

    Args:
        logprobs: log p(y) ``[tokens]``, in nats.
        entropy: ``[tokens]``, in nats.
        vocab_min: ``[tokens]``, the smallest logit of each token, from ``vocab_range``.
        vocab_max: ``[tokens]``, the largest logit of each token, from ``vocab_range``.
        mask: ``[tokens]``, true at trained tokens.
        real: ``[tokens]``, true at tokens that are not padding.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sequences: The number of sequences.
        valid_sequences: The number of sequences with a trained token, of the whole batch.
        real_tokens: The number of tokens that are not padding, of the whole batch.
        valid_tokens: The number of trained tokens, of the whole batch.

    Returns:
        Scalars by name, which ranks reduce as follows:

        - sum: ``n_seqs``, ``n_tokens``, ``n_valid_tokens``, ``prompt_tokens`` (neither trained nor
          padding), and each ``_avg``, which is 0 if the batch has nothing to average;
        - minimum: each ``_min``, +inf if this rank has no such items;
        - maximum: each ``_max``, -inf if this rank has no such items.
    """
    logprobs, entropy, vocab_min, vocab_max = (x.detach() for x in (logprobs, entropy, vocab_min, vocab_max))
    trained_in = sequence_sum(mask.to(logprobs.dtype), sequence, sequences)
    ppl = (-sequence_mean(select(mask, logprobs), mask, sequence, sequences)).exp()
    counts = {"n_seqs": trained_in > 0, "n_tokens": real, "n_valid_tokens": mask, "prompt_tokens": real & ~mask}
    return {
        **{name: counted.to(logprobs.dtype).sum() for name, counted in counts.items()},
        **_summary("ppl", ppl, trained_in > 0, valid_sequences),
        **_summary("loss", -logprobs, mask, valid_tokens),
        **_summary("entropy", entropy, mask, valid_tokens),
        **_summary("vocab_min_logits", vocab_min, real, real_tokens),
        **_summary("vocab_max_logits", vocab_max, real, real_tokens),
    }


def vocab_range(logits: Float[Tensor, "tokens vocab"]) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Finds the smallest and the largest logit of each token, before any temperature.

    They are taken over the whole vocabulary. AReaL takes them over the shard of the tensor-parallel
    rank, so that its numbers depend on the number of ranks.

    Args:
        logits: ``[tokens, vocab]``.

    Returns:
        The smallest and the largest logits, each ``[tokens]``.
    """
    return logits.amin(dim=-1), logits.amax(dim=-1)


def _summary(
    name: str, x: Float[Tensor, " n"], mask: Bool[Tensor, " n"], count: Int[Tensor, ""]
) -> dict[str, Float[Tensor, ""]]:
    return {
        f"{name}_avg": divide(select(mask, x).sum(), count),
        f"{name}_min": smallest(x, mask),
        f"{name}_max": largest(x, mask),
    }
