# SPDX-License-Identifier: Apache-2.0
"""Head "hidden": the kernel starts from the last hidden states and the lm-head."""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from dense_losses import linear_logits
from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.rounded_arithmetic import RoundedRun
from lossgate.numerics.token_sum import TokenSum
from lossgate.problems.partition import Partition, VocabShard
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.heads.head import Head, HeadContext
from lossgate.specs.record import Record, built_in_field


class Hidden(Record):
    """The inputs that head "hidden" adds to the batch."""

    hidden: Tensor = built_in_field("token hidden", "the last hidden states; requires grad", dtype="input")
    weight: Tensor = built_in_field("vocab hidden", "this rank's rows of the lm-head; requires grad", dtype="input")
    bias: Tensor | None = built_in_field("vocab", "the bias of the lm-head, or None; requires grad", dtype="input")


class HiddenHead(Head):
    """The kernel computes the logits ``hidden @ weight.T + bias``.

    Each tp rank has its own rows of weight and bias.
    """

    name = "hidden"
    meaning = "from the last hidden states and the lm-head"
    inputs = Hidden
    has_logits = True

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem, streams = context.problem, context.streams
        weight = streams.normal("weight", problem.vocab, problem.hidden) * (problem.logit_std / sqrt(problem.hidden))
        # A row of weight has a squared norm of about logit_std^2: moving the hidden state along it
        # by c / logit_std^2 raises its logit by c.
        along_label = context.label_boost()[:, None] / problem.logit_std**2 * weight[context.labels]
        hidden = streams.normal("hidden", problem.tokens, problem.hidden) + along_label
        context.put_outliers(hidden)
        leaves = {"hidden": hidden, "weight": weight}
        if problem.bias:
            leaves["bias"] = streams.normal("bias", problem.vocab) * (0.3 * problem.logit_std)
        return leaves

    def draw_vocab_padding(self, problem: Problem, streams: RandomStreams) -> dict[str, Tensor]:
        rows = max(shard.padding for shard in problem.partition.vocab_shards)
        if not rows:
            return {}
        # At least as large as the rows of the vocabulary, so that logits of padding rows stand out.
        scale = max(1.0, problem.logit_std / sqrt(problem.hidden))
        return {
            "weight": streams.normal("weight vocab padding", rows, problem.hidden) * scale,
            "bias": streams.normal("bias vocab padding", rows),
        }

    def logits(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return linear_logits(leaves["hidden"], leaves["weight"], leaves.get("bias"))

    def rounded_logits(self, leaves: Mapping[str, Tensor], run: RoundedRun) -> Tensor:
        logits = run.round(run.matmul(leaves["hidden"], leaves["weight"].T), run.stages.logits)
        if (bias := leaves.get("bias")) is not None:
            logits = run.round(logits + bias, run.stages.logits)
        return logits

    def rounded_logits_at(self, leaves: Mapping[str, Tensor], ids: Tensor, run: RoundedRun) -> Tensor:
        rows = leaves["weight"][ids].transpose(-1, -2)  # [tokens, hidden, k]
        products = run.matmul(leaves["hidden"][None, :, None], rows).squeeze(-2)
        logits = run.round(products, run.stages.logits)
        if (bias := leaves.get("bias")) is not None:
            logits = run.round(logits + bias[ids], run.stages.logits)
        return logits

    def rounded_gradient(
        self, leaf: str, leaves: Mapping[str, Tensor], dlogits: Tensor, partition: Partition, run: RoundedRun
    ) -> Tensor:
        if leaf == "hidden":
            return _grad_hidden(dlogits, leaves["weight"], partition, run)
        factor = self.summed_with(leaf, leaves)
        total = TokenSum(run)
        for chunks in partition.real_token_chunks(run.stages.rounded_chunk):
            for tokens in chunks:
                if len(tokens) == dlogits.shape[1]:  # all of them, and no copy is needed
                    total.add(dlogits, factor)
                else:
                    total.add(dlogits[:, tokens], factor[tokens])
                total.end_chunk(one_of=len(chunks))
            total.end_rank()
        return self.as_leaf(leaf, total.total)

    def summed_with(self, leaf: str, leaves: Mapping[str, Tensor]) -> Tensor:
        hidden = leaves["hidden"]
        return hidden if leaf == "weight" else torch.ones(len(hidden), 1, dtype=hidden.dtype)

    def as_leaf(self, leaf: str, total: Tensor) -> Tensor:
        return total if leaf == "weight" else total.squeeze(-1)


def _grad_hidden(dlogits: Tensor, weight: Tensor, partition: Partition, run: RoundedRun) -> Tensor:
    """Multiplies the rows of each tp rank's vocabulary separately, then adds the products."""
    shards = [shard for shard in partition.vocab_shards if shard.end > shard.start]
    parts = [_vocab_part(dlogits, weight, shard, run) for shard in shards]
    if len(parts) == 1:
        return run.noise.round(parts[0], run.stages.gradients)
    return run.noise.round(run.running_sum(parts, run.stages.reduce_hidden), run.stages.gradients)


def _vocab_part(dlogits: Tensor, weight: Tensor, shard: VocabShard, run: RoundedRun) -> Tensor:
    """Returns the part of one tp rank, which may be a running sum over steps of its vocabulary."""
    whole = shard.end - shard.start
    step = whole if run.stages.accumulate_hidden == FLOAT32 else run.stages.vocab_chunk or whole
    tiles = [slice(start, min(start + step, shard.end)) for start in range(shard.start, shard.end, step)]
    parts = [run.matmul_over_vocab(dlogits[..., tile], weight[tile]) for tile in tiles]
    return parts[0] if len(parts) == 1 else run.running_sum(parts, run.stages.accumulate_hidden)
