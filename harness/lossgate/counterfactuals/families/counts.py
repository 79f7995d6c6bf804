# SPDX-License-Identifier: Apache-2.0
"""Counts: taken of a part of the batch, one too many, of something else; means of means; and what
is not a number where a count is 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.batch_parts import counts_of, rank_by_rank, reads_count
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.chunks import chunks_of, knows_size
from lossgate.counterfactuals.families.sequence_sums import sums_sequences
from lossgate.counterfactuals.seams import Outputs
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.outputs import Output
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
            partial(_sums_over, axes),
            f"add up the sums and counts of each sequence over {over} before you compute anything else from them",
            parts=partial(_parts, axes=axes, names=(), how=""),
        )
        yield mistake(
            f"parts of own tokens over {'+'.join(axes)}, averaged",
            f"what belongs to a whole sequence, its sums and counts, is taken from each rank's own tokens over {over}, "
            "and the results are averaged",
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
    """Yields what may stand in place of a count."""
    instead = dict(_INSTEAD)
    if spec.trained is trained_by_mask:
        del instead["the number of tokens in mask"]  # that is what valid_tokens counts
    instead |= {other: (other, partial(_other_count, other)) for other in spec.names_of_counts if other != name}
    for what, (words, count) in instead.items():
        yield mistake(
            f"{name} is {what}",
            f"in place of {name} the kernel takes {words.format(name=name)}",
            _Reads((name,)),
            f"divide by {name} as it is given",
            fields=partial(_put, name, count),
        )
    for of, (axes, least, change) in _ROUNDED.items():
        yield mistake(
            f"{name} rounded down to a multiple of {of}",
            f"{name} is rounded down to a multiple of {of}{f', but to {of} at least' * least}",
            _Reads((name,), axes),
            f"divide by {name} as it is given: `//` drops what is left over",
            fields=partial(_rounded, name, change),
        )


Count = Callable[[Setting, Tensor], Tensor | int]
"""Gets a count as it is given, and returns what is taken in its place."""


def _put(name: str, count: Count, setting: Setting) -> Fields:
    given = setting.fields[name]
    return {name: torch.as_tensor(count(setting, given)).to(given)}


def _other_count(other: str, setting: Setting, given: Tensor) -> Tensor:
    return setting.fields[other]


def _labels(setting: Setting, given: Tensor) -> Tensor:
    return (torch.tensor(setting.lengths) - 1).clamp(min=0).sum()


_INSTEAD: Mapping[str, tuple[str, Count]] = {
    "one too many": ("{name} + 1", lambda s, count: count + 1),
    "one too few": ("{name} - 1", lambda s, count: count - 1),
    "left out": ("1: nothing is divided by it", lambda s, count: 1),
    "twice": ("2 * {name}", lambda s, count: count * 2),
    "half": ("{name} // 2", lambda s, count: count // 2),
    "the number of all tokens": ("the number of all tokens", lambda s, count: s.tokens),
    "the number of all tokens and padding": (
        "the number of all tokens and padding",
        lambda s, count: s.partition.tokens,
    ),
    "the number of sequences": ("the number of sequences", lambda s, count: len(s.lengths)),
    "the number of tokens in mask": ("the number of tokens in mask", lambda s, count: s.fields["mask"].sum()),
    "the number of labels in sequences that have one": ("the number of all labels, trained or not", _labels),
}
"""What may be taken for a count: in words, and the number."""


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
                partial(_has_none_trained, lacks, kinds),
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


def _has_none_trained(lacks: Callable[[Setting], bool], kinds: tuple[str, ...], setting: Setting) -> bool:
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
