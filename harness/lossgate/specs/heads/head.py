# SPDX-License-Identifier: Apache-2.0
"""What a head is: the differentiable inputs from which a kernel starts, and the stages from them to
the logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.rounded_arithmetic import RoundedRun
from lossgate.problems.partition import Dims, Partition
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.outputs import Output, gradient_output
from lossgate.specs.record import Record, fields_of


@dataclass(frozen=True)
class HeadContext:
    """What a head draws its inputs from."""

    problem: Problem
    """Unsharded."""
    fields: Mapping[str, Tensor]
    """The fields of ``problems.tokens.draw_tokens``."""
    temperature: float
    """The number that divides the logits; 1 for a spec without a temperature."""
    streams: RandomStreams

    @property
    def labels(self) -> Tensor:
        """``[problem.tokens]``."""
        return self.fields["labels"]

    def label_boost(self) -> Tensor:
        """Returns what to add to the label's logit, ``[problem.tokens]``: nothing at about every
        other token.
        """
        chosen = self.streams.uniform("confident", self.problem.tokens) < 0.5
        return chosen.double() * (self.problem.label_boost * self.temperature)

    def put_outliers(self, tensor: Tensor) -> None:
        """Writes the problem's outliers into a tensor ``[problem.tokens, columns]``."""
        for token, column, value in self.problem.outliers:
            tensor[token, column] = value


class Head(ABC):
    """A point at which a kernel may start.

    Heads without logits give the loss its per-token values directly.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    inputs: ClassVar[type[Record]]
    """The class of what the head gives beside the batch: its differentiable inputs."""
    leaves: ClassVar[Mapping[str, Dims]]
    """The differentiable inputs and their dims, as ``inputs`` declares them."""
    has_logits: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "inputs" in vars(cls):
            cls.leaves = {name: field.dims for name, field in fields_of(cls.inputs).items()}

    @property
    def gives(self) -> str:
        """What its values belong to: "token", or "sequence"."""
        return "sequence" if ("sequence",) in self.leaves.values() else "token"

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of ``Precision`` between the leaves and the loss."""
        of_logits = ("logits", "logsumexp", "logprobs", "entropy") if self.has_logits else ()
        return (*(("products",) if "weight" in self.leaves else ()), *of_logits, "loss")

    @abstractmethod
    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        """Draws the leaves in float64, without padding."""

    def draw_vocab_padding(self, problem: Problem, streams: RandomStreams) -> dict[str, Tensor]:
        """Draws the padding rows of a padded vocabulary, for each leaf that has them."""
        return {}

    def gradients(self, leaves: Mapping[str, Tensor]) -> dict[str, Output]:
        """Returns the output that is the gradient of each leaf."""
        return {leaf: gradient_output(leaf, self.leaves[leaf]) for leaf in leaves}

    @abstractmethod
    def logits(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Returns the reference's logits ``[tokens, vocab]``; at heads without logits, the values
        themselves.
        """

    def rounding_unit(self, problem: Problem) -> float:
        """Returns the unit roundoff of what this head gives to the loss, were everything rounded to
        the coarsest format of a problem.

        Heads without logits give exact values. A kernel takes them on in float32, unless it says
        otherwise.
        """
        return (problem.coarsest if self.has_logits or problem.rounded_to else FLOAT32).unit

    def rounded_logits(self, leaves: Mapping[str, Tensor], run: RoundedRun) -> Tensor:
        """Returns the logits of rounded runs, ``[members, tokens, vocab]``."""
        raise TypeError(f"head {self.name!r} has no logits")

    def rounded_logits_at(self, leaves: Mapping[str, Tensor], ids: Tensor, run: RoundedRun) -> Tensor | None:
        """Returns the logits of some ids ``[members, tokens, k]``, each as a dot product of its
        own; None where a kernel has none to compute.

        Args:
            leaves: the differentiable inputs.
            ids: ``[tokens, k]``, rows of the vocabulary.
            run: the rounded runs.
        """
        return None

    def rounded_gradient(
        self, leaf: str, leaves: Mapping[str, Tensor], dlogits: Tensor, partition: Partition, run: RoundedRun
    ) -> Tensor:
        """Returns the gradient of a leaf from that of the logits, ``[members, *shape]``.

        Ranks make parts of it, which are rounded and added up, if they split a dim that the leaf
        does not have. Of a leaf with tokens it may be asked for some of them alone.
        """
        raise TypeError(f"head {self.name!r} has no logits")

    def summed_with(self, leaf: str, leaves: Mapping[str, Tensor]) -> Tensor:
        """Returns what the gradients of the logits are multiplied with in the gradient of a leaf
        without tokens, ``[tokens, width]``.
        """
        raise TypeError(f"head {self.name!r} has no leaf without tokens")

    def as_leaf(self, leaf: str, total: Tensor) -> Tensor:
        """Returns the sum of these products, ``[members, vocab, width]``, in the shape of the
        leaf.
        """
        raise TypeError(f"head {self.name!r} has no leaf without tokens")


class ValueHead(Head):
    """A head without logits: one leaf that the loss takes as it is."""

    def logits(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return next(iter(leaves.values()))
