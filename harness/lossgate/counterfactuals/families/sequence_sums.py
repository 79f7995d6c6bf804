# SPDX-License-Identifier: Apache-2.0
"""Mistakes of sums and means over the tokens of a sequence, which ranks of cp may share."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lossgate.counterfactuals.batch_parts import numbers_of_tokens, where_rows
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Outputs, Part, Reduced, Seams, run, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def sequence_sums(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of sums over sequences, such as a sum over cp in forward alone."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    yield Counterfactual(
        name="sums over sequences reduced in forward alone",
        sentence="the sums of a sequence are summed over cp in forward, but not in backward: each rank takes the "
        "gradient of its own tokens and loss alone",
        applies=_split_sums,
        todo="sum over cp in backward, too: use an all-reduce whose backward is an all-reduce",
        computed=_in_forward_alone,
    )
    for what, (words, counts) in _COUNTS.items():
        yield mistake(
            f"counts of sequences: {what}",
            f"the mean over a sequence divides by {words}",
            sums_sequences,
            todo="divide by the number of trained tokens of the sequence",
            loss=partial(_with_counts, counts),
        )
    for which, alone, number in (
        ("", "", None),
        ("first ", ", the first alone", 0),
        ("second ", ", the second alone", 1),
    ):
        yield Counterfactual(
            name=f"means of the parts of sequences over cp{alone}",
            sentence=f"the {which}mean over a sequence is the mean of the means of its parts on the ranks of cp",
            applies=_split_sums if number is None else _several_split_sums,
            todo="sum both the numerator and the count over cp before you divide",
            computed=partial(_means_of_parts, number),
        )
    for name in numbers_of_tokens(spec):
        yield from _of_field(name)


def _of_field(name: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of sums of a field over a sequence."""
    yield mistake(
        f"{name} of each rank's own part",
        f"the sum of {name} over a sequence is that of each cp rank's own part: it is not summed over cp",
        _split_sums,
        todo="sum it over cp before you use it",
        parts=partial(_own_alone, name),
    )
    yield mistake(
        f"{name} summed over sequences where the mean belongs",
        f"the kernel takes the sum of {name} over a sequence, not the mean",
        sums_sequences,
        todo="divide the sum by the number of trained tokens of the sequence",
        fields=partial(_times_count, name, 1),
    )
    yield mistake(
        f"{name} averaged over sequences where the sum belongs",
        f"the kernel takes the mean of {name} over a sequence, not the sum",
        sums_sequences,
        fields=partial(_times_count, name, -1),
    )


def sums_sequences(setting: Setting) -> bool:
    """Returns whether the loss of a problem has a sum over the tokens of each sequence."""
    return setting.once("sums over sequences", lambda: _sums_sequences(setting))


def _sums_sequences(setting: Setting) -> bool:
    fields, values = setting.bound.batch.known, setting.bound.dense.token_values(setting.bound_spec)
    sums = _SequenceSums(fields["sequence"])
    with torch.no_grad(), sums:
        setting.bound_spec.loss(values, fields)
    return sums.found


def _split_sums(setting: Setting) -> bool:
    return setting.size("cp") > 1 and sums_sequences(setting)


def _several_split_sums(setting: Setting) -> bool:
    return _split_sums(setting) and _count_sums(setting) > 1


def _count_sums(setting: Setting) -> int:
    """Returns the number of sums of a loss over sequences, without those that count tokens."""
    return setting.once("sums over sequences, number", lambda: _sums_of_loss(setting))


def _sums_of_loss(setting: Setting) -> int:
    taken: list[int] = []

    def count(x: Tensor, counted: Tensor, sequences: int) -> None:
        taken.append(sequences)

    loss_alone = setting.bound_spec.returning(())
    with _SequenceSums(setting.fields["sequence"], of_numbers=count):
        loss_alone.loss(setting.bound.dense.token_values(loss_alone), setting.fields)
    return len(taken)


def _held_by_cp_ranks(setting: Setting) -> list[Tensor]:
    """Returns the tokens of each index on cp, ``[tokens]`` bool."""
    cp = setting.size("cp")
    return [setting.mask_of(torch.cat(setting.token_shards[index::cp])) for index in range(cp)]


def _own_alone(name: str, setting: Setting) -> list[Part]:
    cp, field = setting.size("cp"), setting.fields[name]
    return [(1 / cp, {name: torch.where(held, field, 0.0)}) for held in _held_by_cp_ranks(setting)]


def _times_count(name: str, power: int, setting: Setting) -> Fields:
    field, sequence, mask = setting.fields[name], setting.fields["sequence"], setting.fields["mask"]
    counts = torch.zeros(len(setting.lengths), dtype=field.dtype).index_add(0, sequence, mask.to(field.dtype))
    return {name: field * counts.clamp(min=1)[sequence] ** power}


Counts = Callable[[Tensor, Tensor], Tensor]
"""Gets the counts of sequences and their lengths ``[sequences]``. Returns wrong counts."""


