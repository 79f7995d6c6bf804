# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several kernels and losses share.

Checks of shapes, dtypes and numbers cost nothing. Checks of a tensor's values wait for its device,
so they can be switched off: see ``unchecked_values``.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_checked: ContextVar[bool] = ContextVar("_checked", default=True)

UNTRAINED = -(2**40)
"""The label of tokens that a mask leaves out. It is not -100, so that a -100 that counts is not
left out with them: if labels are not checked, the loss is NaN."""

_CP = "_fused_losses_cp"
"""An attribute of the tensor ``Pack.sequence``: over how many ranks the pack is split."""

_INTEGERS = (torch.int64, torch.int32, torch.int16)
"""Dtypes that can count the tokens of a batch. uint8 would take 256 for 0."""


@contextmanager
def unchecked_values() -> Generator[None]:
    """Switches off, inside a ``with``, the checks that read the values of tensors.

    These checks find a label outside of the vocabulary, a token that counts but has no label, a
    mask with other numbers than 0 and 1, a token in a sequence that does not exist, a count below
    what is in the call, and a negative weight. Each check waits for the device once. So check the
    first steps of a run, and put the later steps inside the ``with``. Checks of shapes, dtypes and
    numbers stay on. Code that ``torch.compile`` compiles is never checked.
    """
    before = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(before)


