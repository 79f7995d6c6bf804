# SPDX-License-Identifier: Apache-2.0
"""Training on fused losses, split over ranks, follows the curve of training on dense losses.

    python examples/tiny_training.py [--steps 100 50 50] [--seed 0] [--fault boundary]

A two-layer causal transformer on bytes learns ``text.txt``, the Declaration of Independence of the
United States (1776, in the public domain): SFT, then DPO, then GRPO. It does so with the dense
losses of ``references`` on one rank, and with the kernels of ``kernels`` on one rank and on four
simulated ones, dp=2,tp=2 and cp=2,tp=2. The curves of the loss and of the gradient norm must agree
at every step within noise, which is measured (see ``Baseline``).

The command prints a table. Its exit code is 1 if a run disagrees. ``--fault`` puts a defect into
the kernels, so that one does.

The gradient norm is compared because Adam does not depend on the scale of gradients: with all
gradients doubled, the loss has the same curve.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from tiny_course import PHASES, UPDATES, Batch, Course
from tiny_losses import FAULTS, DenseLosses, FusedLosses, Losses
from tiny_policy import Policy, Ranks, Share
from torch import Tensor

from lossgate import Layout
from lossgate.reports.console import make_console
from lossgate.worlds import RankContext, SimulatedWorld

LAYOUTS = ("single", "dp=2,tp=2", "cp=2,tp=2")
LEARNING_RATES = {"SFT": 3e-3, "DPO": 3e-4, "GRPO": 5e-4}
TEMPERATURE = 0.8
"""Temperature of the policy in GRPO; it divides logits."""
NUDGED_RUNS = 5
"""Number of dense runs with nudged initial weights, by which noise is measured."""
NOISE_FACTOR, LAST_PLACES = 2.0, 4.0
"""How far a run may be from the dense one; see ``Baseline``."""


class Trainer:
    """One rank's part of a run.

    ``curve`` has the loss and the gradient norm of the whole batch at every step.
    """

    def __init__(self, ranks: Ranks, policy: Policy, losses: Losses) -> None:
        self.ranks, self.policy, self.losses = ranks, policy, losses
        self.curve: list[tuple[float, float]] = []

    def sft(self, batches: list[Batch]) -> None:
        """Trains by SFT, one step for each batch."""
        optimizer = self._optimizer("SFT")
        for batch in batches:
            share = Share.of(batch, self.ranks)
            self._update(optimizer, self.losses.sft(self.policy(share, self.ranks.cp), self.policy.head, share))

    def dpo(self, batches: list[Batch]) -> None:
        """Trains by DPO, one step for each batch; the reference is the policy after SFT."""
        optimizer, reference = self._optimizer("DPO"), self.policy.frozen()
        for batch in batches:
            share = Share.of(batch, self.ranks)
            loss = self.losses.dpo(self._logprobs(self.policy, share), self._logprobs_now(reference, share), share)
            self._update(optimizer, loss, whole_on_cp=True)

    def grpo(self, rollouts: list[Batch], steps: int) -> None:
        """Trains by GRPO, up to UPDATES steps on the same completions.

        The reference is the policy after DPO. The old policy is the policy before the first update
        on these completions; it stands for the policy that sampled them.
        """
        optimizer, reference = self._optimizer("GRPO"), self.policy.frozen()
        for number, batch in enumerate(rollouts):
            share = Share.of(batch, self.ranks)
            old, of_reference = (self._logprobs_now(policy, share, TEMPERATURE) for policy in (self.policy, reference))
            for _ in range(min(UPDATES, steps - number * UPDATES)):
                self._update(
                    optimizer,
                    self.losses.grpo(self._logprobs(self.policy, share, TEMPERATURE), old, of_reference, share),
                )

    def _optimizer(self, phase: str) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATES[phase])

    def _logprobs(self, policy: Policy, share: Share, temperature: float = 1.0) -> Tensor:
        return self.losses.logprobs(policy(share, self.ranks.cp), policy.head, share, temperature)

    def _logprobs_now(self, policy: Policy, share: Share, temperature: float = 1.0) -> Tensor:
        with torch.no_grad():
            return self._logprobs(policy, share, temperature)

    def _update(self, optimizer: torch.optim.Optimizer, loss: Tensor, whole_on_cp: bool = False) -> None:
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]
        # Gradients are those of this rank's tokens, even if it computes the loss of the whole
        # batch, so they add up over dp and cp. Nothing is added over tp: the rows of the head are
        # this rank's own, and the kernels return the whole gradient of hidden.
        total = torch.cat([gradient.flatten() for gradient in gradients])
        for group in (self.ranks.dp, self.ranks.cp):
            dist.all_reduce(total, group=group)
        for gradient, summed in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        optimizer.step()
        self.curve.append((self._batch_loss(loss.detach(), whole_on_cp), self._norm()))

    def _batch_loss(self, loss: Tensor, whole_on_cp: bool) -> float:
        loss = loss.clone()
        for group in (self.ranks.dp,) if whole_on_cp else (self.ranks.dp, self.ranks.cp):
            dist.all_reduce(loss, group=group)
        return loss.item()

    def _norm(self) -> float:
        """Returns the norm of the whole gradient.

        tp ranks have the same gradient of the transformer, but each has its own rows of the head.
        """
        of_head = self.policy.head.new_zeros(())
        of_rest = self.policy.head.new_zeros(())
        for name, parameter in self.policy.named_parameters():
            assert parameter.grad is not None
            (of_head if name == "head" else of_rest).add_(parameter.grad.square().sum())
        dist.all_reduce(of_head, group=self.ranks.tp)
        return (of_head + of_rest).sqrt().item()


MakeLosses = Callable[[Ranks, int], Losses]


def train(layout: Layout, make_losses: MakeLosses, start: Policy, course: Course) -> Tensor:
    """Trains on every rank of a layout.

    Args:
        layout: how many ranks there are along each axis.
        make_losses: makes the losses of a rank from its groups and its first id of the vocabulary.
        start: the initial policy.
        course: the batches.

    Returns:
        The curve ``[steps, 2]``: loss and gradient norm.

    Raises:
        RuntimeError: Ranks of the layout return different curves.
    """

    def body(context: RankContext) -> Tensor:
        ranks = Ranks.of(context)
        policy = start.on(ranks.tp)
        trainer = Trainer(ranks, policy, make_losses(ranks, policy.vocab_start))
        trainer.sft(course.sft)
        trainer.dpo(course.dpo)
        trainer.grpo(course.rollouts, course.steps["GRPO"])
        return torch.tensor(trainer.curve, dtype=torch.float64)

    world = SimulatedWorld(layout)
    try:
        first, *others = world.run(body)
    finally:
        world.close()
    if not all(torch.equal(first, other) for other in others):
        raise RuntimeError(f"{layout}: ranks have different curves, expected the same loss and norm on every rank")
    return first


@dataclass(frozen=True)
class Baseline:
    """The dense run, and how far from it another run of the same course may be.

    The allowed distance is NOISE_FACTOR times the noise, plus LAST_PLACES units in the last place.

    The noise of a step is the largest distance so far in its phase between the dense run and other
    dense runs. In NUDGED_RUNS of these, each initial weight is the next number above or below; they
    show how training amplifies rounding. One more is in float64; it shows rounding that a nudge
    leaves unchanged, such as that of a sum of 50 log-probabilities, which is much coarser than they
    are.

    A fused run rounds as a dense run does, but in other places. Its distance is one more draw from
    the distribution of which the noise is the largest of a few draws, hence the factor. The units
    in the last place are those of float32, for the loss or for 1, whichever is larger. They matter
    in the first steps of a phase, where all runs may agree. In rare cases rounding decides whether
    GRPO clips a token; then curves part, which proves nothing: take another seed.
    """

    dense: Tensor
    """The curve of the dense run, ``[steps, 2]``."""
    noise: Tensor
    """``[steps, 2]``."""
    steps: tuple[int, ...]
    """The number of steps of each phase."""

    @classmethod
    def measure(cls, start: Policy, course: Course) -> "Baseline":
        dense = train(Layout(), DenseLosses, start, course)
        others = [train(Layout(), DenseLosses, start.nudged(seed), course) for seed in range(NUDGED_RUNS)]
        others.append(train(Layout(), DenseLosses, copy.deepcopy(start).double(), course))
        apart = torch.stack([(other - dense).abs() for other in others]).amax(0)
        steps = tuple(course.steps[phase] for phase in PHASES)
        return cls(dense, torch.cat([phase.cummax(0).values for phase in apart.split(steps)]), steps)

    @property
    def allowed(self) -> Tensor:
        """The largest distance at which a run agrees, ``[steps, 2]``."""
        return NOISE_FACTOR * self.noise + LAST_PLACES * torch.finfo(torch.float32).eps * self.dense.abs().clamp(min=1)

    @property
    def ends(self) -> list[int]:
        """The last step of each phase."""
        return [sum(self.steps[: number + 1]) - 1 for number in range(len(self.steps))]

    def name(self, step: int) -> str:
        """Names a step by its phase."""
        number = next(number for number, end in enumerate(self.ends) if step <= end)
        return f"{PHASES[number]} step {step - sum(self.steps[:number])}"


@dataclass(frozen=True)
class Comparison:
    """A fused run compared with the dense one."""

    layout: str
    curve: Tensor
    """``[steps, 2]``."""
    apart: Tensor
    """Distance from the dense run, ``[steps, 2]``."""
    share: Tensor
    """Distance over the allowed distance, ``[steps, 2]``; above 1 the runs disagree."""
    first_out: str | None
    """The first step at which the runs disagree; None if they agree."""

    @classmethod
    def of(cls, layout: str, curve: Tensor, baseline: Baseline) -> "Comparison":
        apart = (curve - baseline.dense).abs()
        share = apart / baseline.allowed
        out = (~(share <= 1)).any(1).nonzero()  # The negation makes NaN disagree.
        return cls(layout, curve, apart, share, baseline.name(int(out[0])) if len(out) else None)


def compare(make_losses: MakeLosses, start: Policy, course: Course, baseline: Baseline) -> list[Comparison]:
    """Trains on every layout and compares each run with the dense one."""
    return [
        Comparison.of(layout, train(Layout.parse(layout), make_losses, start, course), baseline) for layout in LAYOUTS
    ]


def table(baseline: Baseline, comparisons: Sequence[Comparison]) -> Table:
    """Makes the table of all runs."""
    shown = Table(
        title="Loss at the end of each phase; largest distance of loss and gradient norm from those of the dense run"
    )
    for column in ("losses", "layout", *PHASES, "loss apart", "of allowed", "norm apart", "of allowed", "verdict"):
        shown.add_column(column, justify="left" if column in ("losses", "layout", "verdict") else "right")
    shown.add_row("dense", "single", *(f"{baseline.dense[end, 0]:.6f}" for end in baseline.ends))
    largest = baseline.noise.amax(0)
    shown.add_row(
        "",
        "its noise",
        *(f"{baseline.noise[end, 0]:.1e}" for end in baseline.ends),
        f"{largest[0]:.1e}",
        "",
        f"{largest[1]:.1e}",
    )
    for comparison in comparisons:
        (loss, norm), (of_loss, of_norm) = comparison.apart.amax(0), comparison.share.amax(0)
        finals = [f"{comparison.curve[end, 0]:.6f}" for end in baseline.ends]
        verdict = "agrees" if comparison.first_out is None else f"OUT from {comparison.first_out}"
        shown.add_row(
            "fused",
            comparison.layout,
            *finals,
            f"{loss:.1e}",
            f"{of_loss:.2g}",
            f"{norm:.1e}",
            f"{of_norm:.2g}",
            verdict,
        )
    return shown


def prepare(steps: Sequence[int], seed: int) -> tuple[Policy, Course]:
    """Makes the initial policy and the batches from a seed."""
    return Policy(seed), Course(
        (Path(__file__).parent / "text.txt").read_bytes(), dict(zip(PHASES, steps, strict=True)), seed
    )


def positive(text: str) -> int:
    """Parses a positive integer of the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive whole number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(description="Training on fused losses beside training on dense ones.")
    parser.add_argument(
        "--steps", type=positive, nargs=3, default=[100, 50, 50], metavar=PHASES, help="updates in each phase"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the batches")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="a defect to put into the kernels")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # The tensors are so small that more threads would only cost time.
    start, course = prepare(given.steps, given.seed)
    baseline = Baseline.measure(start, course)
    comparisons = compare(FAULTS[given.fault] if given.fault else FusedLosses, start, course, baseline)
    make_console().print(table(baseline, comparisons))
    return int(any(comparison.first_out is not None for comparison in comparisons))


if __name__ == "__main__":
    sys.exit(main())
