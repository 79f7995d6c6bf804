# SPDX-License-Identifier: Apache-2.0
"""Mistakes of micro-batches, and of other parts into which a rank cuts its tokens or sequences.

The number and the size of the parts are not declared, so usual ones are tried.
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
"""The numbers of parts that are tried."""
_WEIGHED = (2, 4)
"""The numbers of parts that are tried if the parts are weighed."""
_SIZES = (2, 4)
"""The numbers of sequences in a micro-batch that are tried."""


def microbatches(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a loss of which each part is divided by its own count, or of which
    parts are lost.
    """
    if spec.reference is None or spec.trained_dim != "token":
        return
    for number in _NUMBERS:
        for of, (words, cut) in _CUTS.items():
            for by, (weighed, weight) in _WEIGHTS.items():
                if not by or number in _WEIGHED:
                    yield mistake(
                        f"mean of {number} parts of {of}{by}",
                        f"each rank {words} {number} parts, each part is divided by its own trained tokens, and "
                        f"the parts are averaged{weighed}",
                        todo="divide every part by the count that is given, and add the parts up",
                        padding=True,
                        parts=partial(_mean_of_parts, number, cut, weight),
                    )
    for size in _SIZES:
        for by, (weighed, weight) in _WEIGHTS.items():
            yield mistake(
                f"mean of micro-batches of {size} sequences{by}",
                f"{size} sequences make a micro-batch, each rank divides its part by its own trained tokens, and "
                f"micro-batches are averaged{weighed}",
                todo="divide every micro-batch by the count that is given, and add them up",
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
        "each sequence is divided by its own trained tokens, and the sequences with a trained token are averaged over "
        "the batch",
        todo="divide every sequence by the count that is given, and add them up",
        parts=_mean_of_trained_sequences,
    )
    yield mistake(
        "mean of the means of each rank's sequences",
        "each sequence is divided by its own trained tokens, each rank averages its sequences, empty ones included, "
        "and the ranks are averaged",
        todo="divide every sequence by the count that is given, and add them up",
        padding=True,
        parts=_mean_of_sequences,
    )


def _made_of(size: int) -> str:
    return "each sequence makes" if size == 1 else f"{size} sequences make"


def in_microbatches() -> Mapping[str, tuple[str, Callable[[Setting], list[Part]]]]:
    """Returns the means of micro-batches by name, each with its sentence and its parts."""
    found: dict[str, tuple[str, Callable[[Setting], list[Part]]]] = {}
    for size in (1, *_SIZES):
        name = f"mean of micro-batches of {'one sequence' if size == 1 else f'{size} sequences'}"
        sentence = (
            f"{_made_of(size)} a micro-batch, each rank divides its part by its own trained tokens, and micro-batches "
            "are averaged"
        )
        found[name] = sentence, partial(_mean_of_parts, size, _of_size, _equal)
    return found


Tokens = Tensor
"""The numbers of some tokens."""
Sequences = Tensor
"""The numbers of some sequences, which may be empty."""
Cut = Callable[[int, Setting, int], list[tuple[Tokens, Sequences]]]
"""Gets the number of parts, or of sequences in a part, the problem and the rank. Returns the parts
of the rank."""


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


_CUTS: Mapping[str, tuple[str, Cut]] = {
    "tokens": ("cuts its tokens into", _by_tokens),
    "sequences": ("cuts its sequences into", _by_sequences),
    "sequences in turns": ("deals out its sequences in turn to", _by_turns),
}
"""The ways to cut the tokens or sequences of a rank, each in words and as a function."""
Weight = Callable[[Tokens, Sequences], float]


def _equal(tokens: Tokens, sequences: Sequences) -> float:
    return 1.0


_WEIGHTS: Mapping[str, tuple[str, Weight]] = {
    "": ("", _equal),
    ", by tokens": (", each weighed by its number of tokens", lambda tokens, sequences: float(len(tokens))),
    ", by sequences": (", each weighed by its number of sequences", lambda tokens, sequences: float(len(sequences))),
}
"""The weights that the means of parts may have, in words and as a function."""
_KEPT: Mapping[str, tuple[str, slice]] = {
    "the last alone": ("keeps only its last one", slice(-1, None)),
    "the first alone": ("keeps only its first one", slice(1)),
    "the last left out": ("leaves out its last one", slice(-1)),
}
"""The micro-batches that a kernel may keep, each in words and as a slice."""


def _mean_of_parts(number: int, cut: Cut, weight: Weight, setting: Setting) -> list[Part]:
    parts = [part for rank in range(len(setting.token_shards)) for part in cut(number, setting, rank)]
    total = max(sum(weight(*part) for part in parts), 1.0)
    return [(weight(tokens, sequences) / total, alone(setting, tokens)) for tokens, sequences in parts]


def _of_some(size: int, kept: slice, setting: Setting) -> list[Part]:
    ranks = range(len(setting.token_shards))
    tokens = [own for rank in ranks for own, _ in _of_size(size, setting, rank)[kept]]
    return [(1.0, {"mask": setting.fields["mask"] & within(setting, tokens)})]


def _mean_of_trained_sequences(setting: Setting) -> list[Part]:
    sequence = setting.fields["sequence"]
    trained = sequence[setting.spec.trained_of(setting.fields)].unique()
    parts = [(1 / len(trained), alone(setting, (sequence == own).nonzero().squeeze(1))) for own in trained]
    return parts or [(1.0, {})]


def _mean_of_sequences(setting: Setting) -> list[Part]:
    ranks, parts = len(setting.token_shards), list[Part]()
    for rank in range(ranks):
        sequences = _sequences(setting, rank).split(1)
        for sequence in sequences:
            parts.append((1 / (ranks * len(sequences)), alone(setting, _held(sequence, setting, rank))))
    return parts
