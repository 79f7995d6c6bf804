# SPDX-License-Identifier: Apache-2.0
"""Spec ``distill``: the Kullback-Leibler divergence to a teacher whose top-k logits are known."""

from functools import partial
from math import inf
from typing import Literal

import torch
from torch import Tensor

from dense_losses.distill import (
    distill_mean,
    student_tail_kl,
    student_topk_logprobs,
    teacher_topk_logprobs,
    topk_kl,
)
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.option import TEMPERATURE, Option
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues

TOP_K = 4


class DistillOptions(Options):
    """The options of spec ``distill``.

    Raises:
        ValueError: if an option is out of range.
    """

    kl_type: Literal["forward", "reverse", "mixed"] = option(
        "forward",
        '"forward" is KL(teacher || student), "reverse" is KL(student || teacher), "mixed" is a weighted mean of both',
        choices=("forward", "reverse", "mixed"),
    )

    mixed_kl_weight: float = option(
        0.5,
        'the weight of the forward KL in "mixed", in [0, 1]; the reverse KL has 1 minus that',
        choices=(0.5, 0.25, 0.8),
    )

    zero_outside_topk: bool = option(
        False,
        "the student's probabilities are those in the whole vocabulary. If not, both models are renormalised "
        "over the teacher's top-k",
    )

    log_infinitesimal: float = option(
        -100.0,
        "the teacher's log-probability, in nats, of each token outside its top-k, in the reverse KL with "
        "zero_outside_topk",
        choices=(-100.0, -20.0),
    )

    temperature: float = option(
        1.0,
        "divides the logits of the student and of the teacher; there is no factor of its square. In NeMo-RL it "
        "is the temperature of generation, which the workers apply",
        between=TEMPERATURE,
    )

    epsilon: float = option(
        0.0, "added to the token count in the denominator; 1e-8 in NeMo-RL's masked_mean", choices=(0.0, 1e-8, 0.5)
    )

    def __post_init__(self) -> None:
        if self.kl_type not in ("forward", "reverse", "mixed"):
            raise ValueError(f'kl_type is {self.kl_type!r}; expected "forward", "reverse" or "mixed"')
        if not 0 <= self.mixed_kl_weight <= 1:
            raise ValueError(f"mixed_kl_weight is {self.mixed_kl_weight}; expected a weight in [0, 1]")
        if not -inf < self.log_infinitesimal < 0:
            raise ValueError(
                f"log_infinitesimal is {self.log_infinitesimal}; expected a finite log-probability below 0"
            )
        if not 0 < self.temperature < inf:
            raise ValueError(f"temperature is {self.temperature}; expected a finite positive number")
        if not 0 <= self.epsilon < inf:
            raise ValueError(f"epsilon is {self.epsilon}; expected a finite number, 0 or larger")


class DistillBatch(Batch):
    """The fields that the spec adds to a packed batch. They belong to the token itself."""

    teacher_logits: Tensor = field(
        "token topk", "the teacher's logits at teacher_indices, before the temperature", unshifted=True
    )
    teacher_indices: Tensor = field(
        "token topk", "ids in the whole vocabulary, distinct for each token", dtype="int64", unshifted=True
    )


def _draw(context: FieldContext) -> dict[str, Tensor]:
    """Draws a teacher that nearly or exactly agrees with the student, or is unrelated to it."""
    scenario, vocab = context.scenario["teacher"], context.batch.partition.vocab
    k = min(TOP_K, vocab)
    noise = context.streams.normal("teacher", context.tokens, k)
    if scenario in ("near", "equal"):
        student, indices = context.logits().topk(k)
        return {"teacher_indices": indices, "teacher_logits": student + (0.5 * noise if scenario == "near" else 0.0)}
    indices = context.streams.uniform("teacher indices", context.tokens, vocab).argsort(1)[:, :k]
    std = {"other": 1.0, "sure": 8.0, "flat": 0.0}[scenario]
    return {"teacher_indices": indices, "teacher_logits": std * noise}


_TEACHER = Option(
    name="teacher",
    meaning="it nearly or exactly agrees with the student on the student's top-k; "
    "or it knows tokens at random, with usual, sure, or flat logits",
    default="other",
    choices=("other", "near", "near", "equal", "sure", "flat"),
)


def _mean(token_kl: Tensor, batch: DistillBatch, options: DistillOptions) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = distill_mean(token_kl, batch.mask, batch.valid_tokens, options)
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _teacher(batch: DistillBatch, options: DistillOptions) -> Tensor:
    """Returns the teacher's log-probabilities ``[tokens, k]``."""
    return teacher_topk_logprobs(torch.where(batch.mask[:, None], batch.teacher_logits, 0.0), options.temperature)


def _through_the_whole_vocabulary(
    values: TokenValues, batch: DistillBatch, options: DistillOptions, *, of_logits: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the top-k from log-probabilities in the whole vocabulary, and the tail from their
    entropy, as NeMo-RL does. The terms of a divergence are ``p log p - p log q``, as in
    ``torch.nn.functional.kl_div``.

    Args:
        of_logits: whether the entropy is ``logsumexp - <p, z>``, of logits z. It is ``-<p, log p>``
            otherwise.
    """
    logits = torch.where(batch.mask[:, None], values.logits, 0.0)
    logprobs = logits.log_softmax(1)
    student, teacher = logprobs.gather(1, batch.teacher_indices), _teacher(batch, options)
    inside = (student.exp() * (student - options.log_infinitesimal)).sum(1)
    if of_logits:
        probabilities = logits.log_softmax(1).exp()  # computed apart from those of the top-k
        negative_entropy = (probabilities * logits).sum(1) - logits.logsumexp(1)
    else:
        negative_entropy = (logprobs.exp() * logprobs).sum(1)
    tail = negative_entropy - options.log_infinitesimal - inside
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
    heads=("hidden", "logits"),
    uses=("logits",),
    also_written=(_through_the_whole_vocabulary, partial(_through_the_whole_vocabulary, of_logits=True)),
    gathered_ids="teacher_indices",
    temperature="temperature",
    draw=_draw,
    scenarios=(_TEACHER,),
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
