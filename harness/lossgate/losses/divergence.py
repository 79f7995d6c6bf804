# SPDX-License-Identifier: Apache-2.0
"""Spec ``divergence``: distillation over the whole vocabulary."""

import torch
from torch import Tensor

import dense_losses
from dense_losses.divergence import DivergenceKind
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.option import TEMPERATURE, Option
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class DivergenceOptions(Options):
    """The options of spec ``divergence``."""

    divergence_type: DivergenceKind = option(
        "forward",
        "forward is KL(teacher || student), reverse is KL(student || teacher), jsd is the generalised Jensen-Shannon "
        "divergence",
        choices=("forward", "reverse", "jsd"),
    )
    beta: float = option(0.5, "the weight of the teacher in jsd, between 0 and 1", choices=(0.5, 0.1, 0.9))
    temperature: float = option(1.0, "divides the logits of the student and of the teacher", between=TEMPERATURE)

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ValueError(f"beta is {self.beta}; expected a weight above 0 and below 1")


_FLAT = 0.125
"""Standard deviation of the logits of a flat teacher. It is not 0, because equal log-probabilities
all round alike, and then no error of a kernel averages out."""


def _draw_teacher(context: FieldContext) -> Tensor:
    """Draws a teacher that nearly or exactly agrees with the student, or is unrelated to it."""
    scenario = context.scenario["teacher"]
    if scenario in ("near", "equal"):
        return context.logits() + context.normal(0.5 if scenario == "near" else 0.0)
    return context.normal({"other": 1.0, "sure": 8.0, "flat": _FLAT}[scenario])


class DivergenceBatch(Batch):
    """The field that the spec adds to a packed batch."""

    teacher_logits: Tensor = field(
        "token vocab",
        "this rank's columns of the teacher's logits, before the temperature",
        unshifted=True,  # as a model gives them
        draw=_draw_teacher,
    )


def _term_by_term(values: TokenValues, batch: DivergenceBatch, options: DivergenceOptions) -> Tensor:
    """Computes ``sum p (log p - log q)`` as ``sum p log p - sum p log q``: a cross-entropy less an
    entropy.
    """
    log_q, log_p = (logits.log_softmax(1) for logits in _logits(values, batch, options))

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        a = log_a.exp()
        return (a * log_a).sum(1) - (a * log_b).sum(1)

    if options.divergence_type == "forward":
        return _mean(kl(log_p, log_q), batch)
    if options.divergence_type == "reverse":
        return _mean(kl(log_q, log_p), batch)
    weight = log_q.new_full((), options.beta)
    log_r = torch.logaddexp(log_p + weight.log(), log_q + (1 - weight).log())  # no 0 * log(0) where both underflow
    return _mean(weight * kl(log_p, log_r) + (1 - weight) * kl(log_q, log_r), batch)


def _logits(values: TokenValues, batch: DivergenceBatch, options: DivergenceOptions) -> tuple[Tensor, Tensor]:
    """Returns the logits of student and teacher, after the temperature; 0 where not trained."""
    rows = batch.mask[:, None]
    teacher = torch.where(rows, batch.teacher_logits, 0.0) / options.temperature
    return torch.where(rows, values.logits, 0.0), teacher


def _mean(per_token: Tensor, batch: DivergenceBatch) -> Tensor:
    return torch.where(batch.mask, per_token, 0.0).sum() / batch.valid_tokens.clamp(min=1)


@spec(
    "divergence",
    summary="distillation over the whole vocabulary: forward or reverse KL, or a Jensen-Shannon divergence",
    source="GKD (Agarwal et al. 2024, arXiv 2306.13649), TRL GKDTrainer, Liger fused linear JSD",
    batch=DivergenceBatch,
    options=DivergenceOptions,
    heads=("hidden", "logits"),
    uses=("logits",),
    temperature="temperature",
    scenarios=(
        Option(
            name="teacher",
            meaning="it nearly or exactly agrees with the student, or is unrelated to it, with usual, sure or flat "
            "logits",
            default="other",
            choices=("other", "near", "near", "equal", "sure", "flat"),
        ),
    ),
    also_written=(_term_by_term,),
)
def divergence(values: TokenValues, batch: DivergenceBatch, options: DivergenceOptions) -> Tensor:
    """A divergence between teacher and student, mean over trained tokens."""
    student, teacher = _logits(values, batch, options)
    return _mean(dense_losses.divergence(student, teacher, options.divergence_type, options.beta), batch)
