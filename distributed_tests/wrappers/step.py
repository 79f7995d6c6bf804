# SPDX-License-Identifier: Apache-2.0
"""One training step of one cell of the table, on every rank."""

import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from distributed_tests.wrappers.losses import DENSE_OF, WAYS, Metrics
from distributed_tests.wrappers.model import RANKS, VOCAB, count, make_batch, make_model
from distributed_tests.wrappers.wrappers import RATE, REFUSALS, WRAPPERS, Wrapped
from distributed_tests.wrappers.wrong_heads import BUGS
from fused_losses import backbone_and_lm_head, run_in_forward
from lossgate.observe import MemoryWatch
from lossgate.worlds import RankContext

ALL_WAYS = {**WAYS, **BUGS}


@dataclass(frozen=True)
class Cell:
    """A wrapper, a kind of head and a way to the loss, with the options of a step."""

    wrapper: str
    head: str
    way: str
    dtype: str = "float32"
    microbatches: int = 1
    checkpointing: bool = False
    empty: bool = False
    """Whether the last rank has no token that reaches the head."""

    def __str__(self) -> str:
        options = [self.dtype] if self.dtype != "float32" else []
        options += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        options += ["checkpointing"] if self.checkpointing else []
        options += ["a rank without tokens"] if self.empty else []
        return ", ".join([self.wrapper, self.head, self.way, *options])

    def dense(self) -> "Cell":
        """Returns the cell of the dense way to the same loss."""
        return replace(self, way=DENSE_OF.get(self.way, "dense"))


@dataclass(frozen=True)
class Step:
    """What a rank found in a training step."""

    numbers: dict[str, Tensor]
    """The loss and the metrics, added up over ranks and microbatches."""
    gradients: dict[str, Tensor]
    """By parameter, in float64: what the optimizer subtracted, divided by the learning rate."""
    weights: dict[str, Tensor]
    """By parameter, after the step."""
    collectives: int
    """How many collectives forward and backward called."""
    logits: bool
    """Whether a tensor of tokens x vocabulary was made."""
    held: tuple[int, int, int]
    """How many numbers of the weights this rank holds, before and after; and of the whole model."""


def run_step(cell: Cell, context: RankContext) -> Step | str:
    """Runs a training step.

    Returns:
        What was found; or the message of the refusal, if torch refuses the wrapper for the model.

    Raises:
        RuntimeError: Anything else went wrong. A rank that went on to the next step would leave the
            others in this one.
    """
    with environment_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the wrappers
        try:
            return _step(cell)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if any(refusal in message for refusal in REFUSALS):
                return message
            raise RuntimeError(f"{cell}: {traceback.format_exc()}") from error


@contextmanager
def environment_kept() -> Iterator[None]:
    """Keeps the environment as it is. DeepSpeed adds to it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_steps(cells: Sequence[Cell], context: RankContext) -> list[Step | str]:
    """Runs a training step of each cell."""
    return [run_step(cell, context) for cell in cells]


def _step(cell: Cell) -> Step:
    model = make_model(cell.head, getattr(torch, cell.dtype), checkpointing=cell.checkpointing)
    backbone_and_lm_head(model)  # is checked while it can be run
    whole = sum(parameter.numel() for parameter in model.parameters())
    wrapped = WRAPPERS[cell.wrapper](model, cell.microbatches)
    before, held = wrapped.weights(), wrapped.held()
    first = [make_batch(rank, 0) for rank in range(RANKS)]
    wrapped.first_iteration(lambda: compute(wrapped, cell.way, first[dist.get_rank()], count(first))[0])
    tokens = count([make_batch(r, m, empty=cell.empty) for r in range(RANKS) for m in range(cell.microbatches)])
    numbers: dict[str, Tensor] = {}
    collectives, logits = 0, False
    for microbatch in range(cell.microbatches):
        own = make_batch(dist.get_rank(), microbatch, empty=cell.empty)
        called = collectives_called()
        with MemoryWatch() as made, wrapped.microbatch(microbatch == cell.microbatches - 1):
            loss, metrics = compute(wrapped, cell.way, own, tokens)
            wrapped.backward(loss * wrapped.loss_factor)
        collectives += collectives_called() - called
        logits |= len(own.labels) > 0 and len(own.labels) * VOCAB in made.sizes
        for name, number in {"loss": loss, **metrics}.items():
            numbers[name] = numbers.get(name, 0) + number.detach().double()
    wrapped.step()
    after, kept = wrapped.weights(), wrapped.held()
    for number in numbers.values():
        dist.all_reduce(number)
    gradients = {name: (weight - after[name]) / RATE for name, weight in before.items()}
    return Step(numbers, gradients, after, collectives, logits, (held, kept, whole))


def compute(wrapped: Wrapped, way: str, batch: Any, tokens: int) -> tuple[Tensor, Metrics]:
    """Computes the loss inside the forward of the wrapped model, as kernels.md says."""
    metrics: dict[str, Tensor] = {}
    from_outside = backbone_and_lm_head(wrapped.model)

    def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
        backbone, lm_head = backbone_and_lm_head(model)
        assert (backbone, lm_head) == from_outside
        hidden = backbone(ids)[batch.keep]
        loss, found = ALL_WAYS[way](lm_head, hidden, batch, tokens)
        metrics.update(found)
        return loss

    return run_in_forward(wrapped.model, loss_of, batch.ids), metrics


def collectives_called() -> int:
    """Returns how many collectives this rank has called, on any group."""
    groups: Any = c10d._world.pg_names
    return sum(group._get_sequence_number_for_group() for group in groups)
