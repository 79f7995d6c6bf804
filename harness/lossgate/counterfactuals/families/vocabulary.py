# SPDX-License-Identifier: Apache-2.0
"""Mistakes of shards and tiles of a vocabulary: a label is looked up at the wrong place, or sums of
tiles are combined wrongly.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.families.softmax import rebuilt
from lossgate.counterfactuals.seams import picked_logit, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec


def vocabulary(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of shards over tp and of tiles within a rank."""
    if head not in ("hidden", "logits"):
        return
    yield mistake(
        "padding rows in the softmax",
        "the padding rows of a tp rank's vocabulary take part in the softmax",
        lambda setting: any(shard.padding for shard in setting.vocab_shards),
        "leave out the rows after the end of the shard, or set their logits to -inf",
        project=_with_padding_rows,
    )
    if "logprobs" in spec.uses:
        for where, below_largest in (("", False), (" (in logits from which the largest was subtracted)", True)):
            yield mistake(
                f"shard's start by its own width{where}",
                f"a tp rank takes its rank times its own number of rows for the first row of its vocabulary{where}",
                split("tp"),
                "use the start of the shard that is given: shards may differ in size",
                picked=partial(_by_own_width, below_largest),
            )
        yield mistake(
            "one-hot on the first row of other shards in backward",
            "in backward a tp rank without the label subtracts the one-hot entry from its own first row",
            split("tp"),
            "mask the one-hot entry on ranks that do not have the label",
            picked=_first_rows_too,
        )
        for what, backward in ((", in forward alone", False), ("", True)):
            yield mistake(
                f"labels of other shards clamped{what}",
                f"a tp rank without the label adds the logit of its own row that is nearest to the label{what}",
                split("tp"),
                "set the logit to 0 on ranks that do not have the label, before it is summed over tp",
                picked=partial(_clamped, backward),
            )
        yield from _LABEL_EDGES
        for what, (words, combine) in _TILES.items():
            yield mistake(f"vocabulary tiles: {what}", words, _has_tiles, logsumexp=combine)
            yield mistake(
                f"vocabulary tiles: {what}, softmax rebuilt",
                f"{words}, and backward rebuilds the softmax from the wrong sum",
                _has_tiles,
                logsumexp=partial(rebuilt, combine),
            )


