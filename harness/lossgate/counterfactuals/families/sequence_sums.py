# SPDX-License-Identifier: Apache-2.0
"""Sums over the tokens of a sequence, which ranks of cp share: reduced in forward alone."""

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
    """Yields what comes of an all-reduce that autograd does not see."""
    if spec.reference is None or spec.trained_dim != "token":
        return
    yield Counterfactual(
        name="sums over sequences reduced in forward alone",
        sentence="what is summed over cp for a sequence has the gradient of each rank's own tokens and loss alone",
        applies=_split_sums,
        todo="sum over cp in backward, too: an all-reduce whose backward is an all-reduce",
        computed=_in_forward_alone,
    )
    for what, (words, counts) in _COUNTS.items():
        yield mistake(
            f"counts of sequences: {what}",
            f"the mean over a sequence divides by {words}",
            sums_sequences,
            todo="divide by the trained tokens of the sequence",
            loss=partial(_with_counts, counts),
        )
    for which, number in (("", None), ("first ", 0), ("second ", 1)):
        yield Counterfactual(
            name=f"means of the parts of sequences over cp{which and f', the {which}alone'}",
            sentence=f"the {which}mean over a sequence is the mean of the means that ranks of cp have of their parts",
            applies=_split_sums if number is None else _several_split_sums,
            todo="sum numerator and count over cp, and divide afterwards",
            computed=partial(_means_of_parts, number),
        )
    for name in numbers_of_tokens(spec):
        yield from _of_field(name)


def _of_field(name: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of what is summed of a field over a sequence."""
    yield mistake(
        f"{name} of each rank's own part",
        f"what is summed of {name} over a sequence is each cp rank's own part: it is not summed over cp",
        _split_sums,
        todo="sum it over cp before you go on",
        parts=partial(_own_alone, name),
    )
    yield mistake(
        f"{name} summed over sequences where the mean belongs",
        f"{name} is summed over a sequence where its mean belongs",
        sums_sequences,
        todo="divide it by the trained tokens of the sequence, too",
        fields=partial(_times_count, name, 1),
    )
    yield mistake(
        f"{name} averaged over sequences where the sum belongs",
        f"{name} is averaged over a sequence where its sum belongs",
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
    return setting.once("sums over sequences, number", lambda: _sums_of_loss(setting))


def _sums_of_loss(setting: Setting) -> int:
    """Returns how many sums of numbers over sequences a loss takes."""
    taken: list[int] = []

    def count(x: Tensor, counted: Tensor, sequences: int) -> None:
        taken.append(sequences)

    loss_alone = setting.bound_spec.returning(())
    with _SequenceSums(setting.fields["sequence"], of_numbers=count):
        loss_alone.loss(setting.bound.dense.token_values(loss_alone), setting.fields)
    return len(taken)


def _own_alone(name: str, setting: Setting) -> list[Part]:
    cp, field = setting.size("cp"), setting.fields[name]
    own = [torch.cat(setting.token_shards[index::cp]) for index in range(cp)]
    return [(1 / cp, {name: torch.where(setting.mask_of(tokens), field, 0.0)}) for tokens in own]


def _times_count(name: str, power: int, setting: Setting) -> Fields:
    field, sequence, mask = setting.fields[name], setting.fields["sequence"], setting.fields["mask"]
    counts = torch.zeros(len(setting.lengths), dtype=field.dtype).index_add(0, sequence, mask.to(field.dtype))
    return {name: field * counts.clamp(min=1)[sequence] ** power}


Counts = Callable[[Tensor, Tensor], Tensor]
"""Gets the counts of sequences and their lengths ``[sequences]``, and returns what stands in their
place."""


def _of_first_of_pair(counts: Tensor, lengths: Tensor) -> Tensor:
    return counts[torch.arange(len(counts)) // 2 * 2]


_COUNTS: Mapping[str, tuple[str, Counts]] = {
    "all tokens": ("all its tokens, trained or not", lambda counts, lengths: lengths),
    "one less": ("its trained tokens less 1", lambda counts, lengths: (counts - 1).clamp(min=1)),
    "one more": ("its trained tokens and 1 more", lambda counts, lengths: counts + 1),
    "none": ("nothing: it is a sum", lambda counts, lengths: torch.ones_like(counts)),
    "the longest": ("those of the longest sequence", lambda counts, lengths: counts.amax().expand(len(counts))),
    "of the first of a pair": ("the trained tokens of the chosen sequence, for both of a pair", _of_first_of_pair),
}
"""What a mean over a sequence may divide by: in words, and the number."""


def _with_counts(counts: Counts, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    with _SequenceSums(fields["sequence"], of_counts=counts):
        return bound.loss(values, fields)


def _means_of_parts(which: int | None, setting: Setting) -> Outputs:
    cp, own = setting.size("cp"), torch.empty(setting.tokens, dtype=torch.long)
    for rank, tokens in enumerate(setting.token_shards):
        own[tokens] = rank % cp

    taken, number = 0, max(_count_sums(setting), 1)

    def of_parts(x: Tensor, counted: Tensor, sequences: int) -> Tensor | None:
        """Returns sums that divided by the counts are means of means."""
        nonlocal taken
        taken += 1
        if which not in (None, (taken - 1) % number):  # metrics may take those of the loss again
            return None
        sequence, means, count = setting.fields["sequence"], torch.zeros(()), x.new_zeros(sequences)
        for part in range(cp):
            of_part = x.new_zeros(sequences).index_add(0, sequence, torch.where(own == part, x, 0.0))
            counts = x.new_zeros(sequences).index_add(0, sequence, (counted & (own == part)).to(x.dtype))
            means, count = means + of_part / counts.clamp(min=1) / cp, count + counts
        return means * count

    def loss(bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
        nonlocal taken
        taken = 0
        with _SequenceSums(fields["sequence"], of_numbers=of_parts):
            return bound.loss(values, fields)

    return run(setting, Seams(loss=loss))


class _SequenceSums(TorchFunctionMode):
    """Changes sums over sequences: those of bools, which are counts, and those of numbers."""

    def __init__(
        self,
        sequence: Tensor,
        of_counts: Counts | None = None,
        of_numbers: Callable[[Tensor, Tensor, int], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self._sequence, self._of_counts, self._of_numbers = sequence, of_counts, of_numbers
        self.found = False
        """Whether there was such a sum."""

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
    """Adds up the gradients that the ranks of each cp index give, each of its own tokens."""
    found = run(setting)
    gradients = [output for output in found if output.kind == "gradient"]
    cp, total = setting.size("cp"), {output: torch.zeros_like(found[output]) for output in gradients}
    for index in range(cp):
        tokens = [own for rank, own in enumerate(setting.token_shards) if rank % cp == index]
        own = setting.mask_of(torch.cat(tokens))
        of_rank = run(setting, Seams(values=_Own(own).values, loss=_Own(own).loss))
        total = {output: total[output] + of_rank[output] for output in gradients}
    return {**found, **total}


class _Own:
    """One rank's view of a loss: gradients come from its own tokens, and reach these alone."""

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
            return with_gradient_of(found, func(*args[:3], torch.where(self._own, args[3], args[3].detach())))
        return found
