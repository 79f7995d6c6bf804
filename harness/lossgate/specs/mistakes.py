# SPDX-License-Identifier: Apache-2.0
"""Mistakes that kernels of a spec have made, or easily make, in its options and fields.

``kernel_bank.bugs`` makes kernels of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What a correct kernel gets wrong if it is given other options or other inputs.

    Args:
        name: of the mistake.
        sentence: what the kernel does, for people.
        options: ``options -> `` those that the kernel works with.
        inputs: ``inputs of a rank -> `` the fields of them that the kernel replaces.
    """

    name: str
    sentence: str
    options: Callable[[Any], Any] = lambda options: options
    inputs: Callable[[Any], Mapping[str, Tensor]] = lambda inputs: {}


def mistaken_choice(option: str, value: Any, other: Any) -> Mistake:
    """Returns the mistake of taking one choice of an option for another."""
    return Mistake(
        name=f"{option}: {value} as {other}",
        sentence=f"computes {option}={value} as {other}",
        options=lambda o: replace(o, **{option: other}) if getattr(o, option) == value else o,
    )


def fixed_option(option: str, value: Any, sentence: str) -> Mistake:
    """Returns the mistake of computing with one value of an option whatever is asked for."""
    return Mistake(name=f"{option} always {value}", sentence=sentence, options=lambda o: replace(o, **{option: value}))
