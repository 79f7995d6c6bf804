# SPDX-License-Identifier: Apache-2.0
"""The base of heads: the differentiable inputs from which a kernel starts, and the stages from
these to the logits.
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
    """The problem for which a head draws its inputs."""

    problem: Problem
    """The problem without its layout."""
    fields: Mapping[str, Tensor]
    """The fields of ``problems.batch.draw_tokens``."""
    temperature: float
    """The number that divides the logits; 1 for a spec without a temperature."""
    streams: RandomStreams

    @property
    def labels(self) -> Tensor:
        """``[problem.tokens]``."""
        return self.fields["labels"]

    def label_boost(self) -> Tensor:
        """Returns ``[problem.tokens]``: a number to add to the label's logit. It is 0 at about half
        of the tokens.
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
    """The class of the differentiable inputs that the head adds to the batch."""
    leaves: ClassVar[Mapping[str, Dims]]
    """The differentiable inputs and their dims, as ``inputs`` declares them."""
    has_logits: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "inputs" in vars(cls):
            cls.leaves = {name: field.dims for name, field in fields_of(cls.inputs).items()}

    @property
    def gives(self) -> str:
        """Whether its values belong to a "token" or to a "sequence"."""
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
        """Returns the unit roundoff of the values that this head gives to the loss, if every stage
        rounds to the coarsest format of a problem.

        Heads without logits give exact values. A kernel converts them to float32, unless it
        declares otherwise.
        """
        return (problem.coarsest if self.has_logits or problem.rounded_to else FLOAT32).unit

    def rounded_logits(self, leaves: Mapping[str, Tensor], run: RoundedRun) -> Tensor:
        """Returns the logits of rounded runs, ``[members, tokens, vocab]``."""
        raise TypeError(f"head {self.name!r} has no logits")

    def rounded_logits_at(self, leaves: Mapping[str, Tensor], ids: Tensor, run: RoundedRun) -> Tensor | None:
        """Returns the logits of some ids ``[members, tokens, k]``, each as a dot product of its
        own; None at heads from which a kernel computes no logits.

        Args:
            leaves: the differentiable inputs.
            ids: ``[tokens, k]``, rows of the vocabulary.
            run: the rounded runs.
        """
        return None

    def rounded_gradient(
        self, leaf: str, leaves: Mapping[str, Tensor], dlogits: Tensor, partition: Partition, run: RoundedRun
    ) -> Tensor:
        """Returns the gradient of a leaf, ``[members, *shape]``, from that of the logits.

        If ranks split a dim that the leaf does not have, each makes a part of the gradient. These
        parts are rounded and added up. If the leaf has tokens, the arguments may be for some of
        them alone.
        """
        raise TypeError(f"head {self.name!r} has no logits")

    def summed_with(self, leaf: str, leaves: Mapping[str, Tensor]) -> Tensor:
        """Returns the factor ``[tokens, width]`` of the logits' gradients for a leaf without
        tokens. The leaf's gradient is the sum of these products over tokens.
        """
        raise TypeError(f"head {self.name!r} has no leaf without tokens")

    def as_leaf(self, leaf: str, total: Tensor) -> Tensor:
        """Returns the sum of these products, ``[members, vocab, width]``, in the leaf's shape."""
        raise TypeError(f"head {self.name!r} has no leaf without tokens")


class ValueHead(Head):
    """A head without logits: one leaf that the loss takes as it is."""

    def logits(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return next(iter(leaves.values()))
