# SPDX-License-Identifier: Apache-2.0
"""Wrong references: ``spec check`` tells each, and says what to change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from lossgate import CoverageGoal, Spec, Term, Terms
from lossgate.spec_check.check import CHECKS, check_spec


class GammaOptions(lossgate.Options):
    gamma: float = lossgate.option(2.0, "the power of 1 - p", choices=(2.0, 0.0, 1.0))


class WeightBatch(lossgate.Batch):
    weights: Tensor = lossgate.field("token", "the weight of a token", draw=lambda c: c.uniform(0.5, 2.0))


def focal_losses(values: Any, batch: Any, gamma: float) -> Tensor:
    logprobs = torch.where(batch.mask, values.logprobs, -1.0)
    return torch.where(batch.mask, -((1 - logprobs.exp()) ** gamma) * logprobs, 0.0)


def tokens(batch: Any) -> Tensor:
    return batch.valid_tokens.clamp(min=1)


def declared(reference: Callable[..., Any], **arguments: Any) -> Spec:
    given = {"options": GammaOptions, "batch": WeightBatch, "heads": ("logits",), **arguments}
    return lossgate.spec("focal", **given)(reference)


def right(values: Any, batch: Any, options: Any) -> Any:
    return (batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, options.gamma)).sum() / tokens(batch)


def negated(values: Any, batch: Any, options: Any) -> Any:
    return -right(values, batch, options)


def per_token(values: Any, batch: Any, options: Any) -> Any:
    return focal_losses(values, batch, options.gamma) / tokens(batch)


def multiplied_by_the_mask(values: Any, batch: Any, options: Any) -> Any:
    losses = -((1 - values.logprobs.exp()) ** options.gamma) * values.logprobs
    return (losses * batch.mask * batch.weights).sum() / tokens(batch)


def selected_last(values: Any, batch: Any, options: Any) -> Any:
    losses = -((1 - values.logprobs.exp()) ** options.gamma) * values.logprobs
    return torch.where(batch.mask, losses * batch.weights, 0.0).sum() / tokens(batch)


def weights_not_selected(values: Any, batch: Any, options: Any) -> Any:
    return (batch.weights * focal_losses(values, batch, options.gamma)).sum() / tokens(batch)


def gradient_cut(values: Any, batch: Any, options: Any) -> Any:
    logprobs = torch.where(batch.mask, values.logprobs, -1.0)
    losses = -((1 - logprobs.detach().exp()) ** options.gamma) * logprobs
    return torch.where(batch.mask, losses * batch.weights, 0.0).sum() / tokens(batch)


def all_detached(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options).detach()


def without_the_option(values: Any, batch: Any, options: Any) -> Any:
    return (batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, 2.0)).sum() / tokens(batch)


def any_power_is_two(values: Any, batch: Any, options: Any) -> Any:
    gamma = 2.0 if options.gamma > 0 else 0.0
    return (batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, gamma)).sum() / tokens(batch)


def without_the_weights(values: Any, batch: Any, options: Any) -> Any:
    return focal_losses(values, batch, options.gamma).sum() / tokens(batch)


def local_count(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options) * tokens(batch) / batch.mask.sum().clamp(min=1)


def across_sequences(values: Any, batch: Any, options: Any) -> Any:
    losses = batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, options.gamma)
    return (losses * losses.cumsum(0)).sum() / tokens(batch)


def count_not_clamped(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options) * tokens(batch) / batch.valid_tokens


def in_float32(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options).float()


def with_if(values: Any, batch: Any, options: Any) -> Any:
    loss = right(values, batch, options)
    return loss if loss > 1e9 else 2 * loss


def with_item(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options) * (1 + 0 * values.logprobs.sum().detach().item())


def clamped(values: Any, batch: Any, options: Any) -> Any:
    losses = focal_losses(values, batch, options.gamma).clamp(max=1.0)
    return (batch.weights.where(batch.mask, 0.0) * losses).sum() / tokens(batch)


def in_place(values: Any, batch: Any, options: Any) -> Any:
    batch.weights.mul_(0.5)
    return right(values, batch, options)


def with_if_on_a_field(values: Any, batch: Any, options: Any) -> Any:
    loss = right(values, batch, options)
    return loss if batch.weights.sum() > 1e9 else 2 * loss


def with_boolean_index(values: Any, batch: Any, options: Any) -> Any:
    return -(batch.weights[batch.mask] * values.logprobs[batch.mask]).sum() / tokens(batch)


def loop_over_sequences(values: Any, batch: Any, options: Any) -> Any:
    losses = batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, options.gamma)
    starts = batch.cu_seqlens.tolist()
    return torch.stack([losses[a:b].sum() for a, b in pairwise(starts)]).sum() / tokens(batch)


def float32_sums(values: Any, batch: Any, options: Any) -> Any:
    losses = batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, options.gamma)
    return torch.zeros(batch.sequences).index_add(0, batch.sequence, losses).sum() / tokens(batch)


class Counter:
    calls = 0


def with_state(values: Any, batch: Any, options: Any) -> Any:
    Counter.calls += 1
    return right(values, batch, options) * Counter.calls


def with_metric(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options), {"mean_weight": batch.weights.where(batch.mask, 0.0).mean()}


def root(values: Any, batch: Any, options: Any) -> Any:
    """Where a token is masked, the root's derivative is infinite, and 0 times that is NaN."""
    losses = focal_losses(values, batch, options.gamma).sqrt()
    return torch.where(batch.mask, batch.weights * losses, 0.0).sum() / tokens(batch)


