# SPDX-License-Identifier: Apache-2.0
"""The options of a spec, and the values that problems draw for them."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from math import floor, isfinite, log10
from types import MappingProxyType
from typing import Any

import torch

from lossgate.base.argument import Argument
from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.problems.partition import VOCAB_SPLITS
from lossgate.specs.record import Between, check_domain

TEMPERATURE = (0.3, 3.0)
SOFTCAPS = (None, 2.0, 30.0)
"""The soft-caps that problems draw. 30 is that of Gemma 2; 2 bends even the small logits of
problems."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a spec, or a scenario: a way in which problems draw the fields.

    Args:
        name: of the option.
        meaning: what it does, for people.
        default: its default.
        choices: the values that problems draw. A value that is listed twice is drawn twice as
            often.
        interval: two numbers between which problems draw, instead of ``choices``.
        on_request: further choices of a scenario. Problems have them only for candidates that
            exclude all of ``choices``.

    A kernel may support numbers that ``choices`` does not list, if one of the choices is a float.
    """

    name: str
    meaning: str
    default: Any
    choices: tuple[Any, ...] = ()
    interval: tuple[float, float] | None = None
    on_request: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Returns whether a candidate may support this value."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if self.interval:
            return number and self.interval[0] <= value <= self.interval[1]
        if number and any(isinstance(choice, float) for choice in self.choices):
            return True
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    @property
    def drawn(self) -> tuple[Any, ...]:
        """The values that problems draw.

        For an interval, these are the default and evenly spaced numbers. They are rounded to
        bfloat16, so that a kernel makes no error if it rounds the option itself; or to float32, if
        the interval is too narrow for bfloat16.
        """
        if self.interval is None:
            return self.choices
        for dtype in (torch.bfloat16, torch.float32):
            rounded = {x for x in _evenly(*self.interval, dtype) if self.allows(x)}
            if len(rounded) >= _ENOUGH:
                break
        return tuple(sorted({self.default, *rounded}))

    @property
    def domain(self) -> str:
        """The allowed values, for people."""
        if self.interval:
            return f"{self.interval[0]:g} to {self.interval[1]:g}"
        return " | ".join(map(str, dict.fromkeys(self.choices)))


COMMON_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "bias": Option(
            name="bias", meaning="the lm-head has a bias (head hidden)", default=False, choices=(False, True)
        ),
        "vocab_split": Option(
            name="vocab_split",
            meaning="how tp splits the vocabulary: " + "; ".join(f"{k}: {v}" for k, v in VOCAB_SPLITS.items()),
            default="balanced",
            choices=tuple(VOCAB_SPLITS),
        ),
    }
)
"""The options that every spec has in addition to its own."""

EMPTY = Option(
    name="empty",
    meaning="what may be empty: a sequence, which then has no token; a dp rank, whose sequences then are all empty; or "
    "a shard, a tp rank that then has no row of the vocabulary, as vocab_split 'chunked' gives",
    default="nothing",
    choices=("sequence", "rank", "shard"),
)
LARGE_SIZES = Option(
    name="large",
    meaning="what may be large in a problem: thousands of tokens, dozens of sequences, or a vocabulary of more rows "
    "than int16 counts",
    default="nothing",
    choices=("tokens", "sequences", "vocabulary"),
)
OF_SIZES = {EMPTY.name: EMPTY, LARGE_SIZES.name: LARGE_SIZES}
"""The scenarios of every spec. Their choices come with sizes and layouts, and are not drawn."""


_ENOUGH = 8
"""The fewest numbers that an interval should have. Steps of a power of ten give at least ten before
they are rounded, which may make some equal."""


def _evenly(low: float, high: float, dtype: torch.dtype) -> list[float]:
    """Returns 11 to 100 numbers of an interval, rounded."""
    step = 10.0 ** (floor(log10(high - low)) - 1)
    return [float(torch.tensor(low + n * step, dtype=dtype)) for n in range(round((high - low) / step) + 1)]


Domain = tuple[Any, ...]
"""Choices; or ``Between(low, high)``."""


def options_of(options_type: type, domains: Mapping[str, Domain]) -> tuple[Option, ...]:
    """Returns one ``Option`` for each field of ``options_type``, in its order.

    Args:
        options_type: the dataclass of the options. Each field's metadata holds its ``meaning``, and
            may hold its ``domain``.
        domains: by field, the values that problems draw. They replace those of the class.

    Raises:
        UsageError: if a field has no default, meaning or domain, or ``domains`` names none of the
            fields.
    """
    known = {f.name: f for f in fields(options_type)}
    for name in domains:
        if name not in known:
            raise UsageError(
                f"choices={{{name!r}: ...}}: {options_type.__name__} has no option {name!r}; {nearest(name, known)}"
            )
    return tuple(_option(f, options_type, domains.get(name, f.metadata.get("domain"))) for name, f in known.items())


def _option(f: Field[Any], options_type: type, domain: Domain | None) -> Option:
    where = f"{options_type.__name__}.{f.name}"
    if f.default is MISSING:
        raise UsageError(f"{where} has no default; give it one: {f.name} = lossgate.option(default, meaning, ...)")
    meaning = f.metadata.get("meaning")
    if not isinstance(meaning, str) or not meaning.strip():
        raise UsageError(
            f"{where} does not say what it means; write {f.name} = lossgate.option({f.default!r}, meaning, ...)"
        )
    if not domain and isinstance(f.default, bool):
        domain = (f.default, not f.default)
    if domain is None or domain == ():
        raise UsageError(
            f"{where} does not say which values problems draw; "
            f"write lossgate.option({f.default!r}, ..., choices=(...)) or, for numbers, between=(low, high)"
        )
    check_domain(f.default, domain, Argument(f"{where}(", "choices", domain))
    drawn: dict[str, Any] = {"interval": tuple(domain)} if isinstance(domain, Between) else {"choices": tuple(domain)}
    return Option(name=f.name, meaning=meaning, default=f.default, **drawn)
