# SPDX-License-Identifier: Apache-2.0
"""A problem: the small, JSON-able description from which every tensor of one example is made.

The structure (sizes, masks, options, regimes) is drawn and shrunk; the numbers come from one seed. The same problem
gives the same tensors, bit for bit, on every machine.
"""

from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal

import msgspec

from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.problems.partition import Partition, VocabSplit

MaskPattern = Literal["all", "none", "response", "holes"]
MASK_PATTERNS: dict[MaskPattern, str] = {
    "all": "every token that has a next one in its sequence",
    "none": "no token",
    "response": "the tail of the sequence, from a random token on",
    "holes": "tokens at random, about six in ten",
}

Cotangent = Literal["loss", "logprobs", "token_entropy", "both"]
ReductionOrder = Literal["rank", "permuted", "tree", "ring"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """See the module. Tokens are counted over the sequences put end to end, without padding."""

    spec: str
    head: str
    dtype: str
    """Of hidden, weight, bias or logits."""
    layout: Layout = field(default_factory=Layout)
    lengths: tuple[int, ...]
    """Tokens of each sequence; 0 for an empty one."""
    masks: tuple[MaskPattern, ...]
    """Which tokens of each sequence are trained."""
    multiple: int = 1
    """Each sequence is padded to a multiple of this, on top of what the layout needs."""
    hidden: int
    """Width of the hidden states; unused at head "logits"."""
    vocab: int
    vocab_split: VocabSplit = "balanced"
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the spec that are not at their default."""
    scenario: dict[str, str] = field(default_factory=dict)
    """How the spec's further inputs are made, where not plainly: ``Spec.scenario``."""
    together: int = 1
    """Neighbouring sequences that dp keeps on one rank; 2 for preference pairs."""
    spread: float = 1.0
    """Standard deviation of the logits, before the temperature."""
    confidence: float = 0.0
    """Nats added to the label's tempered logit, at every other token or so."""
    pins: tuple[tuple[int, int], ...] = ()
    """``(token, row)``: the label of that token is that row of the vocabulary."""
    spikes: tuple[tuple[int, int, float], ...] = ()
    """``(token, column, value)``: that entry of hidden, or of the logits, is that value."""
    cotangent: Cotangent = "loss"
    """The outputs that get an upstream gradient."""
    reduction_order: ReductionOrder = "rank"
    """In which order a simulated world adds up what the ranks bring to a collective."""
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.masks) != len(self.lengths):
            raise UsageError(f"problem: {len(self.masks)} masks for {len(self.lengths)} sequences; give one for each")
        if len(self.lengths) % self.together:
            raise UsageError(f"problem: {len(self.lengths)} sequences do not make groups of {self.together}")
        if sum(self.lengths) < 1 or min(self.lengths) < 0 or self.hidden < 1 or self.vocab < 1 or self.multiple < 1:
            raise UsageError("problem: it needs at least one token, and positive sizes of hidden, vocab and multiple")
        for token, row in self.pins:
            if not (0 <= token < self.tokens and 0 <= row < self.vocab):
                raise UsageError(
                    f"problem: pin ({token}, {row}) is outside of {self.tokens} tokens x {self.vocab} rows"
                )
        for token, column, _ in self.spikes:
            if not (0 <= token < self.tokens and 0 <= column < self.columns):
                raise UsageError(
                    f"problem: spike at ({token}, {column}) is outside of {self.tokens} tokens x {self.columns} columns"
                )
        self.partition.vocab_shards  # noqa: B018  raises where the layout is larger than the problem

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def columns(self) -> int:
        """Columns of the tensor that spikes hit."""
        return self.hidden if self.head == "hidden" else self.vocab

    @property
    def partition(self) -> Partition:
        return Partition(self.layout, self.lengths, self.vocab, self.vocab_split, self.multiple, self.together)

    def to_json(self) -> str:
        """Without what is at its default: a field that is added some day leaves the problems of today, and their numbers, as they are."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = _defaults()
        return msgspec.json.encode(
            {name: value for name, value in values.items() if name not in plain or plain[name] != value}
        ).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Problem":
        try:
            return msgspec.json.decode(text, type=Problem)
        except msgspec.MsgspecError as error:
            raise UsageError(f"problem: {error}") from None

    def describe(self) -> str:
        """One line for people: sizes first, then whatever is not plain."""
        parts = [
            f"{self.tokens} tokens in {len(self.lengths)} sequences {list(self.lengths)}",
            f"masks {'/'.join(self.masks)}",
        ]
        parts += [f"hidden {self.hidden}"] * (self.head == "hidden") + [f"vocab {self.vocab}"]
        parts += [f"layout {self.layout}", self.dtype, f"logit spread {self.spread:g}"]
        plain = _defaults()
        for name in ("multiple", "vocab_split", "bias", "confidence", "pins", "spikes", "cotangent"):
            if (value := getattr(self, name)) != plain[name]:
                parts.append(f"{name} {value}")
        parts += [f"{name} {value}" for name, value in (self.options | self.scenario).items()]
        return ", ".join([*parts, f"seed {self.seed}"])


@cache
def _defaults() -> dict[str, Any]:
    """Of the fields that have one."""
    made = {f.name: f.default_factory() for f in fields(Problem) if f.default_factory is not MISSING}
    return made | {f.name: f.default for f in fields(Problem) if f.default is not MISSING}
