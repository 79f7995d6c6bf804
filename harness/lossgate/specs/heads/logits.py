# SPDX-License-Identifier: Apache-2.0
"""Head "logits": the kernel starts from the logits."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lossgate.numerics.rounded_arithmetic import RoundedRun
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.heads.head import Head, HeadContext
from lossgate.specs.record import Record, built_in_field


class Logits(Record):
    """The input that head "logits" adds to the batch."""

    logits: Tensor = built_in_field("token vocab", "the logits, before the temperature; requires grad", dtype="input")


class LogitsHead(Head):
    """The kernel is given its tp rank's columns of the logits, before the temperature."""

    name = "logits"
    meaning = "from the logits, before the temperature"
    inputs = Logits
    has_logits = True

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        logits = context.streams.normal("logits", problem.tokens, problem.vocab) * problem.logit_std
        logits[torch.arange(problem.tokens), context.labels] += context.label_boost()
        context.put_outliers(logits)
        return {"logits": logits}

    def draw_vocab_padding(self, problem: Problem, streams: RandomStreams) -> dict[str, Tensor]:
        rows = max(shard.padding for shard in problem.partition.vocab_shards)
        if not rows:
            return {}
        return {"logits": streams.normal("logits vocab padding", problem.partition.tokens, rows) * problem.logit_std}

    def logits(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return leaves["logits"]

    def rounded_logits(self, leaves: Mapping[str, Tensor], run: RoundedRun) -> Tensor:
        logits, to = leaves["logits"].expand(run.members, -1, -1), run.stages.logits
        return run.round(logits, to) if to.unit > run.stages.inputs.unit else logits

    def rounded_gradient(
        self, leaf: str, leaves: Mapping[str, Tensor], dlogits: Tensor, partition: Partition, run: RoundedRun
    ) -> Tensor:
        return run.noise.round(dlogits, run.stages.inputs)