def infinite_in_float32(values: Any, batch: Any, options: Any) -> Any:
    """Perplexities to the power of 3 overflow on problems with large logits."""
    logprobs = torch.where(batch.mask, values.logprobs, 0.0)
    weights = torch.where(batch.mask, batch.weights, 0.0)
    return (weights * (-3 * logprobs).exp()).sum() / tokens(batch)


def over_local_vocabulary(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options) / batch.vocab_end


def as_terms(values: Any, batch: Any, options: Any) -> Any:
    losses = batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, options.gamma)
    return Terms(
        terms={"focal": Term(values=losses, over="tokens")}, normalisers={"tokens": batch.mask.sum().clamp(min=1)}
    )


class RewardBatch(WeightBatch):
    reward: Tensor = lossgate.field("sequence", "the reward of a sequence")


def untrained_rewarded(values: Any, batch: Any, options: Any) -> Any:
    """A sequence without a trained token has a mean of 0, and so a ratio of 1."""
    losses = batch.weights.where(batch.mask, 0.0) * focal_losses(values, batch, options.gamma)
    sums = losses.new_zeros(batch.sequences).index_add(0, batch.sequence, losses)
    return -(batch.reward * (-sums).exp()).sum() / tokens(batch)


def clipped_at_a_tie(values: Any, batch: Any, options: Any) -> Any:
    logprobs = torch.where(batch.mask, values.logprobs, -1.0)
    ratios = (logprobs - batch.weights.where(batch.mask, -1.0)).exp()
    return torch.where(batch.mask, ratios.clamp(max=1.0), 0.0).sum() / tokens(batch)


class OnPolicy(lossgate.Batch):
    weights: Tensor = lossgate.field("token", "the same policy", draw=lambda c: c.logprobs)


class MeanCount(WeightBatch):
    mean_length: Tensor = lossgate.field(
        "", "tokens of a sequence", dtype="float32", count=lambda batch: batch.mask.double().mean() + 1
    )


def over_mean_length(values: Any, batch: Any, options: Any) -> Any:
    return right(values, batch, options) / batch.mean_length


def written_to(values: Any, batch: Any, options: Any) -> Any:
    batch.weights.mul_(1.0)
    return right(values, batch, options)


class FloatCount(WeightBatch):
    halves: Tensor = lossgate.field("", "twice the tokens", dtype="int64", count=lambda batch: batch.mask.sum() / 2)


class PairCount(WeightBatch):
    pairs: Tensor = lossgate.field("", "of sequences", dtype="int64", count=lambda batch: count_pairs(batch))


def count_pairs(batch: Any) -> Tensor:
    lengths = batch.cu_seqlens.diff()
    return ((lengths[0::2] > 0) & (lengths[1::2] > 0)).sum()


