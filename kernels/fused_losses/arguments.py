# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several kernels and losses share.

Checks of shapes, dtypes and numbers cost nothing. Those of a tensor's values wait for its device,
so they can be switched off: see ``unchecked_values``.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

_checked: ContextVar[bool] = ContextVar("_checked", default=True)


@contextmanager
def unchecked_values() -> Generator[None]:
    """Switches off, inside a ``with``, the checks that read the values of tensors.

    They find a label outside of the vocabulary, and a mask with other numbers than 0 and 1. Each
    waits for the device once. So check the first steps of a run, and put the others inside. Checks
    of shapes, dtypes and numbers stay. What ``torch.compile`` compiles is unchecked in any case.
    """
    before = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(before)


def values_are_checked() -> bool:
    """Returns whether a check may read the values of tensors."""
    return not torch.compiler.is_compiling() and _checked.get()


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -inf,
    above: float = -inf,
    largest: float = inf,
    otherwise: str = "",
) -> None:
    """Checks that an argument is a finite number within bounds.

    Args:
        name: of the argument.
        value: an integer, a float, or a tensor with one number, whose value is not read.
        least: the smallest number that is allowed.
        above: numbers up to this one are not allowed.
        largest: the largest number that is allowed.
        otherwise: what else the caller may pass, for the message, such as "or None for no bound".

    Raises:
        ValueError: It is no such number; the message names the argument.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and isfinite(value) and value >= least and value > above and value <= largest:
        return
    bounds = [f"above {above:g}"] * (above > -inf) + [f"from {least:g}"] * (least > -inf)
    bounds += [f"up to {largest:g}"] * (largest < inf)
    expected = " ".join(["a finite number", *bounds])
    raise ValueError(f"{name} {value!r}: expected {expected}{otherwise and ', '}{otherwise}")


def check_integer(name: str, value: Any, *, least: int, otherwise: str = "") -> None:
    """Checks that an argument is an integer of at least ``least``.

    Raises:
        ValueError: It is not; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} {value!r}: expected an integer from {least}{otherwise and ', '}{otherwise}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Checks that an argument is one of several values.

    Raises:
        ValueError: It is not; the message names the argument and the values.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *most, last = map(repr, choices)
        raise ValueError(f"{name} {value!r}: expected {', '.join(most)} or {last}")


def as_mask(name: str, mask: Any, like: Tensor | torch.Size, of: str = "logprobs") -> Tensor:
    """Converts a mask to bool.

    Args:
        name: of the argument.
        mask: bool, integers or floats, 0 or 1 each; of the shape of ``like``.
        like: a tensor with one entry for each of the mask, or its shape.
        of: the argument whose shape that is, for the message.

    Raises:
        ValueError: It is no tensor, has another shape, or holds other numbers than 0 and 1.
    """
    shape = list(like.shape if isinstance(like, Tensor) else like)
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"{name} {mask!r}: expected a tensor {shape} of bool, or of numbers 0 and 1; "
            "pass torch.ones(..., dtype=torch.bool) if all count"
        )
    if list(mask.shape) != shape:
        raise ValueError(f"{name} {list(mask.shape)}: expected {shape}, one entry for each of {of}")
    if mask.dtype == torch.bool:
        return mask
    true = mask != 0
    if values_are_checked() and bool((true & (mask != 1)).any()):
        other = mask[true & (mask != 1)][0].item()
        raise ValueError(
            f"{name} holds {other:g}: expected 0 and 1 alone; a mask says what counts, and does not weight it"
        )
    return true


def check_labels(labels: Tensor, counted: Tensor, vocab: int, start: int = 0, name: str = "labels") -> None:
    """Checks that counted labels lie within a vocabulary.

    Args:
        labels: ``[tokens]`` integers.
        counted: ``[tokens]`` bool; other labels may be anything.
        vocab: the number of ids.
        start: the first id.
        name: of the argument.

    Raises:
        ValueError: A counted label lies outside; the message names it and its token.
    """
    if not values_are_checked():
        return
    outside = (counted & ((labels < start) | (labels >= start + vocab))).nonzero()
    if len(outside):
        token = int(outside[0])
        raise ValueError(
            f"{name}: that of token {token} is {int(labels.flatten()[token])}, outside of the vocabulary of ids "
            f"{start} to {start + vocab - 1}; mask the token, or declare how the vocabulary is split "
            "(vocab_start, tp_group)"
        )


def check_label_dtype(labels: Tensor, name: str = "labels") -> None:
    """Checks that labels are integers that can hold ids and -100.

    Raises:
        ValueError: They have another dtype.
    """
    if labels.dtype not in (torch.int64, torch.int32, torch.int16):
        raise ValueError(
            f"{name} is {labels.dtype}: expected int64, int32 or int16, which hold -100 too; "
            f"pass {name}.long() if it was not rounded"
        )
