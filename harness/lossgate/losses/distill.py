# SPDX-License-Identifier: Apache-2.0
"""Spec ``distill``: the Kullback-Leibler divergence to a teacher whose top-k logits are known."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dense_losses import (
    DistillOptions,
    distill_mean,
    teacher_topk_logprobs,
    token_entropy,
    token_logprobs,
    topk_kl,
)
from lossgate.specs.coverage import TOKEN_GOALS, covered_by_mask
from lossgate.specs.inputs import HiddenHead, LogitsHead, PackedBatch
from lossgate.specs.mistakes import Mistake, mistaken_choice
from lossgate.specs.option import TEMPERATURE, Between, Option, options_of
from lossgate.specs.sharding_goals import IDS_GOALS
from lossgate.specs.spec import FieldContext, Metric, Spec
from lossgate.specs.token_values import TokenValues, logit_range

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
    """The inputs at head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class DistillLogitsInputs(LogitsHead, DistillBatch):
    """The inputs at head "logits"."""


def _token_values(logits: Tensor, fields: Mapping[str, Tensor], options: DistillOptions) -> TokenValues:
    columns = fields["teacher_indices"].unbind(1)
    logprobs = torch.stack([token_logprobs(logits, ids, options.temperature) for ids in columns], 1)
    return TokenValues(logprobs=logprobs, entropy=token_entropy(logits, options.temperature), **logit_range(logits))


def _loss(
    values: TokenValues, batch: Mapping[str, Tensor], options: DistillOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs the reference's last stages on log-probabilities ``[tokens, k]`` in the whole
    vocabulary.
    """
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


def _make_fields(context: FieldContext) -> dict[str, Tensor]:
    """Draws teachers that nearly or exactly agree with the student, and others that are unrelated
    to it.
    """
    scenario, vocab = context.scenario["teacher"], context.batch.partition.vocab
    k = min(TOP_K, vocab)
    noise = context.streams.normal("teacher", context.tokens, k)
    if scenario in ("near", "equal"):
        student, indices = context.logits().topk(k)
        return {"teacher_indices": indices, "teacher_logits": student + (0.5 * noise if scenario == "near" else 0.0)}
    indices = context.streams.uniform("teacher indices", context.tokens, vocab).argsort(1)[:, :k]
    return {"teacher_indices": indices, "teacher_logits": {"other": 1.0, "sure": 8.0, "flat": 0.0}[scenario] * noise}


_TEACHER = Option(
    name="teacher",
    meaning="it nearly or exactly agrees with the student on the student's top-k; "
    "or it knows tokens at random, with usual, sure, or flat logits",
    default="other",
    choices=("other", "near", "near", "equal", "sure", "flat"),
)
_SWITCH = (False, True)

DISTILL = Spec(
    name="distill",
    summary="distillation: forward, reverse or mixed KL over the teacher's top-k",
    source="NeMo-RL DistillationLossFn",
    loss=_loss,
    temperature="temperature",
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
    unshifted=frozenset({"teacher_logits", "teacher_indices"}),  # as a model gives them
    make_fields=_make_fields,
    scenarios=(_TEACHER,),
    token_values=_token_values,
    gathered_ids="teacher_indices",
    mistakes=(
        Mistake(
            name="KL reversed",
            sentence="the reverse KL is computed for the forward one, and the forward one for all others",
            options=lambda o: replace(o, kl_type="reverse" if o.kl_type == "forward" else "forward"),
        ),
        mistaken_choice("kl_type", "mixed", "forward"),
    ),
    metrics={
        "num_unmasked_tokens": Metric(meaning="trained tokens"),
    },
    goals={**TOKEN_GOALS, **IDS_GOALS},
    covered=covered_by_mask,
)
