# SPDX-License-Identifier: Apache-2.0
"""A problem: the small description, as JSON, from which every tensor of one example is made.

The structure (sizes, masks, options, scenarios) is drawn and shrunk; the numbers come from one
seed. The same problem gives the same tensors, bit for bit, on every machine.
"""

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

import msgspec

from lossgate.counted import counted
from lossgate.errors import UsageError
from lossgate.layout import AXES, Layout
from lossgate.numerics.float_formats import FLOAT_FORMATS, ROUNDED_TO, FloatFormat, RoundedTo
from lossgate.problems.checked import check_problem
from lossgate.problems.masks import MaskPattern
from lossgate.problems.partition import Partition, VocabSplit
from lossgate.spelling import nearest, shown

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
    def unsharded(self) -> "Problem":
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
    def from_json(cls, text: str | bytes) -> "Problem":
        """Reads what ``to_json`` wrote.

        Raises:
            UsageError: if the text is no problem; the message says where.
        """
        try:
            return cls.from_builtins(msgspec.json.decode(text))
        except msgspec.MsgspecError as error:
            raise UsageError(f"problem: {error}") from None

    @classmethod
    def from_builtins(cls, values: Any) -> "Problem":
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
