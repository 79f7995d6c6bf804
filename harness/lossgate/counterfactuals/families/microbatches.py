# SPDX-License-Identifier: Apache-2.0
"""Means of means of parts into which each rank cuts what it has, such as micro-batches. Nobody
declares their number, so some are tried.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.chunks import alone
from lossgate.counterfactuals.seams import Part
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec

_NUMBERS = (2, 3, 4, 8)
"""Into how many parts a kernel may cut what it has, whatever its size."""
_WEIGHED = (2, 4)
"""The same, where parts are weighed."""


def microbatches(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields what becomes of a loss whose parts are divided each by its own count."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    for number in _NUMBERS:
        for of, cut in _CUTS.items():
            for weighed, weight in _WEIGHTS.items():
                if not weighed or number in _WEIGHED:
                    yield mistake(
                        f"mean of {number} parts of {of}{weighed and f', by {weighed}'}",
                        f"each rank cuts its {of} into {number} parts, each is divided by its own trained tokens, and "
                        f"the parts are averaged{weighed and f', each weighed by its number of {weighed}'}",
                        "chunk",
                        todo="divide every part by the number that is given, and add the parts up",
                        padding=True,
                        parts=partial(_mean_of_parts, number, cut, weight),
                    )
    yield mistake(
        "mean of the means of each rank's sequences",
        "each sequence is divided by its own trained tokens, and each rank averages its sequences, empty ones too; the "
        "ranks are averaged",
        "chunk",
        todo="divide every sequence by the number that is given, and add them up",
        padding=True,
        parts=_mean_of_sequences,
    )


Cut = Callable[[int, Setting, int], list[Tensor]]
"""Gets the number of parts, the problem and the rank, and returns the tokens of each part."""


def _by_tokens(number: int, setting: Setting, rank: int) -> list[Tensor]:
    return list(setting.token_shards[rank].tensor_split(number))


def _by_sequences(number: int, setting: Setting, rank: int) -> list[Tensor]:
    return [_held(part, setting, rank) for part in _sequences(setting, rank).tensor_split(number)]


def _by_turns(number: int, setting: Setting, rank: int) -> list[Tensor]:
    own = _sequences(setting, rank)
    return [_held(own[turn::number], setting, rank) for turn in range(number)]


def _sequences(setting: Setting, rank: int) -> Tensor:
    own = setting.partition.sequences(rank // setting.size("cp"))
    return torch.arange(own.start, own.stop)


def _held(sequences: Tensor, setting: Setting, rank: int) -> Tensor:
    """Returns the tokens that a rank holds of some sequences."""
    held = setting.token_shards[rank]
    return held[torch.isin(setting.fields["sequence"][held], sequences)]


_CUTS: Mapping[str, Cut] = {
    "tokens": _by_tokens,
    "sequences": _by_sequences,
    "sequences in turns": _by_turns,
}
_WEIGHTS: Mapping[str, Callable[[Setting, Tensor], float]] = {
    "": lambda setting, tokens: 1.0,
    "tokens": lambda setting, tokens: float(len(tokens)),
    "sequences": lambda setting, tokens: float(len(setting.fields["sequence"][tokens].unique())),
}
"""What the mean of a part may be weighed by."""


def _mean_of_parts(number: int, cut: Cut, weight: Callable[[Setting, Tensor], float], setting: Setting) -> list[Part]:
    parts = [part for rank in range(len(setting.token_shards)) for part in cut(number, setting, rank)]
    weights = [weight(setting, part) for part in parts]
    whole = max(sum(weights), 1.0)
    return [(own / whole, alone(setting, part)) for own, part in zip(weights, parts, strict=True)]


def _mean_of_sequences(setting: Setting) -> list[Part]:
    ranks = range(len(setting.token_shards))
    of_ranks = [_sequences(setting, rank).split(1) for rank in ranks]
    return [
        (1 / (len(ranks) * len(own)), alone(setting, _held(sequence, setting, rank)))
        for rank, own in zip(ranks, of_ranks, strict=True)
        for sequence in own
    ]
