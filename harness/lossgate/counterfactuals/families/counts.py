# SPDX-License-Identifier: Apache-2.0
"""Counts: taken of a part of the batch, one too many, of something else; and means of means."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.counterfactuals.shares import counted, rank_by_rank, reads_count
from lossgate.layout import Axis
from lossgate.specs.spec import Spec

_AXES: tuple[tuple[Axis, ...], ...] = (("dp",), ("cp",), ("dp", "cp"))


def counts(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of each count that the spec has, and of all at once."""
    if spec.reference is None:
        return
    names = counted(spec)
    for name in names:
        yield from _wrong(name, spec)
    groups = [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])
    for group in groups:
        for axes in _AXES:
            yield from _local(group, axes)


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
    for mean in (False, True):
        also = f", and the results are averaged over {over}" if mean else ""
        yield mistake(
            f"{what} local over {'+'.join(axes)}{', mean' if mean else ''}",
            f"{what} is that of each rank's own part: it is not summed over {over}{also}",
            "count",
            _Reads(names, axes),
            f"sum {what} over {over} before you divide by it"
            + (f", and add up the parts of the loss over {over} without a mean" if mean else ""),
            parts=partial(_parts, axes=axes, names=names, mean=mean),
        )


def _parts(setting: Setting, axes: tuple[Axis, ...], names: tuple[str, ...], mean: bool) -> list[tuple[float, Fields]]:
    return list(rank_by_rank(setting, axes, names, mean=mean))


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
        "the number of sequences": lambda s: put(s, torch.tensor(len(s.partition.lengths))),
        "the number of tokens in mask": lambda s: put(s, s.fields["mask"].sum()),
        "the number of labels in sequences that have one": lambda s: put(s, _labels(s)),
    }
    if "sample_mask" not in spec.fields:
        del others["the number of tokens in mask"]  # that is what valid_tokens counts
    others |= {f"{other}": partial(_other_count, name, other) for other in counted(spec) if other != name}
    for what, change in others.items():
        yield mistake(
            f"{name} is {what}",
            f"in place of {name} the kernel takes {_words(what, name)}",
            "count",
            _Reads((name,)),
            f"divide by {name} as it is given",
            fields=change,
        )


def _other_count(name: str, other: str, setting: Setting) -> Fields:
    return {name: setting.fields[other]}


def _labels(setting: Setting) -> Tensor:
    lengths = torch.tensor(setting.partition.lengths)
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
