# SPDX-License-Identifier: Apache-2.0
"""Mistakes of loops over chunks of tokens: a short last chunk, means of chunks, fields of the wrong
chunk. They can be found only if a candidate declares ``tiles``.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.batch_parts import fields_of_tokens, masks_of, named
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Part, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.spec import Spec

Chunks = list[list[Tensor]]
"""The numbers of the tokens in each chunk, by rank."""


def in_chunks() -> Mapping[str, tuple[str, Callable[[Setting], list[Part]]]]:
    """Returns the mistakes of adding up chunks by name, each with its sentence and its parts."""
    return {
        **{what: (sentence, partial(_added, tokens)) for what, (sentence, tokens) in _TWICE.items()},
        **{what: (sentence, partial(_left_out, tokens)) for what, (sentence, tokens) in _LOST.items()},
        "short last chunk as a full one": (
            "a last chunk that is shorter than the others counts as much as a full one",
            _short_as_full,
        ),
        **_MEANS,
    }


def chunks(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of loops over chunks of tokens."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    for what, (sentence, parts) in in_chunks().items():
        yield mistake(what, sentence, knows_size, _ADVICE.get(what, ""), padding=True, parts=parts)
    if head == "hidden":
        yield mistake(
            "hidden reduced in every chunk",
            "the whole gradient of hidden is summed over tp after every chunk: earlier chunks are summed again",
            lambda setting: knows_size(setting) and setting.size("tp") > 1,
            "sum it over tp once, after the last chunk",
            padding=True,
            leaves=_reduced_in_every_chunk,
        )
    for name in fields_of_tokens(spec, head):
        yield mistake(
            f"{name} of the first chunk",
            f"every chunk takes {named(name)} of the first chunk",
            knows_size,
            f"cut {named(name)} into the same chunks as the tokens",
            padding=True,
            fields=partial(_of_first_chunk, name),
        )
        for by, way in ((1, "late"), (-1, "early")):
            yield mistake(
                f"{name} one token {way} in each chunk",
                f"each chunk takes {named(name)} one token {way}, rolled within the chunk",
                knows_size,
                padding=True,
                fields=partial(_rolled, name, by),
            )


def _size(setting: Setting) -> int:
    return setting.tiles["token"][0]


def knows_size(setting: Setting) -> bool:
    """Returns whether the size of a chunk is known and the problem has a token.

    Ranks may have only one chunk each: most of these mistakes show there, too.
    """
    return len(setting.tiles.get("token", ())) == 1 and setting.tokens > 0


def chunks_of(setting: Setting) -> Chunks:
    """Returns the chunks of each rank, if their size is known."""
    return [list(own.split(_size(setting))) for own in setting.token_shards]


def _short_last(setting: Setting) -> list[Tensor]:
    """Returns the last chunk of each rank on which it is shorter than the others."""
    return [own[-1] for own in chunks_of(setting) if own and len(own[-1]) < _size(setting)]


def _before_short_last(setting: Setting) -> list[Tensor]:
    """Returns the tokens that a last chunk covers again if it is moved back to be full."""
    found: list[Tensor] = []
    for own in setting.token_shards:
        short = len(own) % _size(setting)
        if short and len(own) > _size(setting):
            found.append(own[len(own) - _size(setting) : len(own) - short])
    return found


def _last(setting: Setting) -> list[Tensor]:
    return [own[-1] for own in chunks_of(setting) if own]


def _all_but_last(setting: Setting) -> list[Tensor]:
    return [chunk for own in chunks_of(setting) for chunk in own[:-1]]


def _all_but_first(setting: Setting) -> list[Tensor]:
    return [chunk for own in chunks_of(setting) for chunk in own[1:]]


def _of_number(number: int, setting: Setting) -> list[Tensor]:
    return [chunk for own in chunks_of(setting) for chunk in own[number : number + 1]]


def _firsts(setting: Setting) -> list[Tensor]:
    return [chunk[:1] for own in chunks_of(setting) for chunk in own]


def _lasts(setting: Setting) -> list[Tensor]:
    return [chunk[-1:] for own in chunks_of(setting) for chunk in own]


_EARLY = tuple(enumerate(("first", "second", "third")))
"""The number of each early chunk, and its word."""
Chosen = Callable[[Setting], list[Tensor]]
_TWICE: Mapping[str, tuple[str, Chosen]] = {
    "tail of chunks twice": (
        "the last chunk is moved back to be full, and the tokens that it shares with the chunk before count twice",
        _before_short_last,
    ),
    "last chunk twice": ("the last chunk counts twice", _last),
    **{f"{which} chunk twice": (f"the {which} chunk counts twice", partial(_of_number, n)) for n, which in _EARLY},
}
_LOST: Mapping[str, tuple[str, Chosen]] = {
    "short last chunk left out": ("a last chunk that is shorter than the others is left out", _short_last),
    "last chunk left out": ("the last chunk is left out", _last),
    **{f"{which} chunk left out": (f"the {which} chunk is left out", partial(_of_number, n)) for n, which in _EARLY},
    "last chunk alone": ("the last chunk takes the place of the others, and is not added to them", _all_but_last),
    "first chunk alone": ("only the first chunk counts", _all_but_first),
    "first token of chunks left out": ("the first token of each chunk is left out", _firsts),
    "last token of chunks left out": ("the last token of each chunk is left out", _lasts),
}


def within(setting: Setting, tokens: list[Tensor]) -> Tensor:
    """Returns a mask ``[tokens]`` that is true at the tokens of some parts."""
    return setting.mask_of(torch.cat(tokens) if tokens else torch.tensor([], dtype=torch.long))


def _added(chosen: Chosen, setting: Setting) -> list[Part]:
    mask = setting.fields["mask"]
    return [(1.0, {}), (1.0, {"mask": mask & within(setting, chosen(setting))})]


def _left_out(chosen: Chosen, setting: Setting) -> list[Part]:
    return [(1.0, {"mask": setting.fields["mask"] & ~within(setting, chosen(setting))})]


def _short_as_full(setting: Setting) -> list[Part]:
    mask, parts = setting.fields["mask"], _left_out(_short_last, setting)
    for chunk in _short_last(setting):
        if len(chunk):
            parts.append((_size(setting) / len(chunk), {"mask": mask & within(setting, [chunk])}))
    return parts


def _mean_of_chunks(setting: Setting) -> list[Part]:
    of_ranks = chunks_of(setting)
    return [(1 / (len(own) * len(of_ranks)), alone(setting, chunk)) for own in of_ranks for chunk in own]


def _mean_of_chunks_by_length(setting: Setting) -> list[Part]:
    chunks = [chunk for own in chunks_of(setting) for chunk in own]
    held = sum(map(len, chunks))
    return [(len(chunk) / held, alone(setting, chunk)) for chunk in chunks]


def _mean_of_chunks_by_full_length(setting: Setting) -> list[Part]:
    held = sum(len(own) for own in setting.token_shards)
    return [(_size(setting) / held * weight, own) for weight, own in _means_of_chunks(setting)]


def _means_of_chunks(setting: Setting) -> list[Part]:
    return [(1.0, alone(setting, chunk)) for own in chunks_of(setting) for chunk in own]


def alone(setting: Setting, chunk: Tensor) -> Fields:
    """Returns the mask and the counts of a chunk."""
    mask = setting.fields["mask"] & within(setting, [chunk])
    return {"mask": mask, **setting.spec.counts({**setting.fields, "mask": mask})}


def _over_number(setting: Setting) -> list[Part]:
    return [(1 / max(len(own), 1), masks_of(setting, [rank])) for rank, own in enumerate(chunks_of(setting))]


_MEANS: Mapping[str, tuple[str, Callable[[Setting], list[Part]]]] = {
    "mean of chunks": (
        "each chunk is divided by its own trained tokens, and the chunks are averaged",
        _mean_of_chunks,
    ),
    "mean of chunks by length": (
        "each chunk is divided by its own trained tokens, and the chunks are averaged by their number of tokens",
        _mean_of_chunks_by_length,
    ),
    "mean of chunks by full length": (
        "each chunk is divided by its own trained tokens, and a short last chunk has the weight of a full one",
        _mean_of_chunks_by_full_length,
    ),
    "means of chunks added up": (
        "each chunk is divided by its own trained tokens, and the chunks are added up",
        _means_of_chunks,
    ),
    "divided by the number of chunks": ("each rank divides its result by its number of chunks", _over_number),
}
_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(_MEANS, "add up all chunks, and divide the sum once by the count that is given"),
    "divided by the number of chunks": "add up the chunks, and do not average them",
}


def _reduced_in_every_chunk(setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    times = torch.ones(setting.tokens, dtype=torch.float64)
    for own in chunks_of(setting):
        for number, chunk in enumerate(own):
            times[chunk] = float(setting.size("tp")) ** (len(own) - 1 - number)
    hidden = leaves["hidden"]
    return {**leaves, "hidden": with_gradient_of(hidden, hidden * times[:, None])}


def _of_first_chunk(name: str, setting: Setting) -> Fields:
    x, size = setting.fields[name].clone(), _size(setting)
    for own in setting.token_shards:
        x[own] = x[own[torch.arange(len(own)) % size]]
    return {name: x}


def _rolled(name: str, by: int, setting: Setting) -> Fields:
    x = setting.fields[name].clone()
    for own in chunks_of(setting):
        for chunk in own:
            x[chunk] = x[chunk].roll(by, 0)
    return {name: x}
