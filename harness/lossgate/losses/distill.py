# SPDX-License-Identifier: Apache-2.0
"""Spec ``distill``: the Kullback-Leibler divergence to a teacher of whom the top-k logits are known."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dense_losses import DistillOptions, distill_mean, teacher_topk_logprobs, topk_kl
from lossgate.problems.batch import Batch
from lossgate.specs.coverage import TOKEN_BRANCHES, visited_tokens
from lossgate.specs.inputs import HiddenHead, LogitsHead, PackedBatch
from lossgate.specs.logits import reference_logits
from lossgate.specs.option import TEMPERATURE, Between, options_of
from lossgate.specs.spec import Branch, Draft, Metric, Option, Spec, TokenValues

TOP_K = 4


@dataclass(frozen=True, kw_only=True)
class DistillBatch(PackedBatch):
    """What the spec adds to a packed batch."""

    teacher_logits: Tensor
    """``[T, k]``, before the temperature."""
    teacher_indices: Tensor
    """``[T, k]`` int64 ids in the whole vocabulary, distinct for each token."""


@dataclass(frozen=True, kw_only=True)
class DistillHiddenInputs(HiddenHead, DistillBatch):
    """Head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class DistillLogitsInputs(LogitsHead, DistillBatch):
    """Head "logits"."""


def _loss(
    values: TokenValues, batch: Mapping[str, Tensor], options: DistillOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference's last stages, on log-probabilities in the whole vocabulary: ``[tokens, k]``."""
    assert values.entropy is not None
    rows = batch["mask"][:, None]
    student = torch.where(rows, values.logprobs, 0.0)
    entropy = torch.where(batch["mask"], values.entropy, 0.0)
    # What is outside the top-k: sum_v q_v (log q_v - c) over all v, less the top-k's.
    inside = (student.exp() * (student - options.log_infinitesimal)).sum(1)
    tail = -entropy - options.log_infinitesimal - inside
    if not options.zero_outside_topk:
        student, tail = student - student.logsumexp(1, keepdim=True), torch.zeros_like(tail)
    teacher = teacher_topk_logprobs(torch.where(rows, batch["teacher_logits"], 0.0), options.temperature)
    token_kl = topk_kl(student, teacher, tail, options)
    loss, metrics = distill_mean(token_kl, batch["mask"], batch["valid_tokens"], options)
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _make_fields(draft: Draft) -> dict[str, Tensor]:
    """Teachers that say nearly or exactly what the student says, and others without any relation to it, of any confidence."""
    scenario, vocab = draft.scenario["teacher"], draft.batch.problem.vocab
    k = min(TOP_K, vocab)
    noise = draft.bits.normal("teacher", draft.tokens, k)
    if scenario in ("near", "equal"):
        student, indices = reference_logits(draft.batch.leaves).topk(k)
        return {"teacher_indices": indices, "teacher_logits": student + (0.5 * noise if scenario == "near" else 0.0)}
    indices = draft.bits.uniform("teacher indices", draft.tokens, vocab).argsort(1)[:, :k]
    return {"teacher_indices": indices, "teacher_logits": {"other": 1.0, "sure": 8.0, "flat": 0.0}[scenario] * noise}


def _visited(batch: Batch) -> set[str]:
    own = batch.fields["teacher_indices"][batch.fields["mask"]]
    seen = visited_tokens(batch)
    shards = [s for s in batch.partition.vocab_shards if s.end > s.start]
    for row in own:
        held = {i for i, s in enumerate(shards) if bool(((row >= s.start) & (row < s.end)).any())}
        seen |= {"top-k on several shards"} if len(held) > 1 else {"top-k on one shard"}
    return seen


_TEACHER = Option(
    name="teacher",
    meaning="one who nearly or exactly agrees with the student on its own top-k, or another one on tokens at random: usual, sure, or indifferent",
    default="other",
    choices=("other", "near", "near", "equal", "sure", "flat"),
)
_SWITCH = (False, True)

DISTILL = Spec(
    name="distill",
    summary="distillation: forward, reverse or mixed KL over the teacher's top-k",
    source="NeMo-RL DistillationLossFn",
    loss=_loss,
    options_type=DistillOptions,
    options=options_of(
        DistillOptions,
        {
            "kl_type": ("forward", "reverse", "mixed"),
            "mixed_kl_weight": (0.5, 0.25, 0.8),
            "zero_outside_topk": _SWITCH,
            "log_infinitesimal": (-100.0, -20.0),
            "temperature": Between(TEMPERATURE),
            "epsilon": (0.0, 1e-8, 0.5),
        },
    ),
    outputs=("loss",),
    inputs={"hidden": DistillHiddenInputs, "logits": DistillLogitsInputs},
    fields={"teacher_logits": ("token", "topk"), "teacher_indices": ("token", "topk")},
    make_fields=_make_fields,
    scenario=(_TEACHER,),
    columns="teacher_indices",
    metrics={
        "num_unmasked_tokens": Metric(meaning="trained tokens"),
    },
    branches={
        **TOKEN_BRANCHES,
        "top-k on one shard": Branch(meaning="a token whose teacher's top-k lies on one tp rank"),
    },
    visited=_visited,
)
