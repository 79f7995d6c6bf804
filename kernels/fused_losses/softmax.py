# SPDX-License-Identifier: Apache-2.0
"""Statistics of a softmax over a vocabulary that is never held whole: in tiles, and split over ranks.

Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867. Vocabulary over ranks: Megatron-LM, arXiv:1909.08053.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class RunningSoftmax:
    """What has been seen of each token's logits so far. All ``[tokens]``, in the dtype of computation.

    ``largest`` is the maximum, ``total`` the sum of ``exp(z - largest)``, ``weighted`` that of ``z exp(z - largest)``,
    ``label`` the label's logit, 0 until it is met.
    """

    largest: Tensor
    total: Tensor
    weighted: Tensor
    label: Tensor

    @classmethod
    def start(cls, tokens: int, like: Tensor) -> "RunningSoftmax":
        dtype = torch.promote_types(like.dtype, torch.float32)
        zeros = torch.zeros(3, tokens, dtype=dtype, device=like.device)
        largest = torch.full((tokens,), float("-inf"), dtype=dtype, device=like.device)
        return cls(largest, zeros[0], zeros[1], zeros[2])

    def add(self, tokens: slice, logits: Tensor, labels: Tensor) -> None:
        """Take in ``logits [n, rows]`` of some tokens. ``labels [n]`` count from the first of these rows; others are not here."""
        largest = torch.maximum(self.largest[tokens], logits.amax(-1))
        old = (self.largest[tokens] - largest).exp()
        exps = (logits - largest[:, None]).exp_()
        self.total[tokens] = self.total[tokens] * old + exps.sum(-1)
        self.weighted[tokens] = self.weighted[tokens] * old + torch.linalg.vecdot(exps, logits)
        self.largest[tokens] = largest
        here = (labels >= 0) & (labels < logits.shape[1])
        at = labels.clamp(0, logits.shape[1] - 1)[:, None]
        self.label[tokens] += torch.where(here, logits.gather(1, at).squeeze(1), 0.0)

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Take in what the other ranks of ``group`` have seen: one all-reduce MAX of T, one SUM of 3 T numbers."""
        if group is None or group.size() == 1:
            return
        largest = self.largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        old = (self.largest - largest).exp()
        sums = torch.stack([self.total * old, self.weighted * old, self.label])
        dist.all_reduce(sums, group=group)
        self.largest = largest
        self.total, self.weighted, self.label = sums.unbind()

    @property
    def logsumexp(self) -> Tensor:
        return self.largest + self.total.log()

    @property
    def logprobs(self) -> Tensor:
        # (z - max) - log(total): exact cancellation where the label is the largest
        return self.label - self.largest - self.total.log()

    @property
    def entropy(self) -> Tensor:
        """In nats."""
        return self.logsumexp - self.weighted / self.total
