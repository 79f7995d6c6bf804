# SPDX-License-Identifier: Apache-2.0
"""Checks what a reference returns."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.specs.metric import Metric
from lossgate.specs.outputs import Output
from lossgate.specs.terms import Terms
from lossgate.specs.users_code import shown, told_as


def loss_and_metrics(returned: Any, who: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the metrics of what a reference returned.

    Args:
        returned: by the reference.
        who: how messages begin.

    Raises:
        UsageError: if it is no loss, loss and metrics, or ``Terms``.
    """
    if isinstance(returned, Terms):
        with told_as(f"{who} returned terms that"):
            return returned.loss, dict(returned.metrics)
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"{who} returned {type(returned).__name__}; expected the loss as a tensor, (loss, metrics) or "
            "lossgate.Terms(...)"
        )
    return loss, checked_mapping(metrics, who)


def checked_mapping(metrics: Any, who: str) -> dict[str, Tensor]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f"{who} returned metrics as {type(metrics).__name__}; expected a dict of scalars by name")
    return dict(metrics)


def check_scalars(loss: Any, metrics: Mapping[str, Any], dtype: torch.dtype, who: str) -> None:
    """Checks that loss and metrics are scalars, and in the dtype of the values per token."""
    for name, scalar in (("", loss), *metrics.items()):
        if isinstance(scalar, Tensor) and not scalar.dim() and scalar.dtype == dtype:
            continue
        what = f"metric {name!r}" if name else "loss"
        if not isinstance(scalar, Tensor) or scalar.dim():
            raise UsageError(f"{who} returned {what} as {shown(scalar)}; expected a scalar tensor: add up entries")
        got, own = (str(one).removeprefix("torch.") for one in (scalar.dtype, dtype))
        raise UsageError(
            f"{who} returned {what} in {got}, and computes in {own}; in torch a count divided by a count is "
            "float32: write count.to(values.logprobs) / total, or whatever else it is computed from"
        )


def check_metrics(
    metrics: Mapping[str, Any], declared: Mapping[str, Metric], returned: Collection[Output], who: str
) -> None:
    """Checks that the reference has given what it declares, and what a candidate returns."""
    for name in metrics:
        if name not in declared:
            raise UsageError(f"{who} returned metric {name!r}, which metrics= lacks; {nearest(str(name), declared)}")
    if missing := [output.name for output in returned if output.kind == "metric" and output.name not in metrics]:
        raise UsageError(f"{who} did not return metric {missing[0]!r}, which the candidate returns; return it, too")
