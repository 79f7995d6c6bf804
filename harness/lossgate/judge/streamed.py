# SPDX-License-Identifier: Apache-2.0
"""The noise of large problems: one run after the other, some tokens at a time.

It is what ``judge.ensemble`` makes, in memory that does not grow with tokens times vocabulary. A
run goes over its tokens twice, with the same errors: forward to the values per token, and, when the
loss is known, forward again and back. Only the deviations of its gradients are kept, in float32.
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
"""Logits of a block, whose products are made at once; and of a piece of it, which goes through all
other operations at once, because its numbers stay in the cache."""

_RUNS, _RUNS_BACK, _BACK = 12, 4, 1 << 26
"""Runs forward; and how many of them go back, too: as many as a bounded number of logits allows,
but so many at least. A gradient has so many entries that the noise of each row and column, and the
largest of all, are known from few runs."""

NoiseOf = Callable[[int, str], Noise]
"""``(run, what) -> `` the errors of a run in a part of it, always the same."""


def runs_of(size: int) -> tuple[int, int]:
    """Returns how many runs a problem needs, and how many of them go back.

    Args:
        size: its logits, or the entries of its lm-head, whichever are more.
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

    Returns:
        Each output less that of the reference, ``[runs, *shape]``. Gradients are float32, of fewer
        runs.

    Args:
        head: where the kernels start: one that has logits.
        batch: the tensors of the unsharded problem.
        bound: the spec with options, and with the outputs that will be compared.
        partition: of the layout, whose ranks' parts of gradients are rounded and added up.
        stages: the formats to which they round.
        noise_of: the errors.
        reference: what the reference gives.
        runs: how many runs there are, and how many of them go back.
    """
    stream = _Stream(head, batch, bound, partition, stages, noise_of)
    loss = RoundedLoss(batch, bound, RoundedRun(noise_of(0, "loss"), runs[0], stages))
    outputs, upstream = loss.outputs(stream.values(runs[0]))
    gradients = head.gradients(batch.leaves)
    found = {output: of_runs - reference[output] for output, of_runs in outputs.items() if output in reference}
    for output in gradients.values():
        found[output] = torch.empty(runs[1], *reference[output].shape, dtype=torch.float32)
    for number in range(runs[1]):
        of_run = {name: gradient[number : number + 1] for name, gradient in upstream.items()}
        for leaf, gradient in stream.gradients(number, of_run):
            found[gradients[leaf]][number] = gradient - reference[gradients[leaf]]
    return found


class _OneRun(RoundedRun):
    """One run, that can begin again at any of its parts."""

    def __init__(
        self, number: int, noise_of: NoiseOf, stages: Stages, weight: Tensor | None, squares: dict[object, Tensor]
    ) -> None:
        super().__init__(noise_of(number, "choices"), 1, stages)
        self._number, self._noise_of, self._weight, self._squares = number, noise_of, weight, squares
        self._rounded: Tensor | None = None
        self._known: Tensor | None = None

    def begin(self, part: str, known: Tensor | None = None) -> None:
        """Goes on with a part: its errors, and the choices of all parts.

        Args:
            part: its name.
            known: the product of its tokens with the weight, if it is known.
        """
        self.noise, self._choices = self._noise_of(self._number, part), self._noise_of(self._number, "choices")
        self._known = known

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        of_weight = left.dim() == right.dim() == 2 and self._is_weight(right)
        return self._known if of_weight and self._known is not None else left @ right

    def squares_of_columns(self, x: Tensor) -> Tensor:
        if not self._is_weight(x):
            return super().squares_of_columns(x)
        key = x.data_ptr(), x.shape, x.stride()
        if key not in self._squares:
            self._squares[key] = super().squares_of_columns(x)
        return self._squares[key]

    def factor(self, x: Tensor) -> Tensor:
        """Returns a factor as a product takes it: a weight is rounded once for all tokens."""
        if self._weight is None or not self._is_weight(x):
            return super().factor(x)
        if self._rounded is None:
            self.noise, before = self._noise_of(self._number, "weight"), self.noise
            self._rounded = super().factor(self._weight).reshape(self._weight.shape)
            self.noise = before
        return self._rounded.as_strided(x.shape, x.stride(), x.storage_offset())

    def _is_weight(self, x: Tensor) -> bool:
        """Returns whether a tensor is the weight, or a view of it, rounded or not."""
        return any(one is not None and _shared(x, one) for one in (self._weight, self._rounded))


def _shared(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are of the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Block:
    """Some tokens of a chunk of a rank."""

    tokens: Tensor
    pieces: tuple[tuple[str, slice], ...]
    """The name of each piece, and which of these tokens it has."""
    chunks: int
    """How many chunks the rank has, if the block ends one, else 0."""
    ends_rank: bool


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
        """Of the columns of the weight, the same for all runs."""

    def _blocks(self) -> Iterator[_Block]:
        of_block, of_piece = (max(1, size // self.partition.vocab) for size in (_BLOCK, _PIECE))
        number = 0
        for rank in self.partition.real_token_chunks(self.stages.rounded_chunk):
            for at, chunk in enumerate(rank, 1):
                blocks = chunk.split(of_block)
                for i, tokens in enumerate(blocks, 1):
                    starts = range(0, len(tokens), of_piece)
                    pieces = tuple((f"piece {number} {start}", slice(start, start + of_piece)) for start in starts)
                    ends = i == len(blocks)
                    yield _Block(tokens, pieces, len(rank) * ends, ends and at == len(rank))
                    number += 1

    def run(self, number: int) -> _OneRun:
        return _OneRun(number, self.noise_of, self.stages, self.weight, self.squares)

    def leaves(self, tokens: Tensor) -> dict[str, Tensor]:
        return {name: leaf[tokens] if name in self.by_token else leaf for name, leaf in self.batch.leaves.items()}

    @property
    def rounds_weight(self) -> bool:
        """Whether each run multiplies with a weight of its own."""
        return self.weight is not None and self.stages.inputs.unit < self.stages.products.unit

    def products(self, tokens: Tensor) -> Tensor | None:
        """Returns the products of some tokens with the weight, the same for all runs; None if they
        are not.
        """
        if self.weight is None or self.rounds_weight:
            return None
        return self.batch.leaves["hidden"][tokens] @ self.weight.T

    def stages_of(self, run: _OneRun, block: _Block, products: Tensor | None) -> Iterator[tuple[Tensor, LogitStage]]:
        """Runs the pieces of a block forward; yields the tokens and the stage of each."""
        wanted = ("labels", self.bound.spec.gathered_ids, LOGIT_FILTER)
        for name, some in block.pieces:
            tokens = block.tokens[some]
            run.begin(name, None if products is None else products[some])
            fields = {name: field[tokens] for name, field in self.batch.fields.items() if name in wanted}
            yield tokens, LogitStage(self.head, self.leaves(tokens), fields, self.bound, run)

    def values(self, count: int) -> TokenValues:
        """Returns the values per token of so many runs, ``[count, T, ...]``."""
        # A weight of its own is as large as the lm-head, so that one run is to be there at a time.
        together, found = 1 if self.rounds_weight else count, dict[str, Tensor]()
        for first in range(0, count, together):
            self._run_forward(range(first, first + together), count, found)
        return TokenValues(**found)

    def _run_forward(self, numbers: range, count: int, found: dict[str, Tensor]) -> None:
        """Puts the values per token of some runs among those of all, ``[count, T, ...]``."""
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
        """Yields the gradient of each leaf in a run, as the ranks of the layout give it."""
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
        """Returns a gradient as backward gives it: scaled, where forward made it."""
        if not self.stages.grads_in_forward:
            return gradient
        return by_rows(gradient, lambda rows: run.noise.round(gradient[:, rows], self.stages.inputs))