def _of_first_of_pair(counts: Tensor, lengths: Tensor) -> Tensor:
    return counts[torch.arange(len(counts)) // 2 * 2]


_COUNTS: Mapping[str, tuple[str, Counts]] = {
    "all tokens": ("the number of all its tokens, trained or not", lambda counts, lengths: lengths),
    "one less": ("the number of its trained tokens - 1", lambda counts, lengths: (counts - 1).clamp(min=1)),
    "one more": ("the number of its trained tokens + 1", lambda counts, lengths: counts + 1),
    "none": ("nothing: it is a sum", lambda counts, lengths: torch.ones_like(counts)),
    "the longest": (
        "the largest number of trained tokens of any sequence",
        lambda counts, lengths: counts.amax().expand(len(counts)),
    ),
    "of the first of a pair": (
        "the number of trained tokens of the chosen sequence, for both sequences of a pair",
        _of_first_of_pair,
    ),
}
"""The wrong divisors of a mean over a sequence, in words and as a function."""


def _with_counts(counts: Counts, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    with _SequenceSums(fields["sequence"], of_counts=counts):
        return bound.loss(values, fields)


def _means_of_parts(which: int | None, setting: Setting) -> Outputs:
    """Returns the outputs of a kernel that averages the means of the parts of a sequence.

    Args:
        which: the number of the mean that is wrong, 0 for the first of the loss; None for all.
        setting: the problem.
    """
    held_by_ranks, number, taken = _held_by_cp_ranks(setting), max(_count_sums(setting), 1), 0

    def of_parts(x: Tensor, counted: Tensor, sequences: int) -> Tensor | None:
        """Returns the means of means times the counts, by which the loss divides afterwards."""
        nonlocal taken
        place, taken = taken % number, taken + 1  # metrics may repeat the sums of the loss
        if which not in (None, place):
            return None
        zeros, sequence = x.new_zeros(sequences), setting.fields["sequence"]
        means, counts = zeros, zeros
        for held in held_by_ranks:
            of_part = zeros.index_add(0, sequence, torch.where(held, x, 0.0))
            count = zeros.index_add(0, sequence, (counted & held).to(x.dtype))
            means, counts = means + of_part / count.clamp(min=1) / len(held_by_ranks), counts + count
        return means * counts

    def loss(bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
        nonlocal taken
        taken = 0
        with _SequenceSums(fields["sequence"], of_numbers=of_parts):
            return bound.loss(values, fields)

    return run(setting, Seams(loss=loss))


class _SequenceSums(TorchFunctionMode):
    """Changes sums over sequences. Sums of bools are counts, and others are sums of numbers."""

    def __init__(
        self,
        sequence: Tensor,
        of_counts: Counts | None = None,
        of_numbers: Callable[[Tensor, Tensor, int], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self._sequence, self._of_counts, self._of_numbers = sequence, of_counts, of_numbers
        self.found = False
        """Whether a sum over sequences was computed."""

    def __torch_function__(
        self, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "index_add" or args[2] is not self._sequence:
            return found
        self.found = True
        x = args[3]
        is_count = not x.requires_grad and ((x == 0) | (x == 1)).all()
        if is_count and self._of_counts is not None:
            return self._of_counts(found, func(*args[:3], torch.ones_like(x)))
        if not is_count and self._of_numbers is not None:
            other = self._of_numbers(x, x != 0, len(found))
            return found if other is None else other
        return found


def _in_forward_alone(setting: Setting) -> Outputs:
    """Returns the right values, with gradients that each cp rank computes from its own tokens."""
    found = run(setting)
    gradients = [output for output in found if output.kind == "gradient"]
    total = {output: torch.zeros_like(found[output]) for output in gradients}
    for held in _held_by_cp_ranks(setting):
        stages = _Own(held)
        of_rank = run(setting, Seams(values=stages.values, loss=stages.loss))
        total = {output: total[output] + of_rank[output] for output in gradients}
    return {**found, **total}


class _Own:
    """Stages that cut the gradients between the tokens of a rank and those of other ranks."""

    def __init__(self, own: Tensor) -> None:
        self._own = own

    def values(self, setting: Setting, values: TokenValues) -> TokenValues:
        return values.replace(**{name: where_rows(self._own, x, x.detach()) for name, x in values.given.items()})

    def loss(self, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
        with _CutSums(self._own, fields["sequence"]):
            return bound.loss(values, fields)


class _CutSums(TorchFunctionMode):
    """Cuts the gradients between sums over sequences and the tokens of other ranks."""

    def __init__(self, own: Tensor, sequence: Tensor) -> None:
        super().__init__()
        self._own, self._sequence = own, sequence

    def __torch_function__(
        self, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and args[1] is self._sequence:
            return torch.where(self._own, found, found.detach())
        if name == "index_add" and args[2] is self._sequence:
            with_own_gradient = torch.where(self._own, args[3], args[3].detach())
            return with_gradient_of(found, func(*args[:3], with_own_gradient))
        return found
