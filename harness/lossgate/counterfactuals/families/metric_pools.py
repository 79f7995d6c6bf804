# SPDX-License-Identifier: Apache-2.0
"""Mistakes of metrics: the values of ranks are combined wrongly, or a metric has a mistake that the
loss does not have.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.batch_parts import all_true, bools, counts_of, masks_of, named, rank_by_rank, where_rows
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.families.chunks import in_chunks, knows_size
from lossgate.counterfactuals.families.microbatches import in_microbatches
from lossgate.counterfactuals.seams import Outputs, Part, Seams, run
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.outputs import metric_output
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def metrics(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes in metrics, which leave the loss as it is."""
    if head in ("hidden", "logits"):
        yield from (_of_first_tp_rank(name) for name in ("highest", "lowest") if name in spec.uses)
    of_ranks = [*_of_each(spec), *_of_several(spec)]
    yield from of_ranks
    if spec.reference is not None and spec.metrics:
        yield from _as_of_losses(spec, of_ranks)


def _of_first_tp_rank(name: str) -> Counterfactual:
    return mistake(
        f"{name} logit of the first tp rank",
        f"the {name} logit is that of the first rank of tp alone: it is not reduced over tp",
        split("tp"),
        f"take the {'max' if name == 'highest' else 'min'} over all ranks of tp",
        values=partial(_extreme_of_first_rank, name),
    )


def _extreme_of_first_rank(name: str, setting: Setting, values: TokenValues) -> TokenValues:
    logits = setting.bound_spec.capped(setting.head.logits(setting.batch.leaves)).detach()
    own = logits[:, setting.vocab_rows[0]]
    return values.replace(**{name: own.amax(-1) if name == "highest" else own.amin(-1)})


def _of_each(spec: Spec) -> Iterator[Counterfactual]:
    """Yields the mistakes of each metric alone, and of all extremes of ranks without a token."""
    extremes = [name for name, metric in spec.metrics.items() if metric.reduction in ("min", "max")]
    groups = [[name] for name in extremes] + ([extremes] if len(extremes) > 1 else [])
    for group in groups:
        called, what = group[0], f"metric {group[0]}"
        if len(group) > 1:
            called, what = "extremes", "every metric that is a min or max"
        yield mistake(
            f"{called}: 0 of ranks without a token",
            f"{what} is 0 on a rank without a token, and this 0 is compared with the values of the other ranks",
            partial(_any_returned, tuple(group)),
            "on a rank without a token, take inf for a min and -inf for a max",
            outputs=partial(_zeros_for_nothing, tuple(group)),
        )
    for name, metric in spec.metrics.items():
        for what, (words, pool) in _POOLS.items():
            if what == f"the {metric.reduction} of":
                continue
            for counts in _VALUES if metric.reduction == "sum" else ("whole",):
                yield mistake(
                    f"{name}: {what} ranks, {counts} counts",
                    f"metric {name} is {words.format(values=_VALUES[counts])}",
                    partial(_several, name),
                    f"take the {metric.reduction} over the ranks",
                    outputs=partial(_pooled, name, pool, counts == "own"),
                )


def _of_several(spec: Spec) -> Iterator[Counterfactual]:
    """Yields the mistakes of all metrics at once, and of all that are sums."""
    sums = tuple(name for name, metric in spec.metrics.items() if metric.reduction == "sum")
    groups = {"every metric": tuple(spec.metrics)}
    if len(sums) < len(spec.metrics):
        groups["every metric that is a sum"] = sums
    for group, names in groups.items():
        if len(names) < 2:
            continue
        for what in ("the mean of", "the mean, where there is a token, of"):
            words, pool = _POOLS[what]
            for counts in _VALUES:
                yield mistake(
                    f"{group}: {what} ranks, {counts} counts",
                    f"{group} is {words.format(values=_VALUES[counts])}",
                    partial(_several_of, names),
                    "take the sum of sums and counts over the ranks, and the min or max of extremes",
                    outputs=partial(_pooled_together, names, pool, counts == "own"),
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
_POOLS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "the sum of": ("the sum of {values}", torch.sum),
    "the mean of": ("the mean of {values}", torch.mean),
    "the mean, where there is a token, of": (
        "the mean of {values}, without the ranks that have no token",
        _mean_of_known,
    ),
    "the min of": ("the min of {values}", torch.amin),
    "the max of": ("the max of {values}", torch.amax),
    "the first of": ("the first of {values}", _first),
    "the last of": ("the last of {values}", _last),
}
"""The ways to combine the values of ranks, each in words and as a function."""
_VALUES = {"whole": "the values of the ranks", "own": "the values of the ranks, each with its own counts"}
"""The words for the values of ranks, which are computed with the whole counts or with their own."""


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