def _with_padding_rows(setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    rows: dict[str, Tensor] = {}
    for name, padding in setting.placed.batch.vocab_padding.items():
        if name in leaves:
            without_padded_tokens = padding[setting.partition.real_tokens] if name == "logits" else padding
            rows[name] = without_padded_tokens.to(torch.float64)
    logits = setting.head.logits({**leaves, **rows})
    of_shards = [logits[:, : shard.padding] for shard in setting.vocab_shards]
    return torch.cat([setting.head.logits(leaves), *of_shards], 1)


def _by_own_width(below_largest: bool, setting: Setting, z: Tensor) -> Tensor:
    """Returns the labels' logits, summed over tp ranks that start their shard at the wrong row.

    A label that no rank finds gets 0, or the largest logit if that is subtracted first.
    """
    labels = setting.fields["labels"]
    base = z.detach().amax(1) if below_largest else torch.zeros(len(z), dtype=z.dtype)
    total = base
    for rank, shard in enumerate(setting.vocab_shards):
        local = labels - rank * shard.rows  # the mistake: right is labels - shard.start
        is_found = (local >= 0) & (local < shard.end - shard.start)
        row = (local.clamp(min=0) + shard.start).clamp(max=z.shape[1] - 1)  # in range, if not found too
        picked = z.gather(-1, row[:, None]).squeeze(-1)
        total = total + torch.where(is_found, picked - base, 0.0)
    return total


def _first_rows_too(setting: Setting, z: Tensor) -> Tensor:
    labels, picked = setting.fields["labels"], picked_logit(setting, z)
    wrong = picked
    for rows in setting.vocab_rows:
        has_label = (labels >= rows.start) & (labels < rows.stop)
        wrong = wrong + torch.where(has_label, 0.0, z[:, rows.start])
    return with_gradient_of(picked, wrong)


def _clamped(backward: bool, setting: Setting, z: Tensor) -> Tensor:
    labels, right = setting.fields["labels"][:, None], picked_logit(setting, z)
    own = [z.gather(-1, labels.clamp(rows.start, rows.stop - 1)).squeeze(-1) for rows in setting.vocab_rows]
    added = torch.stack(own).sum(0)
    return added if backward else with_gradient_of(added, right)


def _has_tiles(setting: Setting) -> bool:
    """Returns whether the size of vocabulary tiles is known, and a rank holds more than a tile."""
    sizes = setting.tiles.get("vocab", ())
    return len(sizes) == 1 and any(rows.stop - rows.start > sizes[0] for rows in setting.vocab_rows)


def _tiles(setting: Setting, z: Tensor) -> list[list[Tensor]]:
    return [list(z[:, rows].split(setting.tiles["vocab"][0], 1)) for rows in setting.vocab_rows]


def _not_rescaled(setting: Setting, z: Tensor) -> Tensor:
    """Returns a logsumexp of sums of tiles that subtract different largest logits."""
    of_ranks: list[Tensor] = []
    for tiles in _tiles(setting, z):
        largest, total = torch.full_like(z[:, 0], -torch.inf), torch.zeros_like(z[:, 0])
        for tile in tiles:
            largest = torch.maximum(largest, tile.detach().amax(1))
            total = total + (tile - largest[:, None]).exp().sum(1)
        of_ranks.append(total.log() + largest)
    return torch.stack(of_ranks).logsumexp(0)


def _without_last(setting: Setting, z: Tensor) -> Tensor:
    return torch.cat([tile for tiles in _tiles(setting, z) for tile in tiles[:-1]], 1).logsumexp(1)


def _without_short(setting: Setting, z: Tensor) -> Tensor:
    size = setting.tiles["vocab"][0]
    return torch.cat([tile for tiles in _tiles(setting, z) for tile in tiles if tile.shape[1] == size], 1).logsumexp(1)


def _filled_with_zeros(setting: Setting, z: Tensor) -> Tensor:
    size = setting.tiles["vocab"][0]
    missing = sum(size - tiles[-1].shape[1] for tiles in _tiles(setting, z))
    return torch.cat([z, z.new_zeros(len(z), missing)], 1).logsumexp(1)


_TILES = {
    "sums not rescaled": (
        "when a tile of the vocabulary has a larger logit, the sum of exponentials so far is not rescaled to it",
        _not_rescaled,
    ),
    "the last left out": ("the last tile of each rank's vocabulary is left out of the softmax", _without_last),
    "a short one left out": (
        "a last tile of the vocabulary that is shorter than the others is left out of the softmax",
        _without_short,
    ),
    "filled with zeros": (
        "a short tile of the vocabulary is filled with logits of 0, which take part in the softmax",
        _filled_with_zeros,
    ),
}
"""The mistakes of tiles of the vocabulary: in words, and as the logsumexp that they compute."""


def _found_on_first(axis: Axis, setting: Setting, z: Tensor) -> Tensor:
    first = [own for own, at in zip(setting.token_shards, setting.coordinates, strict=True) if at[axis] == 0]
    return torch.where(setting.mask_of(torch.cat(first)), picked_logit(setting, z), 0.0)


def _lost(row: str, backward_only: bool, setting: Setting, z: Tensor) -> Tensor:
    edges = [s.start if row == "first" else s.end - 1 for s in setting.vocab_shards if s.end > s.start]
    lost = torch.isin(setting.fields["labels"], torch.tensor(edges))
    picked = picked_logit(setting, z)
    gone = torch.where(lost, 0.0, picked)
    return with_gradient_of(picked, gone) if backward_only else gone


def _found_twice(setting: Setting, z: Tensor, *, below_largest: bool = False) -> Tensor:
    labels, picked = setting.fields["labels"], picked_logit(setting, z)
    starts = [s.start for s in setting.vocab_shards if s.end > s.start and s.start]
    twice = torch.isin(labels, torch.tensor(starts, dtype=torch.long))
    before = z.gather(-1, (labels - 1).clamp(min=0)[:, None]).squeeze(-1)
    if below_largest:
        before = before - z.detach().amax(-1)
    return picked + torch.where(twice, before, 0.0)


_COMPARE = "compare with start <= label < end of the shard"
_TOKEN_AXES: tuple[Axis, ...] = ("dp", "cp")
_LABEL_EDGES = (
    *(
        mistake(
            f"label on a shard's {row} row lost{side}",
            f"a label on the {row} row of a tp rank's vocabulary is not found{side}: its logit counts as 0",
            split("tp"),
            _COMPARE,
            picked=partial(_lost, row, bool(side)),
        )
        for row in ("first", "last")
        for side in ("", " in backward")
    ),
    *(
        mistake(
            f"label found on the first rank of {axis} alone",
            f"labels are found on the first rank of {axis} alone: on other ranks, the logit of the label counts as 0",
            split("tp", axis),
            "find the rows of a rank by its rank within the group of tp, not by its global rank",
            picked=partial(_found_on_first, axis),
        )
        for axis in _TOKEN_AXES
    ),
    *(
        mistake(
            f"label at the end of a shard found twice{below and ', below the largest'}",
            "a label on the first row of a tp rank's vocabulary is also found by the rank before, which takes its own "
            f"last row{below}",
            split("tp"),
            _COMPARE,
            picked=partial(_found_twice, below_largest=bool(below)),
        )
        for below in ("", " (in logits from which the largest was subtracted)")
    ),
)
"""The mistakes of labels at the edges of shards."""
