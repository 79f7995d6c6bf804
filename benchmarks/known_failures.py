# SPDX-License-Identifier: Apache-2.0
"""Measures and prints the figures that the page of known failures states about PyTorch's kernels.

    python benchmarks/known_failures.py

The page states bounds, and the measured numbers depend on the processor. A test holds the page to
the bounds and the measurements to them. "Problems" are the frozen example with the seeds 0 to 59.
Those with one trained token have two tokens in all, because the last one is never trained.
"""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fused import exact, inputs
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from lossgate import Candidate
from lossgate.cases.case import Case
from lossgate.declaration.loading import load_candidates
from lossgate.engine.plan import read_known_failure
from lossgate.problems.batch import GlobalBatch
from lossgate.worlds import SimulatedWorld

CANDIDATES = Path(__file__).parents[1] / "ci/candidates/pytorch.py"
SEEDS = range(60)
POLICY: Any = "balanced" if torch.__version__ < "2.14" else "compact"
"""The policy of torch-3, by the name that it has now."""


@dataclass(frozen=True)
class Figure:
    """A number that the page states.

    Attributes:
        failure: the known failure it belongs to, such as ``"torch-2"``.
        what: what is measured.
        says: the words of the page that state the bound.
        low, high: the bound.
        value: the measured number.
    """

    failure: str
    what: str
    says: str
    low: float
    high: float
    value: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class Run:
    """Outputs of a candidate and of the float64 reference on one problem, by name."""

    batch: GlobalBatch
    found: dict[str, Tensor]
    expected: dict[str, Tensor]

    def vector_error(self, output: str) -> float:
        """Relative error in norm."""
        error = self.found[output] - self.expected[output]
        return float(error.norm() / self.expected[output].norm())

    def entry_error(self, output: str) -> float:
        """Largest relative error of an entry that is not zero."""
        found, expected = self.found[output], self.expected[output]
        return float(((found - expected).abs() / expected.abs())[expected != 0].max())


@cache
def known_failures() -> dict[str, Candidate]:
    """Maps the name of each known failure, such as ``"torch-2"``, to the candidate that has it."""
    found = load_candidates(str(CANDIDATES))
    return {each.known_failure.name: each for each in found if each.known_failure is not None}


@cache
def run(failure: str, **changes: Any) -> Run:
    """Runs the candidate of a frozen example on its problem, with other values of some fields."""
    candidate = known_failures()[failure]
    assert candidate.known_failure is not None
    problem = replace(read_known_failure(candidate.known_failure).examples[0].problem, **changes)
    world = SimulatedWorld(problem.layout)
    try:
        case = Case(candidate, problem, world)
        found = {str(output): tensor for output, tensor in case.result.outputs.items()}
    finally:
        world.close()
    return Run(case.bound.batch, found, {str(output): tensor for output, tensor in case.oracle.reference.items()})


def in_one_chunk(chunked: Run) -> Run:
    """The same problem by the same kernel of PyTorch, with all tokens in one chunk."""
    leaves = _bfloat16_leaves(chunked.batch)
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=len(leaves["hidden"]), acc_policy=POLICY, acc_dtype=torch.float32
    )
    loss = F.linear_cross_entropy(
        leaves["hidden"],
        leaves["weight"],
        _targets(chunked.batch),
        linear_bias=leaves["bias"],
        reduction="sum",
        options=options,
    )
    return _with_gradients(chunked, loss, leaves)


def with_float32_logits(parallel: Run, convert: bool = True) -> Run:
    """The same problem by ``F.cross_entropy``, whose logits are first converted to float32."""
    leaves = _bfloat16_leaves(parallel.batch)
    logits = leaves["logits"].float() if convert else leaves["logits"]
    return _with_gradients(parallel, F.cross_entropy(logits, _targets(parallel.batch), reduction="sum"), leaves)


def _targets(batch: GlobalBatch) -> Tensor:
    return batch.fields["labels"].masked_fill(~batch.fields["mask"], -100)


def _bfloat16_leaves(batch: GlobalBatch) -> dict[str, Tensor]:
    return {name: leaf.bfloat16().requires_grad_() for name, leaf in batch.leaves.items()}


def _with_gradients(like: Run, loss: Tensor, leaves: dict[str, Tensor]) -> Run:
    loss.backward(like.batch.cotangents["loss"].to(loss.dtype))
    found = {f"grad of {name}": leaf.grad.double() for name, leaf in leaves.items() if leaf.grad is not None}
    return replace(like, found=found)


def confident_labels(parallel: Run) -> Tensor:
    """Returns ``[tokens]`` bool: the label is trained and has a probability over 0.9981."""
    fields = parallel.batch.fields
    probability = torch.softmax(parallel.batch.leaves["logits"], 1).gather(1, fields["labels"][:, None]).squeeze(1)
    return fields["mask"] & (probability > 0.9981)