def values_are_checked() -> bool:
    """Returns whether a check may read the values of tensors."""
    # In this order: torch.compile cannot read a context variable.
    return not torch.compiler.is_compiling() and _checked.get()


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -inf,
    above: float = -inf,
    largest: float = inf,
    below: float = inf,
    otherwise: str = "",
) -> None:
    """Checks that an argument is a finite number within bounds.

    Args:
        name: the name of the argument.
        value: an integer or a float; a tensor is refused.
        least: the smallest number that is allowed.
        above: the number must be larger than this.
        largest: the largest number that is allowed.
        below: the number must be smaller than this.
        otherwise: what else the caller may pass, for the message, such as "or None for no bound".

    Raises:
        ValueError: The value is no such number; the message names the argument.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and least <= value <= largest and above < value < below:  # so it is finite
        return
    bounds = [f"above {above:g}"] * (above > -inf) + [f"from {least:g}"] * (least > -inf)
    bounds += [f"up to {largest:g}"] * (largest < inf) + [f"below {below:g}"] * (below < inf)
    expected = " ".join(["a finite number", *bounds])
    raise ValueError(f"{name} {value!r}: expected {expected}{otherwise and ', '}{otherwise}")


def check_setting(name: str, value: Any, *, also: tuple[Any, ...] = (), otherwise: str = "", **bounds: float) -> None:
    """Checks that an option is a finite Python number within bounds.

    Args:
        name: the name of the option.
        value: an integer or a float. A tensor is refused, because its number could not be checked
            without waiting for its device.
        also: other values that are allowed.
        otherwise: the meaning of these values, for the message.
        **bounds: the bounds that ``check_number`` takes.

    Raises:
        ValueError: The value is no such number; the message names the option.
    """
    if isinstance(value, Tensor):
        raise ValueError(f"{name} is a tensor {list(value.shape)}: expected a Python number; pass {name}.item()")
    if value not in also:
        check_number(name, value, otherwise=otherwise, **bounds)


def check_flags(**flags: Any) -> None:
    """Checks that options are True or False. The text "false" would count as true.

    Raises:
        ValueError: An option is something else; the message names it.
    """
    for name, flag in flags.items():
        check_choice(name, flag, (False, True))


def check_integer(name: str, value: Any, *, least: int, otherwise: str = "") -> None:
    """Checks that an argument is an integer of at least ``least``.

    Raises:
        ValueError: The value is no such integer; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} {value!r}: expected an integer from {least}{otherwise and ', '}{otherwise}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Checks that an argument is one of several values.

    A text may be of another class of texts, such as a member of a ``StrEnum``.

    Raises:
        ValueError: It is another value; the message names the argument and the allowed values.
    """
    kind = str if isinstance(value, str) else type(value)
    if not any(kind is type(choice) and value == choice for choice in choices):
        *most, last = map(repr, choices)
        way_out = f"; pass its value, {value.value!r}" if isinstance(value, Enum) else ""
        raise ValueError(f"{name} {value!r}: expected {', '.join(most)} or {last}{way_out}")


def check_tokens(needed: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> None:
    """Checks that every tensor has one number for each token.

    A tensor of another shape, such as ``[tokens, 1]``, would broadcast silently.

    Args:
        needed: tensors by argument name, ``[tokens]`` each. The first holds floats; the others must
            have its shape, on its device.
        optional: more tensors of this kind, or None in their place.

    Raises:
        ValueError: A tensor does not fit; the message names it.
    """
    first, like = next(iter(needed.items()))
    if not isinstance(like, Tensor) or like.dim() != 1:
        raise ValueError(f"{first} {_shown(like)}: expected [T], one for each token; flatten a batch of rows")
    if not like.is_floating_point():
        raise ValueError(f"{first} is {like.dtype}: expected floats")
    given = {name: x for name, x in (optional or {}).items() if x is not None}
    for name, x in {**needed, **given}.items():
        if not isinstance(x, Tensor) or x.shape != like.shape:
            raise ValueError(f"{name} {_shown(x)}: expected {list(like.shape)}, one for each token, as {first}")
        check_device(name, x, like, first)


def check_constants(tensors: Mapping[str, Tensor | None]) -> None:
    """Checks that no gradient flows to tensors that a loss takes for constants.

    It would cancel the gradient of the policy in a ratio, or train the reference.

    Raises:
        ValueError: A tensor needs a gradient; the message names it.
    """
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} needs a gradient: expected a constant; compute it under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def check_device(name: str, x: Tensor, like: Tensor, of: str = "logprobs") -> None:
    """Checks that a tensor is on the device of the tensor ``like``.

    Raises:
        ValueError: It is on another device; the message names both.
    """
    if x.device != like.device:
        raise ValueError(
            f"{name} is on {x.device}: expected {like.device}, as {of}; pass {name}.to({str(like.device)!r})"
        )


def _shown(x: Any) -> str:
    """Shows an argument in a message: a tensor by its shape."""
    return str(list(x.shape)) if isinstance(x, Tensor) else repr(x)


def as_counts(counts: Mapping[str, tuple[Any, Tensor | None]], like: Tensor) -> list[Tensor]:
    """Converts counts of the whole batch to scalars.

    Args:
        counts: by the name of the argument: a number from 0, or a tensor with one such number, on
            any device; and a scalar, how much of what it counts is in this call, or None.
        like: a tensor with the dtype and the device of the results.

    Raises:
        ValueError: A count is no such number, or is below what is in this call. Numbers in tensors
            are not read inside of ``unchecked_values``. Reading them waits for the device once for
            each count in a tensor, and once for all that is in this call.
    """
    for name, (count, _) in counts.items():
        _check_kind_of_count(name, count)
    if values_are_checked():
        given = {name: count.item() if isinstance(count, Tensor) else count for name, (count, _) in counts.items()}
        for name, number in given.items():
            check_number(name, number, least=0)
        owns = {name: own for name, (_, own) in counts.items() if own is not None}
        for name, own in zip(owns, torch.stack([*owns.values()]).tolist() if owns else (), strict=True):
            _check_covers(name, given[name], own)
    return [_as_scalar(count, like) for count, _ in counts.values()]


def as_count(name: str, count: Any, like: Tensor, own: Tensor | None) -> Tensor:
    """Converts one count, as ``as_counts`` does."""
    return as_counts({name: (count, own)}, like)[0]


def _as_scalar(count: Any, like: Tensor) -> Tensor:
    if not isinstance(count, Tensor):  # a sum, since torch.compile makes a constant of as_tensor(count)
        return torch.zeros((), dtype=like.dtype, device=like.device) + count
    return count.detach().to(like).reshape(())


def _check_kind_of_count(name: str, count: Any) -> None:
    if not isinstance(count, Tensor):
        check_number(name, count, least=0, otherwise="or a tensor with one such number")
    elif count.numel() != 1:
        raise ValueError(f"{name} {_shown(count)}: expected a number, or a tensor with one; add up counts of parts")
    elif count.dtype == torch.bool or count.is_complex():
        raise ValueError(f"{name} is {count.dtype}: expected a number; pass the number of what a mask counts")
    elif count.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} is {count.dtype}, which rounds counts: expected integers, float32 or float64; "
            "pass mask.sum(dtype=torch.int64)"
        )


def _check_covers(name: str, count: float, own: int) -> None:
    if count >= own * (1 - 1e-6):  # A mean over ranks times their number, in float32, may lack a little.
        return
    what, pairs = ("sequences", ", two for each pair") if "sequences" in name else ("tokens", "")
    raise ValueError(
        f"{name} {count:g}: expected at least {own}, the {what} that count in this call; pass the number of the whole "
        f"batch{pairs}, added up over microbatches and data- and context-parallel ranks; to divide by another number, "
        "multiply the loss"
    )


def as_sample_mask(sample_mask: Any, like: Tensor) -> Tensor:
    """Converts the argument ``sample_mask`` to bool.

    Args:
        sample_mask: ``[sequences]`` of bool, or of numbers 0 and 1.
        like: a tensor on the expected device.

    Raises:
        ValueError: The argument is no such tensor.
    """
    if not isinstance(sample_mask, Tensor) or sample_mask.dim() != 1:
        raise ValueError(
            f"sample_mask {_shown(sample_mask)}: expected [S] of bool, or of numbers 0 and 1, "
            "one for each sequence of the pack"
        )
    check_device("sample_mask", sample_mask, like)
    return as_mask("sample_mask", sample_mask, sample_mask)


def mark_as_split(sequence: Tensor, ranks: int) -> None:
    """Lets ``as_sequence`` know over how many ranks the tokens of a pack are split.

    The mark is on this tensor, not on what is computed from it.
    """
    if not torch.compiler.is_compiling():
        setattr(sequence, _CP, ranks)


def _check_split(sequence: Tensor, cp_group: dist.ProcessGroup | None) -> None:
    if torch.compiler.is_compiling():
        return
    ranks = 1 if cp_group is None else cp_group.size()
    split = getattr(sequence, _CP, ranks)
    if split != ranks:
        given = "None" if cp_group is None else f"of {ranks} ranks"
        raise ValueError(
            f"cp_group {given}: expected one of {split}, since sequence is that of a Pack over {split} ranks; pass the "
            "same cp_group to Pack.of and to the loss"
        )


def as_sequence(sequence: Tensor, mask: Tensor, sequences: int, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Converts the argument ``sequence`` to an index.

    Args:
        sequence: ``[tokens]`` integers, each token's sequence.
        mask: ``[tokens]`` bool, the tokens that count. Numbers at other tokens may be anything.
        sequences: the number of sequences in the pack.
        cp_group: the ranks over which the tokens of sequences are split.

    Returns:
        ``[tokens]`` int64, 0 at tokens that do not count.

    Raises:
        ValueError: The argument holds no integers, belongs to a ``Pack`` that is split over another
            number of ranks, or a token that counts is in a sequence outside of the pack. The latter
            is not checked inside of ``unchecked_values``.
    """
    _check_split(sequence, cp_group)
    if sequence.dtype not in _INTEGERS:
        raise ValueError(f"sequence is {sequence.dtype}: expected int64, int32 or int16; pass sequence.long()")
    if len(sequence) and not sequences:
        raise ValueError(f"sequence {list(sequence.shape)}: expected no tokens in a pack without sequences")
    if values_are_checked() and len(outside := (mask & ((sequence < 0) | (sequence >= sequences))).nonzero()):
        token = int(outside[0])
        raise ValueError(
            f"sequence: token {token} has {int(sequence[token])}, outside of the pack's sequences 0 to "
            f"{sequences - 1}; mask the token, or count its sequence"
        )
    return torch.where(mask, sequence, 0).long()


