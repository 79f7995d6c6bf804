# SPDX-License-Identifier: Apache-2.0
"""Conventions between a kernel and its callers: what the kernel is never given, and what its
callers do with what it returns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from lossgate.base.argument import arguments

UnderMask = Literal["anything", "finite", "usual"]
Counts = Literal["given", "own"]
Untrained = Literal["zero", "nan", "error", "never"]
EmptyRanks = Literal["taken", "refused"]
Hooks = Literal["taken", "refused"]
MinusInf = Literal["taken", "never"]
Inputs = Literal["kept", "written"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What a kernel's callers take care of, so that the kernel need not promise it.

    The defaults promise most. A kernel is judged for what it still promises, and the verdict and
    evidence name what is declared.

    Raises:
        UsageError: if a convention has no such choice.
    """

    under_mask: UnderMask = "anything"
    """What numbers stand at tokens whose mask is false. "anything": also NaN. "finite": any size,
    but no NaN. "usual": numbers, and labels, of the size of those at other tokens, as a kernel
    needs that multiplies by the mask."""
    counts: Counts = "given"
    """What divides sums. "given": the counts of the whole batch, which are among the inputs. "own":
    the counts of the tokens or sequences that the call itself holds. The caller then multiplies the
    results of each call by its share of the count of the batch. lossgate does that over dp and cp,
    and for microbatches."""
    untrained: Untrained = "zero"
    """What comes of a call in which nothing is trained. "zero": a loss of 0, or what the reference
    says, with gradients of 0. "nan": a loss of NaN, as of ``F.cross_entropy``. "error": an error.
    "never": callers make no such call."""
    empty_ranks: EmptyRanks = "taken"
    """Whether a dp rank, or a microbatch, without a single token is "taken", or "refused" by an
    error."""
    hooks: Hooks = "taken"
    """Whether hooks on saved tensors, as reentrant checkpointing and offloading need them, are
    "taken", or "refused" by an error, as ``torch.func`` does."""
    minus_inf: MinusInf = "taken"
    """Whether logits of -inf for ids that are no label are "taken", or "never" given."""
    inputs: Inputs = "kept"
    """Whether inputs are "kept" as they are, or "written" by the call, as in libraries that save
    memory. Callers then use them no more."""

    def __post_init__(self) -> None:
        given = arguments("Conventions(", vars(self))
        for name, hint in get_type_hints(Conventions).items():
            given[name].one_of(get_args(hint))

    @property
    def declared(self) -> dict[str, str]:
        """The conventions that are not the default, and what each means, in words."""
        return {f"{name}={getattr(self, name)!r}": words for name, words in self._words()}

    def _words(self) -> Iterator[tuple[str, str]]:
        for field in fields(self):
            if (choice := getattr(self, field.name)) != field.default:
                yield field.name, _WORDS[field.name][choice]

    @property
    def calls_need_training(self) -> bool:
        """Whether callers make no call in which nothing is trained, or must expect an error."""
        return self.untrained in ("error", "never")

    @property
    def ranks_have_tokens(self) -> bool:
        """Whether callers give a token to every rank, or must expect an error."""
        return self.empty_ranks == "refused" or self.calls_need_training


_WORDS: Mapping[str, Mapping[str, str]] = {
    "under_mask": {
        "finite": "numbers at masked tokens are finite",
        "usual": "numbers and labels at masked tokens are of the size of others",
    },
    "counts": {"own": "each call divides by its own counts, and its caller weighs it by them"},
    "untrained": {
        "nan": "with nothing trained the loss is NaN",
        "error": "with nothing trained it raises an error",
        "never": "something is trained in every call",
    },
    "empty_ranks": {"refused": "a rank without a token raises an error"},
    "hooks": {"refused": "hooks on saved tensors raise an error"},
    "minus_inf": {"never": "no logit is -inf"},
    "inputs": {"written": "a call writes to its inputs, so nothing is asked that uses them again"},
}
