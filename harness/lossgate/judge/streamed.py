# SPDX-License-Identifier: Apache-2.0
"""The noise of large problems: one run after the other, some tokens at a time.

This is the noise of ``judge.ensemble``, in memory that does not grow with tokens times vocabulary.
A run goes over its tokens twice, with the same errors: first forward to the values per token; then,
when the loss is known, forward again and back. Of its gradients, only the deviations from the
reference are kept, in float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.judge.logit_stage import LogitStage
from lossgate.judge.loss_stage import RoundedLoss
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.numerics.token_sum import TokenSum, by_rows
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads.head import Head
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.outputs import Output
from lossgate.specs.token_values import TokenValues

_BLOCK, _PIECE = 1 << 21, 1 << 17
"""Logits of a block and of a piece. A block is multiplied with the lm-head at once. A piece of it
goes through all other operations at once, because its numbers stay in the cache."""

_RUNS, _RUNS_BACK, _BACK = 12, 4, 1 << 26
"""Runs that go forward, the fewest of them that also go back, and the logits that all these may
have together. Few runs are enough: a gradient has so many entries that these runs tell the noise of
each row and column, and the largest noise of all."""

NoiseOf = Callable[[int, str], Noise]
"""``(run, part) -> `` the errors of a part of a run. The same arguments give the same errors."""


def runs_of(size: int) -> tuple[int, int]:
    """Returns the number of runs that a problem needs, and the number of them that go back.

    Args:
        size: the number of logits of the problem, or of entries of its lm-head, whichever is
            larger.
    """
    return _RUNS, min(max(_BACK // size, _RUNS_BACK), _RUNS)


def run_streamed(
    head: Head,
    batch: GlobalBatch,
    bound: BoundSpec,
    partition: Partition,
    stages: Stages,
    noise_of: NoiseOf,
    reference: Mapping[Output, Tensor],
    runs: tuple[int, int],
) -> Mapping[Output, Tensor]:
    """Runs an ensemble of kernels of one precision on a problem.

    Args:
        head: where the kernels start. It must have logits.
        batch: the tensors of the unsharded problem.
        bound: the spec with options, and with the outputs that will be compared.
        partition: the split over the ranks of the layout. Each rank's part of a gradient is
            rounded, and all are added up.
        stages: the formats to which the kernels round.
        noise_of: gives the errors.
        reference: the outputs and gradients of the reference.
        runs: the number of runs, and the number of them that go back.

    Returns:
        Each output less that of the reference, ``[runs, *shape]``. Gradients are float32, and only
        of the runs that go back.
    """
    forward_runs, backward_runs = runs
    stream = _Stream(head, batch, bound, partition, stages, noise_of)
    loss = RoundedLoss(batch, bound, RoundedRun(noise_of(0, "loss"), forward_runs, stages))
    outputs, upstream = loss.outputs(stream.values(forward_runs))
    gradients = head.gradients(batch.leaves)
    found = {output: of_runs - reference[output] for output, of_runs in outputs.items() if output in reference}
    for output in gradients.values():
        found[output] = torch.empty(backward_runs, *reference[output].shape, dtype=torch.float32)
    for number in range(backward_runs):
        of_run = {name: gradient[number : number + 1] for name, gradient in upstream.items()}
        for leaf, gradient in stream.gradients(number, of_run):
            found[gradients[leaf]][number] = gradient - reference[gradients[leaf]]
    return found


class _OneRun(RoundedRun):
    """One run that can begin again at any of its parts, with the same errors."""

    def __init__(
        self, number: int, noise_of: NoiseOf, stages: Stages, weight: Tensor | None, squares: dict[object, Tensor]
    ) -> None:
        super().__init__(noise_of(number, "choices"), 1, stages)
        self._number, self._noise_of, self._weight, self._squares = number, noise_of, weight, squares
        self._rounded: Tensor | None = None
        self._known: Tensor | None = None

    def begin(self, part: str, known: Tensor | None = None) -> None:
        """Begins a part with the errors of that part. The choices of the run begin anew, because
        all parts share them.

        Args:
            part: the name of the part.
            known: the product of the part's tokens with the weight, if it is known.
        """
        self.noise, self._choices = self._noise_of(self._number, part), self._noise_of(self._number, "choices")
        self._known = known

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        if self._known is not None and left.dim() == right.dim() == 2 and self._is_weight(right):
            return self._known
        return left @ right

    def squares_of_columns(self, x: Tensor) -> Tensor:
        if not self._is_weight(x):
            return super().squares_of_columns(x)
        key = x.data_ptr(), x.shape, x.stride()
        if key not in self._squares:
            self._squares[key] = super().squares_of_columns(x)
        return self._squares[key]

    def factor(self, x: Tensor) -> Tensor:
        """Returns a factor as products take it. The weight is rounded once for all tokens."""
        if self._weight is None or not self._is_weight(x):
            return super().factor(x)
        if self._rounded is None:
            self.noise, before = self._noise_of(self._number, "weight"), self.noise
            self._rounded = super().factor(self._weight).reshape(self._weight.shape)
            self.noise = before
        return self._rounded.as_strided(x.shape, x.stride(), x.storage_offset())

    def _is_weight(self, x: Tensor) -> bool:
        """Returns whether a tensor is a view of the weight, or of the rounded weight."""
        weights = (self._weight, self._rounded)
        return any(weight is not None and _share_memory(x, weight) for weight in weights)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Block:
    """Some tokens of a chunk of a rank."""

    tokens: Tensor
    pieces: tuple[tuple[str, slice], ...]
    """The name of each piece, and the part of ``tokens`` that it has."""
    chunks: int
    """The number of chunks of the rank if a chunk ends with this block, else 0."""
    ends_rank: bool
    """Whether the rank's tokens end with this block."""