class DrawnAtRandom(lossgate.Batch):
    weights: Tensor = lossgate.field("token", "a weight", draw=lambda c: 0.5 + torch.rand(c.tokens))


class WrongDims(lossgate.Batch):
    weights: Tensor = lossgate.field("sequence", "a weight", draw=lambda c: c.streams.uniform("w", c.tokens + 1))


class Unsplit(lossgate.Batch):
    weights: Tensor = lossgate.field("items", "a weight", draw=lambda c: 0.5 + c.streams.uniform("w", c.tokens))


class ModeOptions(GammaOptions):
    mode: str = lossgate.option("sum", "how tokens are added up", choices=("sum", "mean", "average"))

    def __post_init__(self) -> None:
        if self.mode == "average" and self.gamma != -1:
            raise ValueError("mode 'average' needs gamma -1")


def with_mode(values: Any, batch: Any, options: Any) -> Any:
    loss = right(values, batch, options)
    return loss * tokens(batch) if options.mode == "sum" else loss


def never(values: Any, batch: Any, options: Any) -> Any:
    return values.logprobs > 0


@dataclass(frozen=True)
class Wrong:
    """A wrong reference, and what is said of it."""

    reference: Callable[..., Any]
    check: str
    """The first check that fails."""
    seen: str
    change: str
    declaration: Mapping[str, Any] = field(default_factory=dict)


