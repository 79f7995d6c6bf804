# SPDX-License-Identifier: Apache-2.0
"""Means of means of parts into which each rank cuts what it has, such as micro-batches. Nobody
declares their number, so some are tried.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.chunks import alone, within
from lossgate.counterfactuals.seams import Part
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec

_NUMBERS = (2, 3, 4, 8)
"""Into how many parts a kernel may cut what it has, whatever its size."""
_WEIGHED = (2, 4)
"""The same, where parts are weighed."""
_SIZES = (2, 4)
"""How many sequences may make a micro-batch."""


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
                        todo="divide every part by the number that is given, and add the parts up",
                        padding=True,
                        parts=partial(_mean_of_parts, number, cut, weight),
                    )
    for size in _SIZES:
        for weighed, weight in _WEIGHTS.items():
            yield mistake(
                f"mean of micro-batches of {size} sequences{weighed and f', by {weighed}'}",
                f"{size} sequences make a micro-batch, each rank divides its part by its own trained tokens, and "
                f"micro-batches are averaged{weighed and f', each weighed by its number of {weighed}'}",
                todo="divide every micro-batch by the number that is given, and add them up",
                padding=True,
                parts=partial(_mean_of_parts, size, _of_size, weight),
            )
    for size in (1, *_SIZES):
        for which, (words, kept) in _KEPT.items():
            yield mistake(
                f"{which} of micro-batches of {'one sequence' if size == 1 else f'{size} sequences'}",
                f"{_made_of(size)} a micro-batch, and each rank {words}",
                todo="add up all micro-batches, and set nothing to zero between them",
                padding=True,
                parts=partial(_of_some, size, kept),
            )
    yield mistake(
        "mean of the means of sequences that train a token",
        "each sequence is divided by its own trained tokens, and sequences that have some are averaged over the batch",
        todo="divide every sequence by the number that is given, and add them up",
        parts=_mean_of_trained_sequences,
    )
    yield mistake(
        "mean of the means of each rank's sequences",
        "each sequence is divided by its own trained tokens, and each rank averages its sequences, empty ones too; the "
        "ranks are averaged",
        todo="divide every sequence by the number that is given, and add them up",
        padding=True,
        parts=_mean_of_sequences,
    )


def _made_of(size: int) -> str:
    return "each sequence makes" if size == 1 else f"{size} sequences make"


def in_microbatches() -> Mapping[str, tuple[str, Callable[[Setting], list[Part]]]]:
    """Returns the means of means over micro-batches, for metrics alone: in words, and the parts."""
    return {
        f"mean of micro-batches of {'one sequence' if size == 1 else f'{size} sequences'}": (
            (
                f"{_made_of(size)} a micro-batch, each rank divides its part by its own trained tokens, and "
                "micro-batches are averaged"
            ),
            partial(_mean_of_parts, size, _of_size, _WEIGHTS[""]),
        )
        for size in (1, *_SIZES)
    }


Tokens = Tensor
"""The numbers of some tokens."""
Sequences = Tensor
"""The numbers of some sequences, which may be empty."""
Cut = Callable[[int, Setting, int], list[tuple[Tokens, Sequences]]]
"""Gets a number of parts, or of sequences in a part, the problem and the rank, and returns the
parts of what the rank has."""


def _by_tokens(number: int, setting: Setting, rank: int) -> list[tuple[Tokens, Sequences]]:
    sequence = setting.fields["sequence"]
    return [(own, sequence[own].unique()) for own in setting.token_shards[rank].tensor_split(number)]


def _by_sequences(number: int, setting: Setting, rank: int) -> list[tuple[Tokens, Sequences]]:
    return [(_held(part, setting, rank), part) for part in _sequences(setting, rank).tensor_split(number)]


def _by_turns(number: int, setting: Setting, rank: int) -> list[tuple[Tokens, Sequences]]:
    own = _sequences(setting, rank)
    return [(_held(own[turn::number], setting, rank), own[turn::number]) for turn in range(number)]


def _of_size(size: int, setting: Setting, rank: int) -> list[tuple[Tokens, Sequences]]:
    own = _sequences(setting, rank)
    return [(_held(part, setting, rank), part) for part in own.split(size) if len(part)]


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
Weight = Callable[[Tokens, Sequences], float]
_WEIGHTS: Mapping[str, Weight] = {
    "": lambda tokens, sequences: 1.0,
    "tokens": lambda tokens, sequences: float(len(tokens)),
    "sequences": lambda tokens, sequences: float(len(sequences)),
}
"""What the mean of a part may be weighed by."""
_KEPT: Mapping[str, tuple[str, slice]] = {
    "the last alone": ("keeps the last one alone", slice(-1, None)),
    "the first alone": ("keeps the first one alone", slice(1)),
    "the last left out": ("leaves out the last one", slice(-1)),
}
"""Which micro-batches may be left: in words, and which."""


def _mean_of_parts(number: int, cut: Cut, weight: Weight, setting: Setting) -> list[Part]:
    parts = [part for rank in range(len(setting.token_shards)) for part in cut(number, setting, rank)]
    weights = [weight(*part) for part in parts]
    whole = max(sum(weights), 1.0)
    return [(own / whole, alone(setting, tokens)) for own, (tokens, _) in zip(weights, parts, strict=True)]


def _of_some(size: int, kept: slice, setting: Setting) -> list[Part]:
    ranks = range(len(setting.token_shards))
    tokens = [own for rank in ranks for own, _ in _of_size(size, setting, rank)[kept]]
    return [(1.0, {"mask": setting.fields["mask"] & within(setting, tokens)})]


def _mean_of_trained_sequences(setting: Setting) -> list[Part]:
    sequence = setting.fields["sequence"]
    trained = sequence[setting.spec.trained_of(setting.fields)].unique()
    parts = [(1 / len(trained), alone(setting, (sequence == one).nonzero().squeeze(1))) for one in trained]
    return parts or [(1.0, {})]


def _mean_of_sequences(setting: Setting) -> list[Part]:
    ranks = range(len(setting.token_shards))
    of_ranks = [_sequences(setting, rank).split(1) for rank in ranks]
    return [
        (1 / (len(ranks) * len(own)), alone(setting, _held(sequence, setting, rank)))
        for rank, own in zip(ranks, of_ranks, strict=True)
        for sequence in own
    ]
