# SPDX-License-Identifier: Apache-2.0
"""Spec ``value``: the clipped squared error of a value model."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dense_losses import ValueOptions, value_loss
from lossgate.losses.policies import Span, place
from lossgate.problems.batch import Batch
from lossgate.specs.coverage import TOKEN_BRANCHES, visited_tokens
from lossgate.specs.inputs import PackedBatch, ValuesHead
from lossgate.specs.option import options_of
from lossgate.specs.spec import Branch, Draft, Metric, Option, Spec, TokenValues


@dataclass(frozen=True, kw_only=True)
class ValueInputs(ValuesHead, PackedBatch):
    """Head "values"."""

    old_values: Tensor
    """``[T]``, at the time of the rollout."""
    returns: Tensor
    """``[T]``."""


def _loss(values: TokenValues, batch: Mapping[str, Tensor], options: ValueOptions) -> tuple[Tensor, dict[str, Tensor]]:
    names = ("old_values", "returns", "mask", "valid_tokens")
    loss, metrics = value_loss(values=values.logprobs, options=options, **{name: batch[name] for name in names})
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _make_fields(draft: Draft) -> dict[str, Tensor]:
    """Values inside the clip range and beyond it on either side, and returns on either side of them."""
    reach = draft.options.cliprange or 0.2
    spans: dict[str, list[Span]] = {"inside": [(-0.8 * reach, 0.8 * reach)]}
    spans["everywhere"] = [*spans["inside"], (1.3 * reach, 3 * reach), (-3 * reach, -1.3 * reach)]
    old = draft.logprobs - place(draft.bits, "moves", draft.tokens, spans[draft.scenario["values"]])
    return {"old_values": old, "returns": old + (0.5 + 3 * reach) * draft.bits.normal("returns", draft.tokens)}


def _visited(batch: Batch) -> set[str]:
    fields, seen = batch.fields, visited_tokens(batch)
    reach = VALUE.make_options(batch.problem.options).cliprange
    if reach is None:
        return seen
    trained = fields["mask"]
    moved = (batch.policy - fields["old_values"])[trained]
    nearer = (fields["returns"] - fields["old_values"])[trained] * moved > 0
    clamped = moved.abs() > reach
    seen |= {"beyond the range, towards the return"} if bool((clamped & nearer).any()) else set()
    seen |= {"beyond the range, away from the return"} if bool((clamped & ~nearer).any()) else set()
    return seen | ({"inside the range"} if bool((~clamped).any()) else set())


_UNCLIPPED = {"cliprange": (None,)}
_MEAN = "mean over trained tokens of"

VALUE = Spec(
    name="value",
    summary="clipped squared error of a value model",
    source="NeMo-RL MseValueLossFn",
    loss=_loss,
    options_type=ValueOptions,
    options=options_of(ValueOptions, {"cliprange": (None, 0.2, 0.5), "scale": (1.0, 0.5), "epsilon": (0.0, 1e-8, 0.5)}),
    outputs=("loss",),
    inputs={"values": ValueInputs},
    fields={"old_values": ("token",), "returns": ("token",)},
    make_fields=_make_fields,
    scenario=(
        Option(name="values", meaning="how far values moved", default="inside", choices=("inside", "everywhere")),
    ),
    kinks=True,
    metrics={
        "vf_clipfrac": Metric(meaning="share of trained tokens whose clipped error is the larger"),
        "returns_mean": Metric(meaning=f"{_MEAN} the return"),
        "values_mean": Metric(meaning=f"{_MEAN} the value"),
        "returns_sq_mean": Metric(meaning=f"{_MEAN} the squared return"),
        "residual_sq_mean": Metric(meaning=f"{_MEAN} the squared difference of return and value"),
        "values_min": Metric(meaning="least value, inf without tokens", reduction="min"),
        "values_max": Metric(meaning="greatest value, -inf without tokens", reduction="max"),
    },
    branches={
        **TOKEN_BRANCHES,
        "inside the range": Branch(meaning="a value inside the clip range", barred_by=_UNCLIPPED),
        "beyond the range, towards the return": Branch(
            meaning="a value beyond the clip range, nearer to its return", barred_by=_UNCLIPPED
        ),
        "beyond the range, away from the return": Branch(
            meaning="a value beyond the clip range, further from its return", barred_by=_UNCLIPPED
        ),
    },
    visited=_visited,
)
