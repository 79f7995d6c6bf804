# SPDX-License-Identifier: Apache-2.0
"""Metrics with a mistake that the loss does not have: a mask ignored, a part of own tokens."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.chunks import in_chunks, knows_size
from lossgate.counterfactuals.families.masks import bools
from lossgate.counterfactuals.families.metrics import metrics, metrics_together
from lossgate.counterfactuals.families.microbatches import in_microbatches
from lossgate.counterfactuals.seams import RIGHT, Outputs, Part, Seams, run
from lossgate.counterfactuals.setting import Setting
from lossgate.counterfactuals.shares import counts_of, rank_by_rank
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def metrics_alone(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes in metrics, whichever are wrong."""
    if spec.reference is None or not spec.metrics:
        return
    for what, (sentence, seams, padding) in _mistakes(spec).items():
        yield Counterfactual(
            name=f"metrics: {what}",
            sentence=f"{{outputs}}: {sentence}",
            kind="metric",
            seams=RIGHT,
            applies=_has_metrics,
            computed=partial(_in_metrics, seams),
            padding=padding,
        )
    # Where a rank has one micro-batch, that says too much.
    of_ranks = [*metrics(spec, head), *metrics_together(spec, head)]
    averaged = tuple(one for one in of_ranks if one.name.endswith("the mean of ranks, own counts"))
    of_parts = [(knows_size, in_chunks(), ()), (lambda setting: True, in_microbatches(), averaged)]
    for when, parts_of, made_of in of_parts if spec.trained_dim == "token" else ():
        for what, (sentence, parts) in parts_of.items():
            yield Counterfactual(
                name=f"metrics: {what}",
                sentence=f"{{outputs}}: {sentence}",
                kind="metric",
                seams=RIGHT,
                applies=lambda setting, when=when: _has_metrics(setting) and when(setting),
                computed=partial(_in_metrics, Seams(parts=parts)),
                padding=True,
                made_of=made_of,
            )
    for option in spec.options:
        if isinstance(option.default, float) and 0.0 in option.choices:
            for power, words in ((1, "multiplied"), (-1, "divided")):
                yield Counterfactual(
                    name=f"metrics: {words} by {option.name}",
                    sentence=f"{{outputs}}: {words} by {option.name}",
                    kind="metric",
                    seams=RIGHT,
                    applies=_has_metrics,
                    computed=partial(_weighed, option.name, power),
                )


def _mistakes(spec: Spec) -> Mapping[str, tuple[str, Seams, bool]]:
    found: dict[str, tuple[str, Seams, bool]] = {}
    for name in bools(spec):
        seams = Seams(fields=partial(_all_true, name))
        what = "the mask" if name == "mask" else name
        found[f"{name} ignored"] = f"{what} is ignored", seams, False
        if spec.trained_dim == "token":
            found[f"{name} ignored, padding too"] = f"{what} is ignored, and padding counts too", seams, True
    if spec.trained_dim == "token":
        parts: Callable[[Setting], list[Part]] = _own_parts
        found["parts of own tokens"] = (
            "each rank of cp takes its own part of a sequence for a whole one",
            Seams(parts=parts),
            False,
        )
        counted: Callable[[Setting], list[Part]] = _counted_parts
        found["parts of own tokens, counted"] = (
            "each rank of cp takes its own part of a sequence for a whole one, and counts the parts",
            Seams(parts=counted),
            False,
        )
        found["masked tokens as 0"] = (
            "masked tokens are set to 0, and take part",
            Seams(fields=partial(_all_true, "mask"), values=_zero_where_masked),
            False,
        )
    return found


def _weighed(option: str, power: int, setting: Setting) -> Outputs | None:
    weight = float(getattr(setting.bound_spec.options, option))
    if weight == 1.0 or (weight == 0.0 and power < 0):
        return None
    return {o: x * weight**power if o.kind == "metric" else x for o, x in run(setting).items()}


def _all_true(name: str, setting: Setting) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(setting.fields[name])}


def _own_parts(setting: Setting) -> list[Part]:
    return list(rank_by_rank(setting, ("cp",), ()))


def _counted_parts(setting: Setting) -> list[Part]:
    own = [counts_of(setting, [rank]) for rank in range(len(setting.token_shards))]
    total = {name: torch.stack([counts[name] for counts in own]).sum(0) for name in own[0]}
    return [(weight, {**fields, **total}) for weight, fields in _own_parts(setting)]


def _zero_where_masked(setting: Setting, values: TokenValues) -> TokenValues:
    mask = setting.fields["mask"]
    return values.replace(
        **{
            name: torch.where(mask.reshape(-1, *[1] * (x.dim() - 1)), x, 0.0)
            for name, x in values.given.items()
            if len(x) == len(mask)
        }
    )


def _has_metrics(setting: Setting) -> bool:
    return any(output.kind == "metric" for output in setting.returned)


def _in_metrics(seams: Seams, setting: Setting) -> Outputs:
    right, wrong = run(setting), run(setting, seams)
    return {o: wrong.get(o, x) if o.kind == "metric" else x for o, x in right.items()}
