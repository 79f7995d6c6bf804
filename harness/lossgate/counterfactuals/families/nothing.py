# SPDX-License-Identifier: Apache-2.0
"""Where nothing is trained, and a count that divides is 0: what is not a number then."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.chunks import chunks_of, knows_size
from lossgate.counterfactuals.families.sequence_sums import sums_sequences
from lossgate.counterfactuals.seams import Outputs
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec


def nothing_trained(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields divisions by a count of 0."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    for what, lacks in _LACKS.items():
        means = any(metric.reduction == "sum" for metric in spec.metrics.values())
        for also, kinds in _ALSO.items():
            if "metric" in kinds and not means:
                continue
            yield mistake(
                f"0 / 0 where {what} has no trained token{also}",
                f"a mean over {what} without a trained token is 0 / 0: the loss is not a number{also}",
                "count",
                partial(_lacks, lacks, kinds),
                "divide by at least 1",
                outputs=partial(_not_a_number, kinds),
            )


def _trains(setting: Setting) -> list[bool]:
    mask = setting.fields["mask"]
    return [bool(mask[own].any()) for own in setting.token_shards]


def _lacks_sequence(setting: Setting) -> bool:
    if not sums_sequences(setting):
        return False
    trained = setting.fields["sequence"][setting.fields["mask"]]
    return len(trained.unique()) < len(setting.lengths)


def _lacks_chunk(setting: Setting) -> bool:
    if not knows_size(setting):
        return False
    setting = setting.with_padding  # a chunk of padding alone trains nothing either
    mask = setting.fields["mask"]
    return any(not bool(mask[chunk].any()) for rank in chunks_of(setting) for chunk in rank)


_LACKS: Mapping[str, Callable[[Setting], bool]] = {
    "the batch": lambda setting: float(setting.fields["valid_tokens"]) == 0.0,
    "a rank": lambda setting: len(setting.token_shards) > 1 and not all(_trains(setting)),
    "a sequence": _lacks_sequence,
    "a chunk": _lacks_chunk,
}
"""Over what a mean is taken, and whether there is one without a trained token."""


_ALSO: Mapping[str, tuple[str, ...]] = {
    "": (),
    ", and so are the gradients": ("gradient",),
    ", and so are the metrics": ("metric",),
    ", and so are the metrics and the gradients": ("metric", "gradient"),
}
"""What else is not a number: in words, and the kinds of outputs."""


def _lacks(lacks: Callable[[Setting], bool], kinds: tuple[str, ...], setting: Setting) -> bool:
    if "metric" in kinds and not any(o.kind == "metric" and _is_mean(setting, o) for o in setting.returned):
        return False
    return lacks(setting)


def _not_a_number(kinds: tuple[str, ...], setting: Setting, outputs: Outputs) -> Outputs:
    return {
        o: torch.full_like(x, torch.nan) if o.name == "loss" or (o.kind in kinds and _is_mean(setting, o)) else x
        for o, x in outputs.items()
    }


def _is_mean(setting: Setting, output: Output) -> bool:
    """Returns whether an output is added up over ranks, as means are, and not an extremum."""
    return output.kind != "metric" or setting.spec.metrics[output.name].reduction == "sum"