def _as_of_losses(spec: Spec, of_ranks: Iterable[Counterfactual]) -> Iterator[Counterfactual]:
    """Yields the mistakes of losses, made in metrics alone.

    Args:
        spec: a spec with metrics.
        of_ranks: the mistakes of combining the metrics of ranks.
    """
    for what, (sentence, seams, padding) in _mistakes(spec).items():
        yield Counterfactual(
            name=f"metrics: {what}",
            sentence=f"{{outputs}}: {sentence}",
            applies=_has_metrics,
            computed=partial(_in_metrics, seams),
            padding=padding,
        )
    # If each rank has one micro-batch, a mean of micro-batches is the mean of ranks, and named so.
    averaged = tuple(one for one in of_ranks if one.name.endswith("the mean of ranks, own counts"))
    if spec.trained_dim == "token":
        yield from _of_parts(in_chunks(), lambda setting: _has_metrics(setting) and knows_size(setting), ())
        yield from _of_parts(in_microbatches(), _has_metrics, averaged)
    for option in spec.options:
        if isinstance(option.default, float) and 0.0 in option.choices:
            for power, words in ((1, "multiplied"), (-1, "divided")):
                yield Counterfactual(
                    name=f"metrics: {words} by {option.name}",
                    sentence=f"{{outputs}}: {words} by {option.name}",
                    applies=_has_metrics,
                    computed=partial(_weighed, option.name, power),
                )


def _of_parts(
    mistakes: Mapping[str, tuple[str, Callable[[Setting], list[Part]]]],
    when: Callable[[Setting], bool],
    made_of: tuple[Counterfactual, ...],
) -> Iterator[Counterfactual]:
    """Yields mistakes of adding up chunks or micro-batches, made in metrics alone."""
    for what, (sentence, parts) in mistakes.items():
        yield Counterfactual(
            name=f"metrics: {what}",
            sentence=f"{{outputs}}: {sentence}",
            applies=when,
            computed=partial(_in_metrics, Seams(parts=parts)),
            padding=True,
            made_of=made_of,
        )


def _mistakes(spec: Spec) -> Mapping[str, tuple[str, Seams, bool]]:
    """Returns mistakes by name, each with its sentence, its stages and whether it has padding."""
    found: dict[str, tuple[str, Seams, bool]] = {}
    for name in bools(spec):
        seams = Seams(fields=partial(all_true, name))
        found[f"{name} ignored"] = f"{named(name)} is ignored", seams, False
        if spec.trained_dim == "token":
            found[f"{name} ignored, padding too"] = f"{named(name)} is ignored, and padding counts too", seams, True
    if spec.trained_dim == "token":
        own = "each rank of cp treats its own part of a sequence as a whole one"
        found["parts of own tokens"] = own, Seams(parts=_own_parts), False
        found["parts of own tokens, counted"] = f"{own}, and counts the parts", Seams(parts=_counted_parts), False
        found["masked tokens as 0"] = (
            "the values of masked tokens are set to 0, but not left out",
            Seams(fields=partial(all_true, "mask"), values=_zero_where_masked),
            False,
        )
    return found


def _weighed(option: str, power: int, setting: Setting) -> Outputs | None:
    weight = float(getattr(setting.bound_spec.options, option))
    if weight == 1.0 or (weight == 0.0 and power < 0):
        return None
    return {o: x * weight**power if o.kind == "metric" else x for o, x in run(setting).items()}


def _own_parts(setting: Setting) -> list[Part]:
    return list(rank_by_rank(setting, ("cp",), ()))


def _counted_parts(setting: Setting) -> list[Part]:
    own = [counts_of(setting, [rank]) for rank in range(len(setting.token_shards))]
    total = {name: torch.stack([counts[name] for counts in own]).sum(0) for name in own[0]}
    return [(weight, {**fields, **total}) for weight, fields in _own_parts(setting)]


def _zero_where_masked(setting: Setting, values: TokenValues) -> TokenValues:
    mask = setting.fields["mask"]
    return values.replace(**{name: where_rows(mask, x, 0.0) for name, x in values.given.items() if len(x) == len(mask)})


def _has_metrics(setting: Setting) -> bool:
    return any(output.kind == "metric" for output in setting.returned)


def _in_metrics(seams: Seams, setting: Setting) -> Outputs:
    right, wrong = run(setting), run(setting, seams)
    return {o: wrong.get(o, x) if o.kind == "metric" else x for o, x in right.items()}
