# SPDX-License-Identifier: Apache-2.0
"""Counts: taken of a part of the batch, one too many, of something else; and means of means."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.sequence_sums import sums_sequences
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.counterfactuals.shares import counts_of, rank_by_rank, reads_count
from lossgate.specs.spec import Spec, trained_by_mask

_AXES: tuple[tuple[Axis, ...], ...] = (("dp",), ("cp",), ("dp", "cp"))


def counts(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of each count that the spec has, and of all at once."""
    if spec.reference is None:
        return
    names = spec.names_of_counts
    for name in names:
        yield from _wrong(name, spec)
    groups = [(name,) for name in names] + ([names] if len(names) > 1 else [])
    for group in groups:
        for axes in _AXES:
            yield from _local(group, axes)
    for name in names:
        for padding in (False, True):
            yield mistake(
                f"{name} is that of all tokens of a rank{', padding too' * padding}",
                f"in place of {name} the kernel takes the number of all tokens that each rank holds, "
                f"{'padding included' if padding else 'without padding'}",
                "count",
                _Reads((name,)),
                f"divide by {name} as it is given",
                parts=partial(_by_held, name, padding),
            )


def _by_held(name: str, padding: bool, setting: Setting) -> list[tuple[float, Fields]]:
    held = setting.held_by_ranks if padding else [len(tokens) for tokens in setting.token_shards]
    parts = rank_by_rank(setting, ("dp", "cp"), ())
    given = setting.fields[name]
    return [
        (weight, {**own, name: torch.tensor(count).to(given)}) for (weight, own), count in zip(parts, held, strict=True)
    ]


@dataclass(frozen=True)
class _Reads:
    """Asks whether the loss hangs on several of some counts, if they are several, and whether some
    axes are split.
    """

    names: tuple[str, ...]
    axes: tuple[Axis, ...] = ()

    def __call__(self, setting: Setting) -> bool:
        if any(setting.size(axis) == 1 for axis in self.axes):
            return False
        return sum(reads_count(setting, name) for name in self.names) >= min(len(self.names), 2)


def _local(names: tuple[str, ...], axes: tuple[Axis, ...]) -> Iterator[Counterfactual]:
    what = names[0] if len(names) == 1 else "every count"
    over = " and ".join(axes)
    for how, also in _POOLED.items():
        yield mistake(
            f"{what} local over {'+'.join(axes)}{how and f', {how}'}",
            f"{what} is that of each rank's own part: it is not summed over {over}{also.format(over=over)}",
            "count",
            partial(_differs, _Reads(names, axes)),
            f"sum {what} over {over} before you divide by it"
            + (f", and add up the parts of the loss over {over} without a mean" if how.startswith("mean") else ""),
            parts=partial(_parts, axes=axes, names=names, how=how),
        )


_POOLED = {
    "": "",
    "mean": ", and the results are averaged over {over}",
    "times ranks": ", but multiplied by its number of ranks",
    "mean by sequences": ", and the results are averaged over {over}, each weighed by its number of sequences",
    "mean by tokens": ", and the results are averaged over {over}, each weighed by its number of tokens",
}
"""What becomes of the parts of a loss with local counts, and how it is said."""


def _differs(reads: _Reads, setting: Setting) -> bool:
    """Returns whether the local counts are others than those of the whole batch."""
    if not reads(setting):
        return False
    groups = [setting.group_of(rank, reads.axes) for rank in range(len(setting.token_shards))]
    local = [counts_of(setting, group) for group in groups]
    return any(bool(one[name] != setting.fields[name]) for one in local for name in reads.names)