class _Stream:
    """Goes over the tokens of a problem block by block."""

    def __init__(
        self,
        head: Head,
        batch: GlobalBatch,
        bound: BoundSpec,
        partition: Partition,
        stages: Stages,
        noise_of: NoiseOf,
    ) -> None:
        self.head, self.batch, self.bound = head, batch, bound
        self.partition, self.stages, self.noise_of = partition, stages, noise_of
        self.weight = batch.leaves.get("weight")
        self.by_token = {leaf for leaf, dims in head.leaves.items() if dims[0] == "token"}
        self.blocks = list(self._blocks())
        self.squares = dict[object, Tensor]()
        """Sums of squares of the columns of the weight, which all runs share."""

    def _blocks(self) -> Iterator[_Block]:
        """Yields the blocks of all ranks. Each chunk of a rank is cut into blocks of its own."""
        block_tokens, piece_tokens = (max(1, size // self.partition.vocab) for size in (_BLOCK, _PIECE))
        number = 0
        for chunks in self.partition.real_token_chunks(self.stages.rounded_chunk):
            for chunk_number, chunk in enumerate(chunks, 1):
                blocks = chunk.split(block_tokens)
                for block_number, tokens in enumerate(blocks, 1):
                    starts = range(0, len(tokens), piece_tokens)
                    pieces = tuple((f"piece {number} {start}", slice(start, start + piece_tokens)) for start in starts)
                    ends_chunk = block_number == len(blocks)
                    ends_rank = ends_chunk and chunk_number == len(chunks)
                    yield _Block(tokens, pieces, len(chunks) if ends_chunk else 0, ends_rank)
                    number += 1

    def run(self, number: int) -> _OneRun:
        return _OneRun(number, self.noise_of, self.stages, self.weight, self.squares)

    def leaves(self, tokens: Tensor) -> dict[str, Tensor]:
        return {name: leaf[tokens] if name in self.by_token else leaf for name, leaf in self.batch.leaves.items()}

    @property
    def rounds_weight(self) -> bool:
        """Whether each run rounds the weight, and so multiplies with a weight of its own."""
        return self.weight is not None and self.stages.inputs.unit < self.stages.products.unit

    def products(self, tokens: Tensor) -> Tensor | None:
        """Returns the product of tokens with the weight. None if there is no weight, or if each
        run has its own.
        """
        if self.weight is None or self.rounds_weight:
            return None
        return self.batch.leaves["hidden"][tokens] @ self.weight.T

    def stages_of(self, run: _OneRun, block: _Block, products: Tensor | None) -> Iterator[tuple[Tensor, LogitStage]]:
        """Runs the pieces of a block forward, and yields the tokens and the stage of each piece."""
        wanted = ("labels", self.bound.spec.gathered_ids, LOGIT_FILTER)
        for name, some in block.pieces:
            tokens = block.tokens[some]
            run.begin(name, None if products is None else products[some])
            fields = {name: field[tokens] for name, field in self.batch.fields.items() if name in wanted}
            yield tokens, LogitStage(self.head, self.leaves(tokens), fields, self.bound, run)

    def values(self, count: int) -> TokenValues:
        """Returns the values per token of ``count`` runs, ``[count, T, ...]``."""
        # The rounded weight of a run is as large as the lm-head, so only one may be held at a time.
        together = 1 if self.rounds_weight else count
        found: dict[str, Tensor] = {}
        for first in range(0, count, together):
            self._run_forward(range(first, first + together), count, found)
        return TokenValues(**found)

    def _run_forward(self, numbers: range, count: int, found: dict[str, Tensor]) -> None:
        """Writes the values per token of some of all ``count`` runs into ``found``."""
        runs = {number: self.run(number) for number in numbers}
        for block in self.blocks:
            products = self.products(block.tokens)
            for number, run in runs.items():
                for tokens, stage in self.stages_of(run, block, products):
                    for name, value in stage.values.given.items():
                        if name not in found:
                            found[name] = value.new_empty(count, self.batch.partition.tokens, *value.shape[2:])
                        found[name][number, tokens] = value[0]

    def gradients(self, number: int, upstream: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the gradient of each leaf in a run, added up over the ranks of the layout."""
        run = self.run(number)
        by_token = {name: torch.zeros_like(leaf) for name, leaf in self.batch.leaves.items() if name in self.by_token}
        sums = {name: TokenSum(run) for name in self.batch.leaves if name not in self.by_token}
        for block in self.blocks:
            parts: list[Tensor] = []
            for tokens, stage in self.stages_of(run, block, self.products(block.tokens)):
                parts.append(stage.backward({name: gradient[:, tokens] for name, gradient in upstream.items()}))
            dlogits, leaves = torch.cat(parts, 1), self.leaves(block.tokens)
            for name, gradient in by_token.items():
                of_block = self.head.rounded_gradient(name, leaves, dlogits, self.partition, run)
                gradient[block.tokens] = self.returned(run, of_block)[0]
            for name, total in sums.items():
                total.add(dlogits, self.head.summed_with(name, leaves))
                if block.chunks:
                    total.end_chunk(one_of=block.chunks)
                if block.ends_rank:
                    total.end_rank()
        yield from by_token.items()
        for name in list(sums):
            run.begin(f"gradient of {name}")
            yield name, self.returned(run, self.head.as_leaf(name, sums.pop(name).total))[0]

    def returned(self, run: _OneRun, gradient: Tensor) -> Tensor:
        """Returns a gradient as backward returns it. If forward made it, backward multiplies it by
        the upstream gradient, and so rounds it once more.
        """
        if not self.stages.grads_in_forward:
            return gradient
        return by_rows(gradient, lambda rows: run.noise.round(gradient[:, rows], self.stages.inputs))
