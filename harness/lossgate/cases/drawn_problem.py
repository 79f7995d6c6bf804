# SPDX-License-Identifier: Apache-2.0
"""The values that strategies give to a user's property test: problems and packs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.placement import PlacedProblem
from lossgate.cases.rank_call import local_inputs
from lossgate.declaration.candidate import Candidate
from lossgate.judge.explain import explain
from lossgate.losses import SPECS, find_spec
from lossgate.problems.batch import offsets
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem
from lossgate.specs.outputs import RETURNED, Output
from lossgate.specs.spec import Spec
from lossgate.worlds import SimulatedWorld


@dataclass(frozen=True, repr=False)
class DrawnProblem:
    """A problem on its layout, with the inputs of each rank and the reference.

    Tensors are made when they are asked for. The same problem always gives the same numbers.
    """

    problem: Problem
    """The drawn description: sizes, masks, options, and the seed of all numbers."""
    spec: Spec = field(compare=False)

    @classmethod
    def from_json(cls, text: str, spec: Spec | None = None) -> Self:
        """Makes the problem again that a failing test has shown.

        Args:
            text: the problem as JSON, from ``problem.to_json()``.
            spec: the spec of the problem, if neither lossgate nor an installed package has it.
        """
        problem = Problem.from_json(text)
        return cls(problem, spec or find_spec(problem.spec))

    @property
    def layout(self) -> Layout:
        return self.problem.layout

    @property
    def options(self) -> Any:
        """The options of the spec, as a kernel gets them."""
        return self._bound.bound_spec.options

    def inputs(self, rank: int = 0, dtype: torch.dtype | None = None) -> Any:
        """Makes the inputs of a kernel on a rank. Tensors are new in each call, and the
        differentiable ones are leaves of autograd.

        Args:
            rank: a rank of the layout.
            dtype: the dtype of all floating-point inputs; by default that of the problem. In
                float64 the kernel gets exactly the numbers of the reference, so that the two may be
                compared tightly.
        """
        return local_inputs(self.spec, self.problem.head, self._placed.batch, self._checked(rank), dtype=dtype)

    def upstream(self, rank: int = 0) -> dict[str, Tensor]:
        """Makes the upstream gradient of each output that gets one, by the output's name.

        The gradients that ``reference`` returns belong to these upstream gradients.
        """
        partition, rank = self._placed.partition, self._checked(rank)
        given = self._placed.batch.cotangents
        return {name: partition.shard(gradient, RETURNED[name].dims, rank) for name, gradient in given.items()}

    def reference(self, rank: int = 0) -> dict[str, Tensor]:
        """Computes the reference's outputs in float64, by name: "loss", "grad of hidden", metrics.

        A tensor that the layout splits is cut like the inputs of the rank, with zeros at padding.
        A number or tensor that the ranks add up is the whole sum: the loss, the metrics, and over
        dp and cp the gradients of weight and bias.
        """
        rank = self._checked(rank)
        return {str(output): self._on_rank(output, whole, rank) for output, whole in self._reference.items()}

    def outputs(self, candidate: Candidate) -> dict[str, Tensor]:
        """Runs a candidate on simulated ranks, and puts their outputs together, by name.

        Outputs of tokens hold those of the sequences end to end, without padding.

        Raises:
            RankFailure: if a rank failed.
            UsageError: if the problem does not suit the candidate.
        """
        return {str(output): whole for output, whole in self._case(candidate).result.outputs.items()}

    def check(self, candidate: Candidate) -> None:
        """Runs a candidate on simulated ranks, and compares it with the reference.

        Raises:
            AssertionError: if an output differs by more than the candidate's declared precision
                explains.
            RankFailure: if a rank failed.
            UsageError: if the problem does not suit the candidate.
        """
        findings = [*explain(self._case(candidate).comparisons)]
        if findings:
            lines = [f"{candidate.name} disagrees with the reference", *findings, f"on: {self}"]
            raise AssertionError("\n  ".join(lines))

    def __str__(self) -> str:
        return self.problem.describe()

    def __repr__(self) -> str:
        own = "" if self.spec is SPECS.get(self.spec.name) else f", spec={self._spec_variable}"
        return f"DrawnProblem.from_json({self.problem.to_json()!r}{own})"

    @property
    def _spec_variable(self) -> str:
        """The name of the variable that holds a user's spec: the name of the decorated function."""
        return str(getattr(self.spec.reference, "__name__", self.spec.name))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Prints the repr in Hypothesis's reports, which else print every field of the spec."""
        printer.text(repr(self))

    @cached_property
    def _bound(self) -> BoundProblem:
        return BoundProblem(self.spec, self.problem)

    @cached_property
    def _placed(self) -> PlacedProblem:
        return PlacedProblem(self._bound, self.problem)

    @cached_property
    def _reference(self) -> Mapping[Output, Tensor]:
        return self._bound.dense.outputs(self._bound.bound_spec)

    def _case(self, candidate: Candidate) -> Case:
        # A notebook may run the cell that makes the spec once more.
        if candidate.spec is not self.spec and candidate.spec.name == self.spec.name:
            raise UsageError(
                f"candidate {candidate.name!r} and the problem have different specs, both named {self.spec.name!r}; "
                "make the spec, then the candidate, and then draw problems from the candidate"
            )
        world = SimulatedWorld(self.layout)
        try:
            case = Case(candidate, self.problem, world, self._bound)
            _ = case.ranks
        finally:
            world.close()
        return case

    def _checked(self, rank: int) -> int:
        if rank not in range(self.layout.ranks):
            raise UsageError(
                f"rank {rank}: expected a rank below {self.layout.ranks}, because the layout is {self.layout}"
            )
        return rank

    def _on_rank(self, output: Output, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's part of an output, with zeros at padding."""
        partition, dims = self._placed.partition, output.dims
        if "token" in dims:
            at = dims.index("token")
            padded = whole.new_zeros([partition.tokens if i == at else n for i, n in enumerate(whole.shape)])
            whole = padded.index_copy(at, partition.real_tokens, whole)
        most = max(shard.padding for shard in partition.vocab_shards)
        vocab_padding = whole.new_zeros(
            [most if dim == "vocab" else size for dim, size in zip(dims, whole.shape, strict=True)]
        )
        return partition.shard(whole, dims, rank, vocab_padding)


@dataclass(frozen=True)
class DrawnPack:
    """Sequences as a context-parallel trainer packs them: each padded, then all end to end.

    With cp ranks, each sequence is padded so that it splits into ``2 cp`` pieces, each a multiple
    of ``pad_to_multiple`` tokens long. Rank r has pieces r and ``2 cp - 1 - r`` of each sequence.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, without padding."""
    cp: int = 1
    pad_to_multiple: int = 1

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        return self._partition.padded_lengths

    @property
    def tokens(self) -> int:
        """Length of the padded pack."""
        return self._partition.tokens

    @property
    def cu_seqlens(self) -> Tensor:
        """``[sequences + 1]`` int32: the starts of the sequences without padding, and the end."""
        return offsets(self.lengths)

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """``[sequences + 1]`` int32: the starts of the sequences with padding, and the end."""
        return offsets(self.padded_lengths)

    @property
    def real(self) -> Tensor:
        """``[tokens]`` bool: whether each token is real, not padding."""
        return torch.zeros(self.tokens, dtype=torch.bool).index_fill(0, self._partition.real_tokens, True)

    def of_rank(self, cp_rank: int) -> Tensor:
        """Returns the positions in the padded pack that a cp rank holds, int64, in its order."""
        if cp_rank not in range(self.cp):
            raise UsageError(f"of_rank({cp_rank!r}): expected a cp rank below {self.cp}")
        return self._partition.token_shards[0, cp_rank]

    @cached_property
    def _partition(self) -> Partition:
        return Partition(Layout(cp=self.cp), self.lengths, vocab=1, pad_to_multiple=self.pad_to_multiple)
