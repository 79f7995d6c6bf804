# SPDX-License-Identifier: Apache-2.0
"""A problem: the small description, as JSON, from which every tensor of one example is made.

The structure (sizes, masks, options, scenarios) is drawn and shrunk; the numbers come from one
seed. The same problem gives the same tensors, bit for bit, on every machine. A file may say
anything: what no strategy would draw is refused before tensors are made of it.
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
"""The most numbers of a tensor: no machine holds one that is much larger."""

RANGES = {"logit_std": (1e-9, 1000.0), "label_boost": (0.0, 100.0), "seed": (0, 2**32 - 1)}
"""What numbers may be. A spread of 0 has no label to boost, and float16 holds no logits that spread
more than 1000."""
MOST_OUTLIER = 1000.0
"""The largest outlier, of either sign."""


def check_problem(problem: Problem) -> None:
    """Refuses what no problem can be.

    Raises:
        UsageError: with what is wrong, and what was expected.
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
            f"problem: {_sizes(problem)}; expected sizes of at most {MOST_ROWS:,}, and at most {MOST_TOKENS:,} tokens, "
            "with padding, and sequences"
        )
    if len(lengths) % group:
        raise UsageError(
            f"problem: group_size={group} does not divide {len(lengths)} sequences; add empty sequences (length 0)"
        )


def _numbers(problem: Problem) -> Iterator[int]:
    """Yields how many numbers tensors have: hidden states, weight and logits."""
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
            "problem: a bias with vocab=1; expected two rows at least: the gradient of one is 0, and what a kernel "
            "gives is all rounding"
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
        UsageError: if none like it could be drawn: sizes contradict each other, a number is out of
            its range, or the layout is larger than the problem. What its spec, its head and a
            candidate need is checked where it meets them; see ``cases.fit``.
    """

    spec: str
    head: str
    dtype: str
    """The dtype of the differentiable inputs: hidden states, weight and bias; logits; or values."""
    rounded_to: RoundedTo | None = None
    """The coarsest format to which kernels round what the loss is computed from; None if that is
    ``dtype``. Tokens near a kink, or near the edge of a filter of logits, keep clear by it. Drawn
    problems have it from the kernel's declaration."""
    layout: Layout = field(default_factory=Layout)
    lengths: tuple[int, ...]
    """Tokens of each sequence; 0 for an empty one."""
    masks: tuple[MaskPattern, ...]
    """Which tokens of each sequence are trained."""
    pad_to_multiple: int = 1
    """Each sequence is padded to a multiple of this, on top of what the layout needs."""
    hidden: int
    """Width of the hidden states; used at head "hidden" only."""
    vocab: int
    vocab_split: VocabSplit = "balanced"
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """The options of the spec that are not at their default."""
    scenario: dict[str, str] = field(default_factory=dict)
    """How the spec's further inputs are made; choices that are at their default are left out."""
    group_size: int = 1
    """Neighbouring sequences that dp keeps on one rank; 2 for preference pairs."""
    logit_std: float = 1.0
    """Standard deviation of the logits, before the temperature."""
    label_boost: float = 0.0
    """Nats added to the label's tempered logit at about every other token, which makes those labels
    confident."""
    forced_labels: tuple[tuple[int, int], ...] = ()
    """``(token, row)``: the label of that token is that row of the vocabulary."""
    outliers: tuple[tuple[int, int, float], ...] = ()
    """``(token, column, value)``: that entry of the hidden states, or of the logits, has that
    value."""
    cotangent: Cotangent = "loss"
    """The outputs that get an upstream gradient."""
    reduction_order: ReductionOrder = "rank"
    """The order in which a simulated world adds up what the ranks bring to a collective."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_problem(self)

    @property
    def coarsest(self) -> FloatFormat:
        """The coarsest format to which kernels round what the loss is computed from."""
        return FLOAT_FORMATS[self.dtype] if self.rounded_to is None else ROUNDED_TO[self.rounded_to]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def outlier_columns(self) -> int:
        """Columns of the tensor that holds the outliers."""
        return self.hidden if self.head == "hidden" else self.vocab

    @property
    def unsharded(self) -> Problem:
        """The same on one rank, without padding.

        All numbers are drawn from its JSON, so that they are the same on every layout.
        """
        return replace(self, layout=Layout(), vocab_split="balanced", pad_to_multiple=1, reduction_order="rank")

    @property
    def partition(self) -> Partition:
        """How the problem's layout splits it."""
        return Partition(self.layout, self.lengths, self.vocab, self.vocab_split, self.pad_to_multiple, self.group_size)

    def to_json(self) -> str:
        """Returns the problem as JSON, without fields at their default.

        A field that is added later thus leaves the JSON of today's problems, and the numbers drawn
        from it, unchanged.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = _defaults()
        given = {name: value for name, value in values.items() if name not in plain or plain[name] != value}
        return msgspec.json.encode(given).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Problem:
        """Reads what ``to_json`` wrote.

        Raises:
            UsageError: if the text is no problem; the message says where.
        """
        try:
            return cls.from_builtins(msgspec.json.decode(text))
        except msgspec.MsgspecError as error:
            raise UsageError(f"problem: {error}") from None

    @classmethod
    def from_builtins(cls, values: Any) -> Problem:
        """Makes a problem of what JSON holds.

        Raises:
            UsageError: if a field is unknown, so that a file of another version of lossgate is not
                taken for another problem.
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
        """Returns one line for people: sizes first, then what is not at its default."""
        parts = [f"{counted(self.tokens, 'token')} in {counted(len(self.lengths), 'sequence')} {list(self.lengths)}"]
        alike = len({*self.masks}) == 1
        parts += [f"masks {self.masks[0]}" if alike else f"masks [{', '.join(self.masks)}]"]
        parts += [f"hidden {self.hidden}"] * (self.head == "hidden") + [f"vocab {self.vocab}"]
        parts += [f"layout {self.layout}", self.dtype, f"logit_std {self.logit_std:g}"]
        plain = _defaults()
        parts += [f"rounded to {self.rounded_to}"] * (self.rounded_to is not None)
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
