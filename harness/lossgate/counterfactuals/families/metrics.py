# SPDX-License-Identifier: Apache-2.0
"""Metrics: put together wrongly from what each rank has."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Outputs
from lossgate.counterfactuals.setting import Setting
from lossgate.counterfactuals.shares import counts_of, masks_of
from lossgate.specs.outputs import metric_output
from lossgate.specs.spec import Spec


def metrics(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of each metric alone."""
    for name, metric in spec.metrics.items():
        for what, pool in _POOLS.items():
            if what == f"the {metric.reduction} of":
                continue
            for counts in ("whole", "own") if metric.reduction == "sum" else ("whole",):
                of = "what each rank has" if counts == "whole" else "what each rank has, by its own counts"
                yield mistake(
                    f"{name}: {what} ranks, {counts} counts",
                    f"metric {name} is {what} {of}",
                    "metric",
                    partial(_several, name),
                    f"take the {metric.reduction} over the ranks",
                    outputs=partial(_pooled, name, pool, counts == "own"),
                )


def _several(name: str, setting: Setting) -> bool:
    return metric_output(name) in setting.returned and len(setting.token_shards) > 1


def _first(parts: Tensor) -> Tensor:
    return parts[0]


def _mean_of_known(parts: Tensor) -> Tensor:
    known = parts[parts.isfinite()]
    return known.mean() if len(known) else parts[0]


def _last(parts: Tensor) -> Tensor:
    return parts[-1]


_POOLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the sum of": torch.sum,
    "the mean of": torch.mean,
    "the mean, where there is a token, of": _mean_of_known,
    "the min of": torch.amin,
    "the max of": torch.amax,
    "the first of": _first,
    "the last of": _last,
}


def _pooled(
    name: str, pool: Callable[[Tensor], Tensor], own_counts: bool, setting: Setting, outputs: Outputs
) -> Outputs:
    values, bound = setting.bound.dense.token_values(setting.bound_spec), setting.bound_spec
    parts: list[Tensor] = []
    for rank in range(len(setting.token_shards)):
        own = {**masks_of(setting, [rank]), **(counts_of(setting, [rank]) if own_counts else {})}
        with torch.no_grad():
            parts.append(bound.loss(values, {**setting.fields, **own})[1][name])
    return {**outputs, metric_output(name): pool(torch.stack(parts))}