def lost_label_entries(parallel: Run) -> tuple[int, int]:
    """Counts confident labels, and those of them whose gradient is exactly zero.

    Returns:
        (how many are zero, how many there are).
    """
    confident, labels = confident_labels(parallel), parallel.batch.fields["labels"]
    of_label = parallel.found["grad of logits"].gather(1, labels[:, None]).squeeze(1)
    return int((of_label[confident] == 0).sum()), int(confident.sum())


def chunked_weight_error(chunk: int) -> float:
    """Relative error in norm of the weight's gradient by PyTorch's chunked kernel.

    bfloat16, 2048 tokens, hidden size 64, vocabulary 256: the sizes of ``fused.py --accuracy``.
    """
    hidden, weight, labels = inputs(2048, 64, 256, torch.bfloat16)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, acc_policy=POLICY, acc_dtype=torch.float32)
    F.linear_cross_entropy(hidden, weight, labels, options=options).backward()
    assert weight.grad is not None
    expected = exact((2048, 64, 256), torch.bfloat16)[2]
    return float((weight.grad.double() - expected).norm() / expected.norm())


def figures() -> Iterator[Figure]:
    """Measures every figure of the page."""
    yield from _loss_in_bfloat16()
    yield from _sums_over_chunks()
    yield from _confident_labels()


def _loss_in_bfloat16() -> Iterator[Figure]:
    runs = [run("torch-2", seed=seed) for seed in SEEDS]
    errors = [each.vector_error("loss") for each in runs]
    yield Figure("torch-2", "loss, 60 problems, largest error", "more than 2%", 0.02, 0.1, max(errors))
    exact_losses = [each.expected["loss"] for each in runs]
    rounding = max(float((loss.bfloat16() / loss - 1).abs()) for loss in exact_losses)
    yield Figure("torch-2", "the same, of rounding the exact loss once", "at most 0.4%", 0, 0.004, rounding)


def _sums_over_chunks() -> Iterator[Figure]:
    name = "torch-3"
    runs = [run(name), *(run(name, seed=seed) for seed in SEEDS)]
    bias, weight = "grad of bias", "grad of weight"
    vector = max(each.vector_error(output) for each in runs for output in (bias, weight))
    yield Figure(name, f"{bias} and weight as vectors, largest error", "within 1%", 0, 0.01, vector)
    entry = max(each.entry_error(bias) for each in runs)
    yield Figure(name, f"{bias}, single entries, largest error", "more than 100%", 1, float("inf"), entry)
    unchunked = max(in_one_chunk(each).entry_error(bias) for each in runs)
    yield Figure(name, f"{bias}, single entries, one chunk", "every entry is within 1%", 0, 0.01, unchunked)
    yield Figure(name, f"{bias} of the frozen example as a vector", "within 1%", 0, 0.01, runs[0].vector_error(bias))
    for chunk, says, low, high in ((2048, "0.2% in one chunk", 0.001, 0.0025), (1, "over 3% in chunks", 0.03, 0.1)):
        yield Figure(name, f"{weight}, 2048 tokens, chunk {chunk}", says, low, high, chunked_weight_error(chunk))


def _confident_labels() -> Iterator[Figure]:
    name, output = "torch-5", "grad of logits"
    runs = [run(name), *(run(name, seed=seed) for seed in SEEDS)]
    vectors = [each.vector_error(output) for each in runs]
    yield Figure(name, f"{output} as a vector, median error", "within 0.5%", 0, 0.005, median(vectors))
    yield Figure(name, f"{output} of the frozen example as a vector", "within 0.5%", 0, 0.005, vectors[0])
    of_one = [run(name, lengths=(2,), masks=("all",), seed=seed) for seed in SEEDS]
    alone = min(each.vector_error(output) for each in of_one if confident_labels(each).any())
    what = f"{output} as a vector, one trained token, confident: least"
    yield Figure(name, what, "more than 50%", 0.5, float("inf"), alone)
    lost, confident = (sum(column) for column in zip(*map(lost_label_entries, runs), strict=True))
    yield Figure(name, f"share of {confident} confident labels without gradient", "exactly 0", 1, 1, lost / confident)
    converted = max(with_float32_logits(each).entry_error(output) for each in runs)
    yield Figure(name, "F.cross_entropy(logits.float()), single entries", "within 10%", 0, 0.1, converted)
    plain = [with_float32_logits(each, convert=False) for each in runs]
    lost, confident = (sum(column) for column in zip(*map(lost_label_entries, plain), strict=True))
    yield Figure(name, "F.cross_entropy(logits), the same share", "loses them as well", 1, 1, lost / confident)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    table = Table()
    for heading in ("", "measured", "is", "the page says", "holds"):
        table.add_column(heading, justify="right" if heading == "is" else "left")
    for figure in figures():
        table.add_row(figure.failure, figure.what, f"{figure.value:.3%}", figure.says, "yes" if figure.holds else "NO")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
