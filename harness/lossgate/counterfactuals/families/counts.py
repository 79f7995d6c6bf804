# SPDX-License-Identifier: Apache-2.0
"""Mistakes of counts: the count of a part of the batch, another number in place of a count, means
of means, and divisions by a count of 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
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
    """Yields the mistakes of each count of a spec, and of all counts at once."""
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
    """Returns the weight and the fields of each rank's part, with a count replaced by the number of
    tokens that the rank holds.
    """
    counts = setting.held_by_ranks if padding else [len(tokens) for tokens in setting.token_shards]
    parts, right = rank_by_rank(setting, ("dp", "cp"), ()), setting.fields[name]
    return [
        (weight, {**fields, name: torch.tensor(count).to(right)})
        for (weight, fields), count in zip(parts, counts, strict=True)
    ]


@dataclass(frozen=True)
class _Reads:
    """Asks whether some axes are split, and whether the loss depends on a count.

    Of several counts, the loss must depend on two at least. Otherwise the mistake is that of one
    count.
    """

    names: tuple[str, ...]
    axes: tuple[Axis, ...] = ()

    def __call__(self, setting: Setting) -> bool:
        if any(setting.size(axis) == 1 for axis in self.axes):
            return False
        read = [name for name in self.names if reads_count(setting, name)]
        return len(read) >= min(len(self.names), 2)


def _local(names: tuple[str, ...], axes: tuple[Axis, ...]) -> Iterator[Counterfactual]:
    what = names[0] if len(names) == 1 else "every count"
    over = " and ".join(axes)
    for how, also in _POOLED.items():
        todo = f"sum {what} over {over} before you divide by it"
        if how.startswith("mean"):
            todo += f", and add up the parts of the loss over {over} without a mean"
        yield mistake(
            f"{what} local over {'+'.join(axes)}" + (f", {how}" if how else ""),
            f"{what} is that of each rank's own part: it is not summed over {over}{also.format(over=over)}",
            partial(_differs, _Reads(names, axes)),
            todo,
            parts=partial(_parts, axes=axes, names=names, how=how),
        )


_POOLED = {
    "": "",
    "mean": ", and the results are averaged over {over}",
    "times ranks": ", but multiplied by the number of ranks",
    "mean by sequences": ", and the results are averaged over {over}, each weighed by its number of sequences",
    "mean by tokens": ", and the results are averaged over {over}, each weighed by its number of tokens",
}
"""The ways to add up the parts of a loss that have local counts, and the words for each."""


def _differs(reads: _Reads, setting: Setting) -> bool:
    """Returns whether a local count differs from that of the whole batch."""
    if not reads(setting):
        return False
    groups = [setting.group_of(rank, reads.axes) for rank in range(len(setting.token_shards))]
    local = [counts_of(setting, group) for group in groups]
    return any(bool(counts[name] != setting.fields[name]) for counts in local for name in reads.names)


def own_parts(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistake of ranks that compute the sums and counts of a sequence from their own
    tokens alone.
    """
    if spec.reference is None or spec.trained_dim != "token":
        return
    for axes in _AXES:
        over = " and ".join(axes)
        for also, how, results in (("", "", "added up"), (", averaged", "mean", "averaged")):
            yield mistake(
                f"parts of own tokens over {'+'.join(axes)}{also}",
                "each rank takes the sums and counts of a sequence from its own tokens alone: they are not summed over "
                f"{over}, and the results are {results}",
                partial(_sums_over, axes),
                f"add up the sums and counts of each sequence over {over} before you compute anything else from them",
                parts=partial(_parts, axes=axes, names=(), how=how),
            )


def _sums_over(axes: tuple[Axis, ...], setting: Setting) -> bool:
    return all(setting.size(axis) > 1 for axis in axes) and sums_sequences(setting)


