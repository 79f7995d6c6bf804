# SPDX-License-Identifier: Apache-2.0
"""Spec ``distill``: the Kullback-Leibler divergence to a teacher whose top-k logits are known."""

from dataclasses import replace

import torch
from torch import Tensor

from dense_losses import DistillOptions, distill_mean, teacher_topk_logprobs, topk_kl
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.inputs import Batch
from lossgate.specs.metric import Metric
from lossgate.specs.mistakes import Mistake, mistaken_choice
from lossgate.specs.option import TEMPERATURE, Option
from lossgate.specs.record import Between, field
from lossgate.specs.token_values import TokenValues

TOP_K = 4


class DistillBatch(Batch):
    """What the spec adds to a packed batch, as a model gives it."""

    teacher_logits: Tensor = field(
        "token topk", "the teacher's logits at teacher_indices, before the temperature", unshifted=True
    )
    teacher_indices: Tensor = field(
        "token topk", "ids in the whole vocabulary, distinct for each token", dtype="int64", unshifted=True
    )


def _draw(context: FieldContext) -> dict[str, Tensor]:
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


@spec(
    "distill",
    summary="distillation: forward, reverse or mixed KL over the teacher's top-k",
    source="NeMo-RL DistillationLossFn",
    batch=DistillBatch,
    options=DistillOptions,
    choices={
        "kl_type": ("forward", "reverse", "mixed"),
        "mixed_kl_weight": (0.5, 0.25, 0.8),
        "zero_outside_topk": _SWITCH,
        "log_infinitesimal": (-100.0, -20.0),
        "temperature": Between(*TEMPERATURE),
        "epsilon": (0.0, 1e-8, 0.5),
    },
    heads=("hidden", "logits"),
    uses=("logprobs", "entropy"),
    gathered_ids="teacher_indices",
    temperature="temperature",
    draw=_draw,
    scenarios=(_TEACHER,),
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
)
def distill(values: TokenValues, batch: DistillBatch, options: DistillOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs the reference's last stages on log-probabilities ``[tokens, k]`` in the whole
    vocabulary.
    """
    rows = batch.mask[:, None]
    student = torch.where(rows, values.logprobs, 0.0)
    entropy = torch.where(batch.mask, values.entropy, 0.0)
    # What is outside the top-k: sum_v q_v (log q_v - c) over all v, less the top-k's.
    inside = (student.exp() * (student - options.log_infinitesimal)).sum(1)
    tail = -entropy - options.log_infinitesimal - inside
    if not options.zero_outside_topk:
        student, tail = student - student.logsumexp(1, keepdim=True), torch.zeros_like(tail)
    teacher = teacher_topk_logprobs(torch.where(rows, batch.teacher_logits, 0.0), options.temperature)
    token_kl = topk_kl(student, teacher, tail, options)
    loss, metrics = distill_mean(token_kl, batch.mask, batch.valid_tokens, options)
    del metrics["loss"]  # the loss itself
    return loss, metrics
