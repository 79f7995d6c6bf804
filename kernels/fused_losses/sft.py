# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning (SFT) on each rank's own tokens: the loss and the statistics of a run.

No logits are gathered.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.linear_logprobs import linear_logprobs
from fused_losses.ranks import is_first, sum_over
from fused_losses.softmax import TokenLogprobs

_COUNTS: tuple[str, ...] = ("n_seqs", "n_tokens", "n_valid_tokens", "prompt_tokens")
_AVERAGED = {
    "ppl": "n_seqs",
    "loss": "n_valid_tokens",
    "entropy": "n_valid_tokens",
    "vocab_min_logits": "n_tokens",
    "vocab_max_logits": "n_tokens",
}
"""Statistics with an average, and the count that divides it."""


@dataclass(frozen=True)
class SFTStatistics:
    """Sums, minima and maxima of SFT statistics over some tokens, in float64.

    The statistics are those of AReaL; see ``export``. Add those of microbatches up (``a + b``),
    then ``reduce`` once over ranks.
    """

    sums: Tensor
    """``[9]``: the four counts, then the sums of the five statistics."""
    minima: Tensor
    """``[5]``, one for each statistic; +inf over nothing."""
    maxima: Tensor
    """``[5]``, one for each statistic; -inf over nothing."""

    @classmethod
    def of(
        cls,
        tokens: TokenLogprobs,
        *,
        mask: Tensor,
        real: Tensor,
        sequence: Tensor,
        sequences: int,
        cp_group: dist.ProcessGroup | None = None,
    ) -> "SFTStatistics":
        """Computes the statistics of this rank's tokens, without gradients.

        The perplexity of a sequence is exp of its mean loss. The mean is taken over all of its
        tokens first, on whichever rank they are.

        Args:
            tokens: the result of ``linear_logprobs`` with ``entropy`` and ``logit_range``.
            mask: ``[tokens]`` bool, the label is trained.
            real: ``[tokens]`` bool, the token is not padding.
            sequence: ``[tokens]`` integers below ``sequences``, each token's sequence.
            sequences: the number of sequences in the pack.
            cp_group: the ranks over which the tokens of sequences are split.

        Raises:
            ValueError: ``tokens`` lacks the entropy or the range of logits.

        Collectives:
            One all-reduce SUM of ``[2, sequences]`` over ``cp_group``, always, also on a rank
            without trained tokens.
        """
        if tokens.entropy is None or tokens.min_logits is None or tokens.max_logits is None:
            raise ValueError(
                "tokens has no entropy or no range: expected linear_logprobs(..., entropy=True, logit_range=True)"
            )
        loss = -tokens.logprobs.detach().double()
        per_token = torch.stack([torch.where(mask, loss, 0.0), mask.double()])
        of_sequences = sum_over(cp_group, loss.new_zeros(2, sequences).index_add(1, sequence, per_token))
        # All ranks that share a sequence know its perplexity; the first one reports it.
        reported = (of_sequences[1] > 0) & is_first(cp_group)
        ppl = (of_sequences[0] / of_sequences[1].clamp(min=1)).exp()
        counts = [reported.sum(), real.sum(), mask.sum(), (real & ~mask).sum()]
        items = [
            (ppl, reported),
            (loss, mask),
            (tokens.entropy.detach().double(), mask),
            (tokens.min_logits.double(), real),
            (tokens.max_logits.double(), real),
        ]
        infinity = loss.new_full((1,), torch.inf)
        return cls(
            torch.stack(
                [count.to(loss.dtype) for count in counts] + [torch.where(where, x, 0.0).sum() for x, where in items]
            ),
            torch.stack([torch.cat([torch.where(where, x, torch.inf), infinity]).amin() for x, where in items]),
            torch.stack([torch.cat([torch.where(where, x, -torch.inf), -infinity]).amax() for x, where in items]),
        )

    def __add__(self, other: "SFTStatistics") -> "SFTStatistics":
        """Merges the statistics of two microbatches."""
        return SFTStatistics(
            self.sums + other.sums, torch.minimum(self.minima, other.minima), torch.maximum(self.maxima, other.maxima)
        )

    def reduce(self, group: dist.ProcessGroup | None) -> "SFTStatistics":
        """Merges the statistics of ranks that hold different tokens.

        Call it for context parallelism and for data parallelism.

        Args:
            group: the ranks; None for this rank alone.

        Collectives:
            With a group always three all-reduces: SUM of ``[9]``, MIN of ``[5]`` and MAX of
            ``[5]``.
        """
        if group is None:
            return self
        reduced = SFTStatistics(self.sums.clone(), self.minima.clone(), self.maxima.clone())
        operations = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        for numbers, operation in zip((reduced.sums, reduced.minima, reduced.maxima), operations, strict=True):
            dist.all_reduce(numbers, op=operation, group=group)
        return reduced

    def export(self) -> dict[str, Tensor]:
        """Returns the statistics under AReaL's names, scalars in float64.

        Counts are ``n_seqs`` (sequences with a trained token), ``n_tokens`` (tokens without
        padding), ``n_valid_tokens`` (trained tokens) and ``prompt_tokens`` (neither trained nor
        padding). ``_avg``, ``_min`` and ``_max`` are given for ``ppl`` over sequences, ``loss`` and
        ``entropy`` in nats over trained tokens, and ``vocab_min_logits`` and ``vocab_max_logits``
        over tokens without padding. An average over nothing is 0; its extrema are infinite.

        ``loss_avg`` over all microbatches and ranks is the loss of an evaluation.
        """
        counts = dict(zip(_COUNTS, self.sums, strict=False))
        found = dict(counts)
        for i, (name, count) in enumerate(_AVERAGED.items()):
            found[f"{name}_avg"] = self.sums[len(_COUNTS) + i] / counts[count].clamp(min=1)
            found[f"{name}_min"], found[f"{name}_max"] = self.minima[i], self.maxima[i]
        return found