def _parts(setting: Setting, axes: tuple[Axis, ...], names: tuple[str, ...], how: str) -> list[tuple[float, Fields]]:
    parts = list(rank_by_rank(setting, axes, names, mean=how == "mean"))
    ranks = _ranks(axes, setting)
    if how == "times ranks":
        return [(weight, {**own, **{name: own[name] * ranks for name in names}}) for weight, own in parts]
    if how.startswith("mean by"):
        shares = _shares(setting, axes, of_sequences=how == "mean by sequences")
        return [(share, own) for share, (_, own) in zip(shares, parts, strict=True)]
    return parts


def _shares(setting: Setting, axes: tuple[Axis, ...], *, of_sequences: bool) -> list[float]:
    """Returns, for each rank, the share of all tokens or sequences that its group holds.

    A group is the ranks that add up their counts if ``axes`` are left out.
    """
    cp, held = setting.size("cp"), [float(len(own)) for own in setting.token_shards]
    if of_sequences:
        held = [len(setting.partition.sequences(rank // cp)) / cp for rank in range(len(held))]
    groups = [sum(held[other] for other in setting.group_of(rank, axes)) for rank in range(len(held))]
    return [group / max(sum(held), 1.0) for group in groups]


def _wrong(name: str, spec: Spec) -> Iterator[Counterfactual]:
    """Yields the mistakes of taking another number in place of a count."""
    instead = dict(_INSTEAD)
    if spec.trained is trained_by_mask:
        del instead["the number of tokens in mask"]  # it is valid_tokens
    instead |= {other: (other, partial(_other_count, other)) for other in spec.names_of_counts if other != name}
    taken = [(what, words, count, _Reads((name,))) for what, (words, count) in instead.items()]
    for axis in AXES:
        when, count = _Reads((name,), (axis,)), partial(_times, axis)
        taken.append((f"multiplied by {axis}", f"{{name}} * {axis}", count, when))
    for what, words, count, when in taken:
        yield mistake(
            f"{name} is {what}",
            f"in place of {name} the kernel takes {words.format(name=name)}",
            when,
            f"divide by {name} as it is given",
            fields=partial(_put, name, count),
        )
    for axes in _AXES:
        yield mistake(
            f"{name} at least 1 on each rank of {'+'.join(axes)}",
            f"{name} is divided by the number of ranks of {' and '.join(axes)} first, and bounded below by 1 then",
            partial(_is_few, _Reads((name,), axes)),
            f"bound {name} below by 1 before it is divided by the number of ranks",
            fields=partial(_put, name, partial(_at_least_ranks, axes)),
        )
    for of, (axes, is_least, change) in _ROUNDED.items():
        yield mistake(
            f"{name} rounded down to a multiple of {of}",
            f"{name} is rounded down to a multiple of {of}{f', but to {of} at least' * is_least}",
            _Reads((name,), axes),
            f"divide by {name} as it is given: `//` drops the remainder",
            fields=partial(_rounded, name, change),
        )


Count = Callable[[Setting, Tensor], Tensor | int]
"""Gets a count as it is given, and returns the number that is taken in its place."""


def _put(name: str, count: Count, setting: Setting) -> Fields:
    given = setting.fields[name]
    return {name: torch.as_tensor(count(setting, given)).to(given)}


def _other_count(other: str, setting: Setting, given: Tensor) -> Tensor:
    return setting.fields[other]


def _times(axis: Axis, setting: Setting, given: Tensor) -> Tensor:
    return given * setting.size(axis)


def _is_few(reads: _Reads, setting: Setting) -> bool:
    (name,) = reads.names
    return bool(0 < setting.fields[name] < _ranks(reads.axes, setting)) and reads(setting)


def _at_least_ranks(axes: tuple[Axis, ...], setting: Setting, given: Tensor) -> Tensor:
    return given.clamp(min=_ranks(axes, setting))


def _ranks(axes: tuple[Axis, ...], setting: Setting) -> int:
    return prod(setting.size(axis) for axis in axes)


def _labels(setting: Setting, given: Tensor) -> Tensor:
    return (torch.tensor(setting.lengths) - 1).clamp(min=0).sum()


_INSTEAD: Mapping[str, tuple[str, Count]] = {
    "one too many": ("{name} + 1", lambda s, count: count + 1),
    "one too few": ("{name} - 1", lambda s, count: count - 1),
    "more by the number of sequences": (
        "{name} + the number of sequences",
        lambda s, count: count + len(s.lengths),
    ),
    "less by the number of sequences": (
        "{name} - the number of sequences, but at least 1",
        lambda s, count: (count - len(s.lengths)).clamp(min=1),
    ),
    "left out": ("1: nothing is divided by {name}", lambda s, count: 1),
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
"""The numbers that may stand in place of a count, each in words and as a function."""


def _rounded(name: str, change: Callable[[Tensor, int], Tensor], setting: Setting) -> Fields:
    return {name: change(setting.fields[name], setting.size("dp"))}


_ROUNDED: Mapping[str, tuple[tuple[Axis, ...], bool, Callable[[Tensor, int], Tensor]]] = {
    "2": ((), False, lambda count, dp: count // 2 * 2),
    "4": ((), False, lambda count, dp: count // 4 * 4),
    "dp": (("dp",), True, lambda count, dp: (count // dp).clamp(min=1) * dp),
    "2 * dp": (("dp",), True, lambda count, dp: (count // (2 * dp)).clamp(min=1) * 2 * dp),
}
"""The numbers to whose multiples a count may be rounded down. For each there are the axes that must
be split, whether the number is also the least result, and the function of the count and the number
of dp ranks.
"""


def nothing_trained(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of dividing by a count of 0."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    has_means = any(metric.reduction == "sum" for metric in spec.metrics.values())
    for what, lacks in _LACKS.items():
        for also, kinds in _ALSO.items():
            if "metric" in kinds and not has_means:
                continue
            yield mistake(
                f"0 / 0 where {what} has no trained token{also}",
                f"a mean over {what} without a trained token is 0 / 0: the loss is not a number{also}",
                partial(_has_none_trained, lacks, kinds),
                "divide by the count, but by at least 1",
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
    setting = setting.with_padding  # a chunk may have nothing but padding
    mask = setting.fields["mask"]
    return any(not bool(mask[chunk].any()) for rank in chunks_of(setting) for chunk in rank)


_LACKS: Mapping[str, Callable[[Setting], bool]] = {
    "the batch": lambda setting: float(setting.fields["valid_tokens"]) == 0.0,
    "a rank": lambda setting: len(setting.token_shards) > 1 and not all(_trains(setting)),
    "a sequence": _lacks_sequence,
    "a chunk": _lacks_chunk,
}
"""The parts that may have a mean of their own, and whether one of them has no trained token."""


_ALSO: Mapping[str, tuple[str, ...]] = {
    "": (),
    ", and so are the gradients": ("gradient",),
    ", and so are the metrics": ("metric",),
    ", and so are the metrics and the gradients": ("metric", "gradient"),
}
"""The outputs that are not a number besides the loss: in words, and by kind."""


def _has_none_trained(lacks: Callable[[Setting], bool], kinds: tuple[str, ...], setting: Setting) -> bool:
    if "metric" in kinds and not any(o.kind == "metric" and _is_mean(setting, o) for o in setting.returned):
        return False
    return lacks(setting)


def _not_a_number(kinds: tuple[str, ...], setting: Setting, outputs: Outputs) -> Outputs:
    wrong = [o for o in outputs if o.name == "loss" or (o.kind in kinds and _is_mean(setting, o))]
    return {**outputs, **{output: torch.full_like(outputs[output], torch.nan) for output in wrong}}


def _is_mean(setting: Setting, output: Output) -> bool:
    """Returns whether an output is added up over ranks, as means are. An extremum is not."""
    return output.kind != "metric" or setting.spec.metrics[output.name].reduction == "sum"
