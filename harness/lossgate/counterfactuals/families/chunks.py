# SPDX-License-Identifier: Apache-2.0
"""Chunks of tokens in which a rank loops: the last one, short or moved back; what belongs to the
first one, taken for all. There are some if a candidate declares ``tiles``.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Part, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.counterfactuals.shares import masks_of
from lossgate.specs.spec import Spec

_EQUAL = (2, 3, 4, 8)
"""Into how many parts a kernel may cut what it has, whatever its size."""
_WEIGHED = (2, 4)
"""The same, where parts are weighed."""
Chunks = list[list[Tensor]]
"""The numbers of the tokens in each chunk, by rank."""


def in_chunks() -> Mapping[str, tuple[str, Callable[[Setting], list[Part]]]]:
    """Returns the mistakes in how chunks are put together, by name: in words, and the parts."""
    return {
        **{what: (sentence, partial(_added, tokens)) for what, (sentence, tokens) in _TWICE.items()},
        **{what: (sentence, partial(_left_out, tokens)) for what, (sentence, tokens) in _LOST.items()},
        **_MEANS,
    }


def chunks(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of loops over chunks of tokens."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    for what, (sentence, parts) in in_chunks().items():
        yield mistake(what, sentence, "chunk", knows_size, _TODO.get(what, ""), padding=True, parts=parts)
    if head == "hidden":
        yield mistake(
            "hidden reduced in every chunk",
            "the whole gradient of hidden is summed over tp after every chunk: earlier chunks are summed again",
            "chunk",
            lambda setting: knows_size(setting) and setting.size("tp") > 1,
            "sum it over tp once, after the last chunk",
            padding=True,
            leaves=_reduced_in_every_chunk,
        )
    own = [name for name, dims in spec.fields.items() if dims == ("token",)]
    for name in (*(("labels",) if head in ("hidden", "logits") else ()), "mask", *own):
        yield mistake(
            f"{name} of the first chunk",
            f"every chunk takes {'the mask' if name == 'mask' else name} of the first chunk",
            "chunk",
            knows_size,
            f"cut {'the mask' if name == 'mask' else name} as you cut the tokens",
            padding=True,
            fields=partial(_of_first_chunk, name),
        )
        for by, way in ((1, "late"), (-1, "early")):
            yield mistake(
                f"{name} one token {way} in each chunk",
                f"{'the mask' if name == 'mask' else name} is shifted by one token within each chunk, one {way}",
                "chunk",
                knows_size,
                padding=True,
                fields=partial(_rolled, name, by),
            )


def microbatches(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields means of means of parts into which each rank cuts what it has, whatever its size."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    for number in _EQUAL:
        for of, cut in _CUTS.items():
            for weighed, weights in _WEIGHTS.items():
                if weighed and number not in _WEIGHED:
                    continue
                yield mistake(
                    f"mean of {number} parts of {of}{weighed and f', by {weighed}'}",
                    f"each rank cuts its {of} into {number} parts, each is divided by its own trained tokens, and the "
                    f"parts are averaged{weighed and f', each weighed by its number of {weighed}'}",
                    "chunk",
                    todo="divide every part by the number that is given, and add the parts up",
                    padding=True,
                    parts=partial(_mean_of_parts, number, cut, weights),
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


def _mean_of_sequences(setting: Setting) -> list[Part]:
    ranks = len(setting.token_shards)
    cut = [_each_sequence(0, setting, rank) for rank in range(ranks)]
    return [(1 / (ranks * len(parts)), _alone(setting, part)) for parts in cut for part in parts]


def _by_tokens(number: int, setting: Setting, rank: int) -> list[Tensor]:
    return list(setting.token_shards[rank].tensor_split(number))


def _by_sequences(number: int, setting: Setting, rank: int) -> list[Tensor]:
    own, held = setting.partition.sequences(rank // setting.size("cp")), setting.token_shards[rank]
    parts, sequence = torch.arange(own.start, own.stop).tensor_split(number), setting.fields["sequence"][held]
    return [held[torch.isin(sequence, part)] for part in parts]


def _by_turns(number: int, setting: Setting, rank: int) -> list[Tensor]:
    held = setting.token_shards[rank]
    place = setting.fields["sequence"][held] - setting.partition.sequences(rank // setting.size("cp")).start
    return [held[place % number == turn] for turn in range(number)]


def _each_sequence(number: int, setting: Setting, rank: int) -> list[Tensor]:
    held = setting.token_shards[rank]
    own = setting.partition.sequences(rank // setting.size("cp"))
    return [held[setting.fields["sequence"][held] == sequence] for sequence in own]


_CUTS: Mapping[str, Callable[[int, Setting, int], list[Tensor]]] = {
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


def _mean_of_parts(
    number: int,
    cut: Callable[[int, Setting, int], list[Tensor]],
    weight: Callable[[Setting, Tensor], float],
    setting: Setting,
) -> list[Part]:
    parts = [part for rank in range(len(setting.token_shards)) for part in cut(number, setting, rank)]
    weights = [weight(setting, part) for part in parts]
    whole = max(sum(weights), 1.0)
    return [(own / whole, _alone(setting, part)) for own, part in zip(weights, parts, strict=True)]


def _size(setting: Setting) -> int:
    return setting.tiles["token"][0]


def knows_size(setting: Setting) -> bool:
    """Returns whether the size of a chunk is known, and there is a token.

    A rank with one chunk alone makes most of these mistakes, too.
    """
    return len(setting.tiles.get("token", ())) == 1 and setting.tokens > 0


def chunks_of(setting: Setting) -> Chunks:
    """Returns the chunks of each rank, if their size is known."""
    return [list(own.split(_size(setting))) for own in setting.token_shards]


def _short_last(setting: Setting) -> list[Tensor]:
    """Returns the last chunk of each rank where it is shorter than the others."""
    return [rank[-1] for rank in chunks_of(setting) if rank and len(rank[-1]) < _size(setting)]


def _before_short_last(setting: Setting) -> list[Tensor]:
    """Returns the tokens that a last chunk covers again if it is moved back to be full."""
    found: list[Tensor] = []
    for own in setting.token_shards:
        short = len(own) % _size(setting)
        if short and len(own) > _size(setting):
            found.append(own[len(own) - _size(setting) : len(own) - short])
    return found


def _last(setting: Setting) -> list[Tensor]:
    return [rank[-1] for rank in chunks_of(setting) if rank]


def _all_but_last(setting: Setting) -> list[Tensor]:
    return [chunk for rank in chunks_of(setting) for chunk in rank[:-1]]


def _all_but_first(setting: Setting) -> list[Tensor]:
    return [chunk for rank in chunks_of(setting) for chunk in rank[1:]]


def _firsts(setting: Setting) -> list[Tensor]:
    return [chunk[:1] for rank in chunks_of(setting) for chunk in rank]


def _lasts(setting: Setting) -> list[Tensor]:
    return [chunk[-1:] for rank in chunks_of(setting) for chunk in rank]


Chosen = Callable[[Setting], list[Tensor]]
_TWICE: Mapping[str, tuple[str, Chosen]] = {
    "tail of chunks twice": (
        "the last chunk is moved back to be full, and what it shares with the one before counts twice",
        _before_short_last,
    ),
    "last chunk twice": ("the last chunk counts twice", _last),
}
_LOST: Mapping[str, tuple[str, Chosen]] = {
    "short last chunk left out": ("a last chunk that is shorter than the others is left out", _short_last),
    "last chunk left out": ("the last chunk is left out", _last),
    "last chunk alone": ("the last chunk takes the place of the others, and is not added to them", _all_but_last),
    "first chunk alone": ("the first chunk alone counts", _all_but_first),
    "first token of chunks left out": ("the first token of each chunk is left out", _firsts),
    "last token of chunks left out": ("the last token of each chunk is left out", _lasts),
}


def _within(setting: Setting, tokens: list[Tensor]) -> Tensor:
    return setting.mask_of(torch.cat(tokens) if tokens else torch.tensor([], dtype=torch.long))


def _added(chosen: Chosen, setting: Setting) -> list[Part]:
    mask = setting.fields["mask"]
    return [(1.0, {}), (1.0, {"mask": mask & _within(setting, chosen(setting))})]


def _left_out(chosen: Chosen, setting: Setting) -> list[Part]:
    return [(1.0, {"mask": setting.fields["mask"] & ~_within(setting, chosen(setting))})]


def _mean_of_chunks(setting: Setting) -> list[Part]:
    ranks = chunks_of(setting)
    return [(1 / (len(rank) * len(ranks)), _alone(setting, chunk)) for rank in ranks for chunk in rank]


def _mean_of_chunks_by_length(setting: Setting) -> list[Part]:
    chunks = [chunk for rank in chunks_of(setting) for chunk in rank]
    held = sum(map(len, chunks))
    return [(len(chunk) / held, _alone(setting, chunk)) for chunk in chunks]


def _mean_of_chunks_by_full_length(setting: Setting) -> list[Part]:
    held = sum(len(own) for own in setting.token_shards)
    return [(_size(setting) / held * weight, own) for weight, own in _means_of_chunks(setting)]


def _means_of_chunks(setting: Setting) -> list[Part]:
    return [(1.0, _alone(setting, chunk)) for rank in chunks_of(setting) for chunk in rank]


def _alone(setting: Setting, chunk: Tensor) -> Fields:
    """Returns the mask and the counts of a chunk."""
    mask = setting.fields["mask"] & _within(setting, [chunk])
    return {"mask": mask, **setting.spec.counts({**setting.fields, "mask": mask})}


def _over_number(setting: Setting) -> list[Part]:
    masks = [masks_of(setting, [rank]) for rank in range(len(setting.token_shards))]
    return [(1 / max(len(rank), 1), own) for rank, own in zip(chunks_of(setting), masks, strict=True)]


_MEANS: Mapping[str, tuple[str, Callable[[Setting], list[Part]]]] = {
    "mean of chunks": (
        "each chunk is divided by its own trained tokens, and the chunks are averaged",
        _mean_of_chunks,
    ),
    "mean of chunks by length": (
        "each chunk is divided by its own trained tokens, and weighs as much as its share of all tokens",
        _mean_of_chunks_by_length,
    ),
    "mean of chunks by full length": (
        "each chunk is divided by its own trained tokens, and weighs as a full chunk does, though the last is short",
        _mean_of_chunks_by_full_length,
    ),
    "means of chunks added up": (
        "each chunk is divided by its own trained tokens, and the chunks are added up",
        _means_of_chunks,
    ),
    "divided by the number of chunks": ("each rank divides by its number of chunks", _over_number),
}
_TODO: Mapping[str, str] = {
    **dict.fromkeys(_MEANS, "add up all chunks, and divide once by the number that is given"),
    "divided by the number of chunks": "chunks of a sum are added up, and not averaged",
}


def _reduced_in_every_chunk(setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    times = torch.ones(setting.tokens, dtype=torch.float64)
    for rank in chunks_of(setting):
        for number, chunk in enumerate(rank):
            times[chunk] = float(setting.size("tp")) ** (len(rank) - 1 - number)
    hidden = leaves["hidden"]
    return {**leaves, "hidden": with_gradient_of(hidden, hidden * times[:, None])}


def _of_first_chunk(name: str, setting: Setting) -> Fields:
    x, size = setting.fields[name].clone(), _size(setting)
    for own in setting.token_shards:
        x[own] = x[own[torch.arange(len(own)) % size]]
    return {name: x}


def _rolled(name: str, by: int, setting: Setting) -> Fields:
    x = setting.fields[name].clone()
    for rank in chunks_of(setting):
        for chunk in rank:
            x[chunk] = x[chunk].roll(by, 0)
    return {name: x}
