# SPDX-License-Identifier: Apache-2.0
"""A problem: the small description, as JSON, from which every tensor of one example is made.

The structure (sizes, masks, options, scenarios) is drawn and shrunk. The numbers come from one
seed. The same problem gives the same tensors, bit for bit, on every machine. A file may hold any
description, so a problem that no strategy would draw is refused before its tensors are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES, Layout
from lossgate.base.names import DTYPES, nearest_dtype
from lossgate.base.shape import MOST_ROWS, MOST_TOKENS
from lossgate.base.spelling import counted, nearest, shown
from lossgate.numerics.float_formats import FLOAT_FORMATS, ROUNDED_TO, FloatFormat, RoundedTo
from lossgate.problems.masks import MaskPattern
from lossgate.problems.partition import Partition, VocabSplit

if TYPE_CHECKING:
    from lossgate.problems.problem import Problem

_MOST_NUMBERS = 2**33
"""The most numbers of a tensor. No machine holds a tensor that is much larger."""

_SEEDS = 2**32
RANGES = {"logit_std": (1e-9, 1000.0), "label_boost": (0.0, 100.0), "seed": (0, _SEEDS - 1)}
"""The smallest and the largest value of each number. With a spread of 0, logits have no label to
boost. With a spread of more than 1000, float16 does not hold them."""
MOST_OUTLIER = 1000.0
"""The largest outlier, of either sign."""


def check_problem(problem: Problem) -> None:
    """Refuses a problem that could not be drawn.

    Raises:
        UsageError: if a field is out of its range or contradicts another. The message says what was
            expected.
    """
    for check in (_check_sequences, _check_sizes, _check_dtype, _check_numbers, _check_places):
        check(problem)
    _ = problem.partition.vocab_shards  # raises where the layout is larger than the problem
    if (most := max(_numbers(problem))) > _MOST_NUMBERS:
        raise UsageError(
            f"problem: {_sizes(problem)}: a tensor of {most:,} numbers; expected {_MOST_NUMBERS:,} at most"
        )


def _sizes(problem: Problem) -> str:
    lengths = f"lengths={shown(problem.lengths)}"
    sizes = (f"{name}={shown(getattr(problem, name))}" for name in ("hidden", "vocab", "pad_to_multiple", "group_size"))
    return ", ".join((lengths, *sizes))


def _check_sequences(problem: Problem) -> None:
    masks, sequences = len(problem.masks), len(problem.lengths)
    if masks != sequences:
        raise UsageError(f"problem: {masks} masks for {sequences} sequences; give one for each")


def _check_sizes(problem: Problem) -> None:
    lengths, group = problem.lengths, problem.group_size
    sizes = (problem.hidden, problem.vocab, problem.pad_to_multiple, group)
    if sum(lengths) < 1 or min(lengths) < 0 or min(sizes) < 1:
        raise UsageError(
            f"problem: {_sizes(problem)}; expected at least one token, no negative length, and positive sizes"
        )
    if max(sizes) > MOST_ROWS or max(len(lengths), problem.partition.tokens) > MOST_TOKENS:
        raise UsageError(
            f"problem: {_sizes(problem)}; expected sizes of at most {MOST_ROWS:,}, at most {MOST_TOKENS:,} sequences, "
            f"and at most {MOST_TOKENS:,} tokens with padding"
        )
    if len(lengths) % group:
        raise UsageError(
            f"problem: group_size={group} does not divide {len(lengths)} sequences; add empty sequences (length 0)"
        )


def _numbers(problem: Problem) -> Iterator[int]:
    """Yields the sizes of the largest tensors: the logits, and the hidden states or the weight."""
    tokens = problem.partition.tokens
    yield tokens * problem.vocab
    if problem.head == "hidden":
        yield problem.hidden * max(tokens, problem.vocab)


def _check_dtype(problem: Problem) -> None:
    if problem.dtype not in DTYPES:
        raise UsageError(f"problem: unknown dtype {shown(problem.dtype)}; {nearest_dtype(problem.dtype)}")
    coarser = [name for name, one in ROUNDED_TO.items() if one.unit > FLOAT_FORMATS[problem.dtype].unit]
    if problem.rounded_to is not None and problem.rounded_to not in coarser:
        raise UsageError(
            f"problem: rounded_to={problem.rounded_to!r}; expected None, or a format that is coarser than "
            f"{problem.dtype}: {', '.join(coarser) or 'there is none'}"
        )


def _check_numbers(problem: Problem) -> None:
    for name, (low, high) in RANGES.items():
        if not low <= (value := getattr(problem, name)) <= high:
            raise UsageError(f"problem: {name}={shown(value)}; expected a number from {low:.15g} to {high:.15g}")
    if problem.bias and problem.vocab < 2:
        raise UsageError(
            "problem: bias=True with vocab=1; expected vocab=2 or more: with a single row the bias has a gradient of "
            "0, and a kernel returns nothing but rounding errors"
        )


def _check_places(problem: Problem) -> None:
    """Refuses labels and outliers at tokens, rows or columns that are not there."""
    tokens, columns = problem.tokens, problem.outlier_columns
    for token, row in problem.forced_labels:
        if not (0 <= token < tokens and 0 <= row < problem.vocab):
            raise UsageError(
                f"problem: forced_labels has {shown((token, row))}; expected a token below {tokens} and a row below "
                f"{problem.vocab}"
            )
    for token, column, value in problem.outliers:
        if not (0 <= token < tokens and 0 <= column < columns):
            raise UsageError(
                f"problem: outliers has {shown((token, column))}; expected a token below {tokens} and a column below "
                f"{columns}"
            )
        if not abs(value) <= MOST_OUTLIER:
            raise UsageError(
                f"problem: outliers has the value {value!r}; expected a number from {-MOST_OUTLIER:g} to "
                f"{MOST_OUTLIER:g}"
            )


Cotangent = Literal["loss", "logprobs", "token_entropy", "both"]
ReductionOrder = Literal["rank", "permuted", "tree", "ring"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. Tokens are counted over the sequences end to end, without padding.

    Raises:
        UsageError: if such a problem could not be drawn: sizes contradict each other, a number is
            out of its range, or the layout is larger than the problem. Whether it fits its spec,
            its head and a candidate is checked later; see ``cases.fit``.
    """

    spec: str
    head: str
    dtype: str
    """The dtype of the differentiable inputs: hidden states, weight and bias; logits; or values."""
    rounded_to: RoundedTo | None = None
    """The coarsest format to which kernels round the inputs of the loss; None if that is ``dtype``.
    Tokens that this rounding could move over a kink, or over the edge of a filter of logits, are
    not trained. Drawn problems have the format of the kernel's declaration."""
    layout: Layout = field(default_factory=Layout)
    lengths: tuple[int, ...]
    """Tokens of each sequence; 0 for an empty one."""
    masks: tuple[MaskPattern, ...]
    """Which tokens of each sequence are trained."""
    pad_to_multiple: int = 1
    """Each sequence is padded to a multiple of this, times the number of pieces into which the
    layout cuts it."""
    hidden: int
    """Width of the hidden states; used only at head "hidden"."""
    vocab: int
    vocab_split: VocabSplit = "balanced"
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """The options of the spec that are not at their default."""
    scenario: dict[str, str] = field(default_factory=dict)
    """How the further inputs of the spec are made. Choices at their default are left out."""
    group_size: int = 1
    """Neighbouring sequences that dp keeps on one rank; 2 for preference pairs."""
    logit_std: float = 1.0
    """Standard deviation of the logits, before the temperature."""
    label_boost: float = 0.0
    """Nats that are added to the label's tempered logit at about every other token, so that the
    label is confident there."""
    forced_labels: tuple[tuple[int, int], ...] = ()
    """``(token, row)``: the token has this row of the vocabulary as its label."""
    outliers: tuple[tuple[int, int, float], ...] = ()
    """``(token, column, value)``: this entry of the hidden states, or of the logits, has this
    value."""
    cotangent: Cotangent = "loss"
    """The outputs that get an upstream gradient."""
    reduction_order: ReductionOrder = "rank"
    """The order in which a simulated world adds up the ranks' tensors in a collective."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_problem(self)

    @property
    def coarsest(self) -> FloatFormat:
        """The coarsest format to which kernels round the inputs of the loss."""
        return FLOAT_FORMATS[self.dtype] if self.rounded_to is None else ROUNDED_TO[self.rounded_to]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def outlier_columns(self) -> int:
        """Columns of the tensor that holds the outliers."""
        return self.hidden if self.head == "hidden" else self.vocab

    def another_seed(self, number: int = 1) -> int:
        """Returns a seed of other numbers, and others again for each ``number``."""
        return (self.seed + number) % _SEEDS

    @property
    def unsharded(self) -> Problem:
        """The same problem on one rank, without padding.

        All numbers are drawn from its JSON, so they are the same on every layout.
        """
        return replace(self, layout=Layout(), vocab_split="balanced", pad_to_multiple=1, reduction_order="rank")

    @property
    def partition(self) -> Partition:
        """How the problem's layout splits it."""
        return Partition(self.layout, self.lengths, self.vocab, self.vocab_split, self.pad_to_multiple, self.group_size)

    def to_json(self) -> str:
        """Returns the problem as JSON, without fields at their default.

        So a field that is added in a later version changes neither the JSON of older problems nor
        the numbers drawn from it.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = _defaults()
        given = {name: value for name, value in values.items() if name not in plain or plain[name] != value}
        return msgspec.json.encode(given).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Problem:
        """Reads a problem that ``to_json`` wrote.

        Raises:
            UsageError: if the text is no problem; the message says where.
        """
        try:
            return cls.from_builtins(msgspec.json.decode(text))
        except msgspec.MsgspecError as error:
            raise UsageError(f"problem: {error}") from None

    @classmethod
    def from_builtins(cls, values: Any) -> Problem:
        """Makes a problem from decoded JSON.

        Raises:
            UsageError: if a field is unknown. Else a file of another version of lossgate could be
                read as another problem.
            msgspec.ValidationError: if a value does not fit its field.
        """
        known = [f.name for f in fields(cls)]
        for name in values if isinstance(values, dict) else ():
            if name not in known:
                raise UsageError(f"problem: unknown field {shown(name)}; {nearest(name, known)}")
        problem, layout = msgspec.convert(values, cls), values.get("layout", {})
        for name in layout:
            if name not in AXES:
                raise UsageError(f"problem: its layout has the unknown axis {shown(name)}; {nearest(name, AXES)}")
        return problem

    def describe(self) -> str:
        """Returns one line for people: sizes first, then fields that are not at their default."""
        parts = [f"{counted(self.tokens, 'token')} in {counted(len(self.lengths), 'sequence')} {list(self.lengths)}"]
        alike = len({*self.masks}) == 1
        parts.append(f"masks {self.masks[0]}" if alike else f"masks [{', '.join(self.masks)}]")
        if self.head == "hidden":
            parts.append(f"hidden {self.hidden}")
        parts += [f"vocab {self.vocab}", f"layout {self.layout}", self.dtype, f"logit_std {self.logit_std:g}"]
        if self.rounded_to is not None:
            parts.append(f"rounded to {self.rounded_to}")
        plain = _defaults()
        for name in ("pad_to_multiple", "vocab_split", "bias", "label_boost", "forced_labels", "outliers", "cotangent"):
            if (value := getattr(self, name)) != plain[name]:
                parts.append(f"{name} {value}")
        parts += [f"{name} {value}" for name, value in (self.options | self.scenario).items()]
        return ", ".join([*parts, f"seed {self.seed}"])


@cache
def _defaults() -> dict[str, Any]:
    """Returns the default of each field that has one."""
    made = {f.name: f.default_factory() for f in fields(Problem) if f.default_factory is not MISSING}
    return made | {f.name: f.default for f in fields(Problem) if f.default is not MISSING}