def as_mask(name: str, mask: Any, like: Tensor | torch.Size, of: str = "logprobs") -> Tensor:
    """Converts a mask to bool.

    Args:
        name: the name of the argument.
        mask: bool, integers or floats, 0 or 1 each; of the shape of ``like``.
        like: a tensor of the expected shape, or that shape.
        of: the name of the argument with this shape, for the message.

    Raises:
        ValueError: The mask is no tensor, has another shape, or holds other numbers than 0 and 1.
    """
    shape = list(like.shape if isinstance(like, Tensor) else like)
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"{name} {mask!r}: expected a tensor {shape} of bool, or of numbers 0 and 1; "
            "pass torch.ones(..., dtype=torch.bool) if all count"
        )
    if list(mask.shape) != shape:
        raise ValueError(f"{name} {list(mask.shape)}: expected {shape}, one entry for each of {of}")
    if isinstance(like, Tensor):
        check_device(name, mask, like, of)
    if mask.dtype == torch.bool:
        return mask
    true = mask != 0
    if values_are_checked() and bool((true & (mask != 1)).any()):
        other = mask[true & (mask != 1)][0].item()
        raise ValueError(
            f"{name} holds {other:g}: expected only 0 and 1; a mask says what counts, and does not weight it"
        )
    return true


def check_labels(
    labels: Tensor,
    counted: Tensor,
    vocab: int,
    start: int = 0,
    name: str = "labels",
    way_out: str = "mask the token, or declare how the vocabulary is split (vocab_start, tp_group)",
) -> None:
    """Checks that counted labels lie within a vocabulary.

    Args:
        labels: ``[tokens]`` integers.
        counted: ``[tokens]`` bool: the labels to check.
        vocab: the number of ids.
        start: the first id.
        name: the name of the argument.
        way_out: the end of the message, which says what to do.

    Raises:
        ValueError: A counted label lies outside; the message names it and its token.
    """
    if not values_are_checked():
        return
    outside = (counted & ((labels < start) | (labels >= start + vocab))).nonzero()
    if len(outside):
        token = int(outside[0])
        raise ValueError(
            f"{name}: token {token} has {int(labels.flatten()[token])}, outside of the vocabulary of ids "
            f"{start} to {start + vocab - 1}; {way_out}"
        )


def as_labels_of(mask: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Returns the labels of the tokens that a mask counts, and ``UNTRAINED`` for other tokens.

    Args:
        mask: ``[tokens]`` bool.
        labels: ``[tokens]`` integers.
        ignore_index: the label that says that a token has none.

    Raises:
        ValueError: A token that the mask counts has that label; the message names the token.
    """
    if values_are_checked() and len(without := (mask & (labels == ignore_index)).nonzero()):
        raise ValueError(
            f"labels: token {int(without[0])} has {ignore_index}, which is no label, but mask counts it; set mask to 0 "
            "there, as at the end of each sequence, or shift it as labels are shifted"
        )
    return torch.where(mask, labels.long(), UNTRAINED)


def check_label_dtype(labels: Tensor, name: str = "labels") -> None:
    """Checks that labels are integers that can hold ids and -100.

    Raises:
        ValueError: The labels have another dtype.
    """
    if labels.dtype not in _INTEGERS:
        raise ValueError(
            f"{name} is {labels.dtype}: expected int64, int32 or int16, which hold -100 too; "
            f"pass {name}.long() if it was not rounded"
        )