def linear_sft_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    real: Tensor,
    sequence: Tensor,
    sequences: int,
    valid_tokens: Tensor | int,
    reduction: Literal["mean", "sum"] = "mean",
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_start: int | None = None,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, SFTStatistics]:
    """Computes the SFT loss and its statistics from this rank's tokens of a pack.

    Results do not depend on how tokens are split and padded. The statistics are those of AReaL.

    Args:
        hidden: ``[tokens, hidden]``; see ``linear_logprobs``.
        weight: ``[local_vocab, hidden]``, this rank's rows of the lm-head.
        labels: ``[tokens]`` integer ids, shifted before the pack was split; see ``Pack.labels``.
        mask: ``[tokens]`` bool, the label is trained.
        real: ``[tokens]`` bool, the token is not padding.
        sequence: ``[tokens]`` integers below ``sequences``, each token's sequence.
        sequences: the number of sequences in the pack.
        valid_tokens: the number of trained tokens in the whole batch, over every data- and
            context-parallel rank and microbatch.
        reduction: ``"mean"`` divides by ``valid_tokens``; ``"sum"`` does not.
        epsilon: added to ``valid_tokens``; 1e-5 in AReaL.
        bias: ``[local_vocab]``, or None.
        temperature: divides the logits; positive.
        softcap: the cap of the logits, positive; None for no soft-cap.
        vocab_start: id in the whole vocabulary of this rank's first row.
        vocab_rows: number of leading rows that belong to the vocabulary; all by default.
        tp_group: the ranks among which the vocabulary is split.
        cp_group: the ranks over which the tokens of sequences are split.
        sequence_parallel: whether each rank of ``tp_group`` holds only its part of the tokens.
        matmul_dtype: dtype of matrix products; that of the inputs by default.
        chunk: number of tokens whose logits exist at a time.

    Returns:
        The loss, a scalar in nats, and the statistics. Both are this rank's parts. Losses and
        gradients add up over dp, cp and microbatches; a trainer that averages over ranks must
        multiply by their number. Add the statistics of microbatches up, then ``reduce`` once.

    Raises:
        ValueError: A shape or option does not fit; the message names it.

    Collectives:
        Those of ``linear_logprobs`` over ``tp_group``, and one all-reduce SUM of
        ``[2, sequences]`` over ``cp_group``, always.
    """
    for name, x in {"mask": mask, "real": real, "sequence": sequence}.items():
        if x.shape != labels.shape:
            raise ValueError(f"{name} {list(x.shape)}: expected {list(labels.shape)}, one for each token, as labels")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {reduction!r}: expected 'mean' or 'sum'")
    tokens = linear_logprobs(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        entropy=True,
        logit_range=True,
        vocab_start=vocab_start,
        vocab_rows=vocab_rows,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        matmul_dtype=matmul_dtype,
        chunk=chunk,
    )
    statistics = SFTStatistics.of(
        tokens, mask=mask, real=real, sequence=sequence, sequences=sequences, cp_group=cp_group
    )
    loss = -torch.where(mask, tokens.logprobs, 0.0).sum()
    if reduction == "mean":
        count = torch.as_tensor(valid_tokens, dtype=loss.dtype, device=loss.device)
        loss = loss / (count + epsilon if epsilon else count.clamp(min=1))
    return loss, statistics