WRONG = {
    "wrong dims of the loss": Wrong(per_token, "runs", "shape", "mend"),
    "wrong dims of a field": Wrong(
        right, "draws", "field 'weights': its draw= gave the shape", "mend", {"batch": WrongDims}
    ),
    "float32": Wrong(in_float32, "runs", "returned loss in float32", "mend"),
    "an if on a tensor": Wrong(with_if, "runs", "under torch.vmap", "torch.where in place of if"),
    "an if on a field": Wrong(with_if_on_a_field, "runs", "torch.where or clamp in place of if", "in place of if"),
    "a mask as an index": Wrong(with_boolean_index, "runs", "torch.where(mask, x, 0.0) in place of x[mask]", "where"),
    "no sequences": Wrong(
        loop_over_sequences, "runs", "without any sequence, as on a rank that has none", "index_add and sum"
    ),
    "sums in float32": Wrong(float32_sums, "runs", "values.logprobs.new_zeros(...)", "mend"),
    "count of another dtype": Wrong(
        right, "draws", "field 'halves': its count= gave torch.float32; it is declared int64", "", {"batch": FloatCount}
    ),
    "pairs of any number of sequences": Wrong(
        right, "draws", "the count= of field 'pairs' raised", "say group_size=2", {"batch": PairCount}
    ),
    "drawn at random": Wrong(
        right, "unchanged", "another field 'weights'", "from the context: c.normal()", {"batch": DrawnAtRandom}
    ),
    "nothing stopped": Wrong(
        right, "gradient", "every gradient is the derivative", "w.detach(); or drop", {"stop_gradient": True}
    ),
    "an item": Wrong(with_item, "runs", "under torch.vmap", "no .item()"),
    "no gradient": Wrong(all_detached, "runs", "without a gradient to the values per token", "mend"),
    "metric not declared": Wrong(with_metric, "runs", "metrics= lacks", "mend"),
    "input overwritten": Wrong(in_place, "runs", "another loss", "write nothing in place"),
    "input written to": Wrong(written_to, "unchanged", "overwrites 'weights'", "write nothing in place"),
    "state": Wrong(with_state, "runs", "under torch.vmap it gives another loss", "keep no state"),
    "metric never returned": Wrong(
        right, "metrics", "metric 'hits' is declared", "drop it from metrics=", {"metrics": {"hits": "never returned"}}
    ),
    "count not clamped": Wrong(count_not_clamped, "nothing trained", "the loss is not finite", "clamp(min=1)"),
    "root of 0": Wrong(root, "finite", "the gradient of values.logprobs is not finite", "roots at 0"),
    "also written with another sign": Wrong(
        right,
        "also written",
        "number 2 of also_written= differs from the reference in the loss",
        "or drop it",
        {"also_written": (right, negated)},
    ),
    "product with the mask": Wrong(multiplied_by_the_mask, "masked", "NaN in values", "select first, then compute"),
    "selected last": Wrong(selected_last, "masked", "the gradient of values.logprobs", "select first, then compute"),
    "field not selected": Wrong(weights_not_selected, "masked", "NaN in field 'weights'", "batch.weights, 0.0"),
    "untrained sequences count": Wrong(
        untrained_rewarded, "untrained", "field 'reward' of a sequence without", "leave such", {"batch": RewardBatch}
    ),
    "a tie on an edge": Wrong(
        clipped_at_a_tie,
        "gradient",
        "what differences of the loss give",
        "drop that choice, draw the field off the edge, or name the scenario in tie_scenarios=",
        {"batch": OnPolicy, "kinks": True, "options": lossgate.Options, "heads": ("logprobs",)},
    ),
    "a gradient cut": Wrong(gradient_cut, "gradient", "what differences of the loss give", "stop_gradient=True"),
    "clamp not declared": Wrong(clamped, "comparisons", "clamps or compares", "say kinks=True"),
    "field not used": Wrong(without_the_weights, "used", "field 'weights' changes nothing", "drop it from the batch"),
    "value not used": Wrong(
        right, "used", "values.entropy changes nothing", "drop it from uses=", {"uses": ("logprobs", "entropy")}
    ),
    "count not additive": Wrong(
        over_mean_length, "counts", "field 'mean_length'", "must be a sum", {"batch": MeanCount}
    ),
    "local count": Wrong(local_count, "parts", "do not add up to the whole: the loss", "batch.valid_tokens"),
    "local count of a term": Wrong(as_terms, "parts", "do not add up to the whole: the loss", "batch.valid_tokens"),
    "neighbours across sequences": Wrong(across_sequences, "parts", "do not add up to the whole", "count="),
    "metric not additive": Wrong(
        with_metric, "parts", "metric 'mean_weight', which is a sum", "count=", {"metrics": {"mean_weight": "a mean"}}
    ),
    "option not used": Wrong(without_the_option, "judged", "option 'gamma' changes nothing", "use options.gamma"),
    "choices alike": Wrong(any_power_is_two, "judged", "'gamma': 1.0 and 2.0 give the same", "tells them apart"),
    "choice never valid": Wrong(
        with_mode, "judged", "option mode='average' is never valid", "drop the choice", {"options": ModeOptions}
    ),
    "infinite in float32": Wrong(
        infinite_in_float32,
        "judged",
        "the reference in float32 disagrees with itself",
        "clamp(min=1e-5)",
        {"options": lossgate.Options},
    ),
    "size of a shard": Wrong(over_local_vocabulary, "ranks", "from logits on tp=2", "batch.vocab_size"),
    "field split by no dim": Wrong(right, "runs", "without any sequence", "in its dims", {"batch": Unsplit}),
    "goal out of reach": Wrong(
        right,
        "judged",
        "reached goal 'surprise': a log-probability above 0",
        "mend its reached=",
        {"goals": {"surprise": CoverageGoal(meaning="a log-probability above 0", reached=never)}},
    ),
}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reference_is_told(name: str) -> None:
    wrong = WRONG[name]
    failed = [outcome for outcome in check_spec(declared(wrong.reference, **wrong.declaration)) if not outcome.passed]
    assert failed, "every check passed"
    first = failed[0]
    assert first.check.name == wrong.check, first
    assert any(wrong.seen in finding.seen and wrong.change in finding.change for finding in first.findings), first


@pytest.mark.slow
def test_the_right_one_passes() -> None:
    outcomes = list(check_spec(declared(right)))
    assert [outcome.check for outcome in outcomes] == list(CHECKS)
    assert all(outcome.passed for outcome in outcomes), [o for o in outcomes if not o.passed]


def test_every_check_fails_on_a_wrong_reference() -> None:
    """A check that can't fail checks nothing."""
    assert {check.name for check in CHECKS} <= {wrong.check for wrong in WRONG.values()}
