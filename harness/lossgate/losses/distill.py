# SPDX-License-Identifier: Apache-2.0
"""Spec ``distill``: the Kullback-Leibler divergence to a teacher whose top-k logits are known."""

from dataclasses import replace

import torch
from torch import Tensor

from dense_losses.distill import (
    DistillOptions,
    distill_mean,
    student_tail_kl,
    student_topk_logprobs,
    teacher_topk_logprobs,
    topk_kl,
)
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


def _mean(token_kl: Tensor, batch: DistillBatch, options: DistillOptions) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = distill_mean(token_kl, batch.mask, batch.valid_tokens, options)
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _teacher(batch: DistillBatch, options: DistillOptions) -> Tensor:
    """Returns the teacher's log-probabilities ``[tokens, k]``."""
    return teacher_topk_logprobs(torch.where(batch.mask[:, None], batch.teacher_logits, 0.0), options.temperature)


def _through_the_whole_vocabulary(
    values: TokenValues, batch: DistillBatch, options: DistillOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reads the top-k from log-probabilities in the whole vocabulary, and the tail from their
    entropy, as NeMo-RL does; and writes ``p log p - p log q`` as ``torch.nn.functional.kl_div``
    does.
    """
    logprobs = torch.where(batch.mask[:, None], values.logits, 0.0).log_softmax(1)
    student, teacher = logprobs.gather(1, batch.teacher_indices), _teacher(batch, options)
    inside = (student.exp() * (student - options.log_infinitesimal)).sum(1)
    tail = (logprobs.exp() * logprobs).sum(1) - options.log_infinitesimal - inside
    if not options.zero_outside_topk:
        student, tail = student - student.logsumexp(1, keepdim=True), torch.zeros_like(tail)
    forward = _term_by_term(teacher, student)
    reverse = _term_by_term(student, teacher) + tail
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": options.mixed_kl_weight}[options.kl_type]
    return _mean(weight * forward + (1 - weight) * reverse, batch, options)


def _term_by_term(logp: Tensor, logq: Tensor) -> Tensor:
    p = logp.exp()
    return (p * logp - p * logq).sum(1)


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
    uses=("logits",),
    also_written=(_through_the_whole_vocabulary,),
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
    """The divergence to the teacher, mean over trained tokens."""
    logits = torch.where(batch.mask[:, None], values.logits, 0.0)
    ids, whole = batch.teacher_indices, options.zero_outside_topk
    student = student_topk_logprobs(logits, ids, zero_outside_topk=whole)  # after the temperature
    tail = (
        student_tail_kl(logits, ids, log_infinitesimal=options.log_infinitesimal)
        if whole
        else torch.zeros_like(student[:, 0])
    )
    return _mean(topk_kl(student, _teacher(batch, options), tail, options), batch, options)