def own_parts(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields what goes wrong where ranks compute a loss of their own tokens that needs more."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    for axes in _AXES:
        over = " and ".join(axes)
        yield mistake(
            f"parts of own tokens over {'+'.join(axes)}",
            f"what belongs to a whole sequence, its sums and counts, is taken from each rank's own tokens over {over}, "
            "and the results are added up",
            "ranks",
            partial(_sums_over, axes),
            f"add up the sums and counts of each sequence over {over} before you compute anything else from them",
            parts=partial(_parts, axes=axes, names=(), how=""),
        )
        yield mistake(
            f"parts of own tokens over {'+'.join(axes)}, averaged",
            f"what belongs to a whole sequence, its sums and counts, is taken from each rank's own tokens over {over}, "
            "and the results are averaged",
            "ranks",
            partial(_sums_over, axes),
            f"add up the sums and counts of each sequence over {over} before you compute anything else from them",
            parts=partial(_parts, axes=axes, names=(), how="mean"),
        )


def _sums_over(axes: tuple[Axis, ...], setting: Setting) -> bool:
    return all(setting.size(axis) > 1 for axis in axes) and sums_sequences(setting)


def _parts(setting: Setting, axes: tuple[Axis, ...], names: tuple[str, ...], how: str) -> list[tuple[float, Fields]]:
    parts = list(rank_by_rank(setting, axes, names, mean=how == "mean"))
    ranks = prod(setting.size(axis) for axis in axes)
    if how == "times ranks":
        return [(weight, {**own, **{name: own[name] * ranks for name in names}}) for weight, own in parts]
    if how.startswith("mean by"):
        shares = _shares(setting, axes, of_sequences=how == "mean by sequences")
        return [(share, own) for share, (_, own) in zip(shares, parts, strict=True)]
    return parts


def _shares(setting: Setting, axes: tuple[Axis, ...], *, of_sequences: bool) -> list[float]:
    """Returns by rank what those that count together hold, of what all hold."""
    cp, held = setting.size("cp"), [float(len(own)) for own in setting.token_shards]
    if of_sequences:
        held = [len(setting.partition.sequences(rank // cp)) / cp for rank in range(len(held))]
    groups = [sum(held[other] for other in setting.group_of(rank, axes)) for rank in range(len(held))]
    return [group / max(sum(held), 1.0) for group in groups]


def _wrong(name: str, spec: Spec) -> Iterator[Counterfactual]:
    def put(setting: Setting, other: Tensor) -> Fields:
        return {name: torch.as_tensor(other).to(setting.fields[name])}

    def of_tokens(setting: Setting) -> Fields:
        return put(setting, torch.tensor(setting.tokens))

    def of_padded(setting: Setting) -> Fields:
        return put(setting, torch.tensor(setting.partition.tokens))

    others = {
        "one too many": lambda s: put(s, s.fields[name] + 1),
        "one too few": lambda s: put(s, s.fields[name] - 1),
        "left out": lambda s: put(s, torch.tensor(1)),
        "twice": lambda s: put(s, s.fields[name] * 2),
        "half": lambda s: put(s, s.fields[name] // 2),
        "the number of all tokens": of_tokens,
        "the number of all tokens and padding": of_padded,
        "the number of sequences": lambda s: put(s, torch.tensor(len(s.lengths))),
        "the number of tokens in mask": lambda s: put(s, s.fields["mask"].sum()),
        "the number of labels in sequences that have one": lambda s: put(s, _labels(s)),
    }
    if spec.trained is trained_by_mask:
        del others["the number of tokens in mask"]  # that is what valid_tokens counts
    others |= {f"{other}": partial(_other_count, name, other) for other in spec.names_of_counts if other != name}
    for what, change in others.items():
        yield mistake(
            f"{name} is {what}",
            f"in place of {name} the kernel takes {_words(what, name)}",
            "count",
            _Reads((name,)),
            f"divide by {name} as it is given",
            fields=change,
        )
    for of, (axes, least, change) in _ROUNDED.items():
        yield mistake(
            f"{name} rounded down to a multiple of {of}",
            f"{name} is rounded down to a multiple of {of}{f', but to {of} at least' * least}",
            "count",
            _Reads((name,), axes),
            f"divide by {name} as it is given: `//` drops what is left over",
            fields=partial(_rounded, name, change),
        )


def _rounded(name: str, change: Callable[[Tensor, int], Tensor], setting: Setting) -> Fields:
    return {name: change(setting.fields[name], setting.size("dp"))}


_ROUNDED: Mapping[str, tuple[tuple[Axis, ...], bool, Callable[[Tensor, int], Tensor]]] = {
    "2": ((), False, lambda count, dp: count // 2 * 2),
    "4": ((), False, lambda count, dp: count // 4 * 4),
    "dp": (("dp",), True, lambda count, dp: (count // dp).clamp(min=1) * dp),
    "2 * dp": (("dp",), True, lambda count, dp: (count // (2 * dp)).clamp(min=1) * 2 * dp),
}
"""To what multiples a count may be rounded down: the axes that are several ranks there, whether it
is one such multiple at least, and how it is computed of the count and the ranks of dp.
"""


def _other_count(name: str, other: str, setting: Setting) -> Fields:
    return {name: setting.fields[other]}


def _labels(setting: Setting) -> Tensor:
    lengths = torch.tensor(setting.lengths)
    return (lengths - 1).clamp(min=0).sum()


def _words(what: str, name: str) -> str:
    return {
        "one too many": f"{name} + 1",
        "one too few": f"{name} - 1",
        "left out": "1: nothing is divided by it",
        "twice": f"2 * {name}",
        "half": f"{name} // 2",
        "the number of labels in sequences that have one": "the number of all labels, trained or not",
    }.get(what, what)
