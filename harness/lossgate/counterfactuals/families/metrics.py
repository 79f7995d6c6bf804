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
    """Yields the mistakes of each metric alone, and of those that have no value without a token."""
    extremes = [name for name, metric in spec.metrics.items() if metric.reduction in ("min", "max")]
    groups = [[name] for name in extremes] + ([extremes] if len(extremes) > 1 else [])
    for group in groups:
        what = f"metric {group[0]}" if len(group) == 1 else "every metric that is a smallest or largest value"
        yield mistake(
            f"{'extremes' if len(group) > 1 else group[0]}: 0 of ranks without a token",
            f"{what} is 0 on a rank that has no token, and the ranks are compared with it",
            "metric",
            partial(_any_returned, tuple(group)),
            "return an infinity where there is no token",
            outputs=partial(_zeros_for_nothing, tuple(group)),
        )
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


def metrics_together(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of all metrics at once, and of all that are sums."""
    sums = tuple(name for name, metric in spec.metrics.items() if metric.reduction == "sum")
    groups = {"every metric": tuple(spec.metrics)}
    if len(sums) < len(spec.metrics):
        groups["every metric that is a sum"] = sums
    for group, names in groups.items():
        for what in ("the mean of", "the mean, where there is a token, of") if len(names) > 1 else ():
            for counts in ("whole", "own"):
                yield mistake(
                    f"{group}: {what} ranks, {counts} counts",
                    f"{group} is {what} what each rank has{', by its own counts' * (counts == 'own')}",
                    "metric",
                    partial(_several_of, names),
                    "add up sums and counts over the ranks, and take the smallest and largest of extremes",
                    outputs=partial(_pooled_together, names, _POOLS[what], counts == "own"),
                )


def _several_of(names: tuple[str, ...], setting: Setting) -> bool:
    return sum(_several(name, setting) for name in names) > 1


def _pooled_together(
    names: tuple[str, ...], pool: Callable[[Tensor], Tensor], own_counts: bool, setting: Setting, outputs: Outputs
) -> Outputs:
    for name in names:
        if _several(name, setting):
            own = own_counts and setting.spec.metrics[name].reduction == "sum"
            outputs = _pooled(name, pool, own, setting, outputs)
    return outputs


def _several(name: str, setting: Setting) -> bool:
    return metric_output(name) in setting.returned and len(setting.token_shards) > 1


def _first(parts: Tensor) -> Tensor:
    return parts[0]


def _mean_of_known(parts: Tensor) -> Tensor:
    known = parts[parts.isfinite()]
    return known.mean() if len(known) else parts[0]


def _last(parts: Tensor) -> Tensor:
    return parts[-1]


def _any_returned(names: tuple[str, ...], setting: Setting) -> bool:
    return any(_several(name, setting) for name in names)


def _zeros_for_nothing(names: tuple[str, ...], setting: Setting, outputs: Outputs) -> Outputs:
    for name in names:
        if _several(name, setting):
            pool = _ZERO_FOR_NOTHING[setting.spec.metrics[name].reduction]
            outputs = _pooled(name, pool, False, setting, outputs)
    return outputs


def _zero_for_nothing(pool: Callable[[Tensor], Tensor], parts: Tensor) -> Tensor:
    return pool(torch.where(parts.isfinite(), parts, 0.0))


_ZERO_FOR_NOTHING = {"min": partial(_zero_for_nothing, torch.amin), "max": partial(_zero_for_nothing, torch.amax)}
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
