# SPDX-License-Identifier: Apache-2.0
"""What a run of supervised fine-tuning reports: counts of tokens, loss, perplexity, entropy, and the range of the logits.

    ppl_i = exp(-mean_t log p(y_t))          of each sequence i with a trained token; the mean comes before the exp
    x_avg = sum x / count                    count of the *whole* batch; x_min, x_max over the same items

    statistic                                over
    ppl                                      sequences with a trained token (AReaL's n_seqs)
    loss = -log p(y), entropy                trained tokens (n_valid_tokens)
    vocab_min_logits, vocab_max_logits       tokens that are not padding (n_tokens)

Averages are linear in 1 / count, so they add up over ranks; the perplexity of a sequence needs all of its tokens, so a sequence that
context parallelism has split must be put together first (AReaL #1223 did not, and reported ppl off by a quarter).
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
    """All statistics, which carry no gradient.

    ``real`` marks the tokens that are not padding; ``vocab_min`` and ``vocab_max`` are those of ``vocab_range``.
    The three counts are the whole batch's: sequences with a trained token, tokens that are not padding, trained tokens.

    Reduced by a sum: ``n_seqs``, ``n_tokens``, ``n_valid_tokens``, ``prompt_tokens`` (neither trained nor padding) and each ``_avg``,
    which is 0 if the batch has nothing to average. By a minimum: each ``_min``, +inf if there is nothing here. By a maximum: each ``_max``, -inf.
    Entropy is averaged over trained tokens, as in AReaL's RL trainer; its SFT trainer computes and drops it.
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
    """The least and the greatest logit of each token, before any temperature, over the whole vocabulary.

    AReaL takes them over the tensor-parallel rank's shard, so that they depend on the number of ranks.
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
