# SPDX-License-Identifier: Apache-2.0
"""Spec ``value``: the clipped squared error of a value model."""

import torch
from torch import Tensor

from dense_losses import value_loss
from lossgate.losses.shared.policy_gradients import Span, draw_in_spans
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.option import Option
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class ValueOptions(Options):
    """The options of spec ``value``. Names and defaults are NeMo-RL's.

    Raises:
        ValueError: if an option is out of range.
    """

    cliprange: float | None = option(
        None,
        "how far a value may move from its old value, in the unit of the values. None for no clip. NeMo-RL also"
        " takes 0 for no clip; here 0 is refused",
        choices=(None, 0.2, 0.5),
    )
    scale: float = option(
        1.0, "the factor of the loss, in addition to the 1/2. It does not scale metrics", choices=(1.0, 0.5)
    )
    epsilon: float = option(
        0.0,
        "added to the number of trained tokens, which divides the loss and the metrics; 1e-8 in NeMo-RL",
        choices=(0.0, 1e-8, 0.5),
    )

    def __post_init__(self) -> None:
        if self.cliprange is not None and not 0 < self.cliprange < float("inf"):
            raise ValueError(f"cliprange is {self.cliprange!r}; expected a finite positive number, or None for no clip")
        for name in ("scale", "epsilon"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a finite number, 0 or larger")


class ValueBatch(Batch):
    """The fields that the spec adds to a packed batch. A value belongs to its own token."""

    mask: Tensor = field("token", "the value is trained", dtype="bool", unshifted=True)
    old_values: Tensor = field("token", "the value of each token at the time of the rollout", unshifted=True)
    returns: Tensor = field("token", "the return of each token, which its value should be", unshifted=True)


def _draw(context: FieldContext) -> dict[str, Tensor]:
    """Draws old values from which values have moved within the clip range or beyond it, and returns
    on either side of them.
    """
    reach = context.options.cliprange or 0.2
    moves: list[Span] = [(-0.8 * reach, 0.8 * reach)]
    if context.scenario["values"] == "everywhere":
        moves += [(1.3 * reach, 3 * reach), (-3 * reach, -1.3 * reach)]
    old = context.logprobs - draw_in_spans(context.streams, "moves", context.tokens, moves)
    return {"old_values": old, "returns": old + (0.5 + 3 * reach) * context.streams.normal("returns", context.tokens)}


def _covered(batch: GlobalBatch, options: ValueOptions) -> set[str]:
    fields, reach = batch.fields, options.cliprange
    if reach is None:
        return set()
    trained = fields["mask"]
    moved = (batch.policy - fields["old_values"])[trained]
    nearer = (fields["returns"] - fields["old_values"])[trained] * moved > 0
    clamped = moved.abs() > reach
    tokens = {
        "beyond the range, towards the return": clamped & nearer,
        "beyond the range, away from the return": clamped & ~nearer,
        "inside the range": ~clamped,
    }
    return {goal for goal, reaching in tokens.items() if reaching.any()}


_UNCLIPPED = {"cliprange": (None,)}
_MEAN = "mean over trained tokens of"


def _loss_and_metrics(
    values: TokenValues, batch: ValueBatch, options: ValueOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = value_loss(
        values=values.logprobs,
        old_values=batch.old_values,
        returns=batch.returns,
        mask=batch.mask,
        valid_tokens=batch.valid_tokens,
        options=options,
    )
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _moved_by_clamped_distance(
    values: TokenValues, batch: ValueBatch, options: ValueOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clamps how far a value has moved, as OpenRLHF does, in place of the value."""
    plain, metrics = _loss_and_metrics(values, batch, options)
    if options.cliprange is None:
        return plain, metrics
    new, old, returns = (torch.where(batch.mask, x, 0.0) for x in (values.logprobs, batch.old_values, batch.returns))
    clipped = old + torch.clamp(new - old, -options.cliprange, options.cliprange)
    total = torch.maximum((new - returns) ** 2, (clipped - returns) ** 2).sum()
    count = batch.valid_tokens.to(new.dtype) + options.epsilon
    return options.scale / 2 * total / torch.where(count > 0, count, 1.0), metrics


@spec(
    "value",
    summary="clipped squared error of a value model",
    source="NeMo-RL MseValueLossFn",
    batch=ValueBatch,
    options=ValueOptions,
    heads=("values",),
    outputs=("loss",),
    draw=_draw,
    scenarios=(
        Option(
            name="values",
            meaning="how far values have moved from their old ones",
            default="inside",
            choices=("inside", "everywhere"),
        ),
    ),
    kinks=True,
    metrics={
        "vf_clipfrac": Metric(meaning="share of trained tokens whose clipped error is the larger"),
        "returns_mean": Metric(meaning=f"{_MEAN} the return"),
        "values_mean": Metric(meaning=f"{_MEAN} the value"),
        "returns_sq_mean": Metric(meaning=f"{_MEAN} the squared return"),
        "residual_sq_mean": Metric(meaning=f"{_MEAN} the squared difference of return and value"),
        "values_min": Metric(meaning="smallest value, inf without tokens", reduction="min"),
        "values_max": Metric(meaning="largest value, -inf without tokens", reduction="max"),
    },
    goals={
        "inside the range": CoverageGoal(meaning="a value inside the clip range", unreachable_if=_UNCLIPPED),
        "beyond the range, towards the return": CoverageGoal(
            meaning="a value beyond the clip range, nearer to its return", unreachable_if=_UNCLIPPED
        ),
        "beyond the range, away from the return": CoverageGoal(
            meaning="a value beyond the clip range, further from its return", unreachable_if=_UNCLIPPED
        ),
    },
    covered=_covered,
    also_written=(_moved_by_clamped_distance,),
)
def value(values: TokenValues, batch: ValueBatch, options: ValueOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of a value model."""
    return _loss_and_metrics(values, batch, options)
