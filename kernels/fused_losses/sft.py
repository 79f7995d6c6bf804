# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on each rank's own tokens: the loss, and the statistics that a run reports, without gathering any logits."""

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
"""And which count their average is over."""


@dataclass(frozen=True)
class SFTStatistics:
    """Sums, minima and maxima over some tokens, in float64. Those of more microbatches: ``a + b``; of all ranks: ``reduce``."""

    sums: Tensor
    """``[9]``: the four counts, then of ppl, loss, entropy, least and greatest logit."""
    minima: Tensor
    """``[5]``, infinite over nothing."""
    maxima: Tensor

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
        """tokens: of ``linear_logprobs`` with ``entropy`` and ``logit_range``. mask: ``[T]`` bool, the label is trained; real: the token is no
        padding; sequence: ``[T]`` integers below ``sequences``.

        A sequence's perplexity is exp of its mean loss, which is taken over all of its tokens first: one all-reduce of 2 S numbers over
        cp_group, always, also on a rank without a trained token. Nothing here has a gradient.
        """
        if tokens.entropy is None or tokens.min_logits is None or tokens.max_logits is None:
            raise ValueError(
                "tokens has no entropy or no range: expected linear_logprobs(..., entropy=True, logit_range=True)"
            )
        loss, trained, shown = -tokens.logprobs.detach().double(), mask, real
        per_token = torch.stack([torch.where(mask, loss, 0.0), mask.double()])
        of_sequences = sum_over(cp_group, loss.new_zeros(2, sequences).index_add(1, sequence, per_token))
        told = (of_sequences[1] > 0) & is_first(cp_group)  # by one rank of those that share the sequence
        ppl = (of_sequences[0] / of_sequences[1].clamp(min=1)).exp()
        counts = [told.sum(), real.sum(), mask.sum(), (real & ~mask).sum()]
        items = [
            (ppl, told),
            (loss, trained),
            (tokens.entropy.detach().double(), trained),
            (tokens.min_logits.double(), shown),
            (tokens.max_logits.double(), shown),
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
        return SFTStatistics(
            self.sums + other.sums, torch.minimum(self.minima, other.minima), torch.maximum(self.maxima, other.maxima)
        )

    def reduce(self, group: dist.ProcessGroup | None) -> "SFTStatistics":
        """Over the ranks that hold other tokens, data and context parallelism: always three all-reduces, SUM of 9, MIN and MAX of 5 numbers."""
        if group is None:
            return self
        reduced = SFTStatistics(self.sums.clone(), self.minima.clone(), self.maxima.clone())
        operations = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        for numbers, operation in zip((reduced.sums, reduced.minima, reduced.maxima), operations, strict=True):
            dist.all_reduce(numbers, op=operation, group=group)
        return reduced

    def export(self) -> dict[str, Tensor]:
        """AReaL's names: ``n_seqs`` (with a trained token), ``n_tokens`` (no padding), ``n_valid_tokens`` (trained), ``prompt_tokens``; and
        ``_avg``, ``_min``, ``_max`` of ``ppl`` over sequences, ``loss`` and ``entropy`` over trained tokens, ``vocab_min_logits`` and
        ``vocab_max_logits`` over tokens. An average over nothing is 0, its extrema are infinite.

        ``loss_avg`` of all microbatches and ranks is the loss of an evaluation.
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
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, SFTStatistics]:
    """The loss of supervised fine-tuning and its statistics, from this rank's tokens of a pack alone.

    labels, mask, real, sequence: ``[T]``, of this rank's tokens, shifted before the pack was split (see ``Pack``). valid_tokens: the trained
    tokens of the whole batch, over every data- and context-parallel rank and microbatch; ``epsilon`` is added to it (AReaL: 1e-5). For the
    rest see ``linear_logprobs``.

    Loss and gradients are this rank's parts and add up over dp, cp and microbatches; a trainer that averages over ranks must multiply
    by their number. Statistics are this rank's too: add those of microbatches up, then ``reduce`` once. All are the same however
    tokens are split and padded. For statistics one all-reduce of 2 S numbers over cp_group, always; nothing is gathered.
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
