# SPDX-License-Identifier: Apache-2.0
"""Training on fused losses, split over ranks, follows the curve of training on dense losses: a whole run, small enough to watch.

    python examples/tiny_training.py [--steps 100 50 50] [--seed 0] [--fault boundary]

A two-layer causal transformer on bytes learns ``text.txt``, the Declaration of Independence of the United States (1776, in the
public domain): SFT, then DPO, then GRPO. It does so with the dense losses of ``references`` on one rank, and with the kernels of
``kernels`` on one rank and on four simulated ones, dp=2,tp=2 and cp=2,tp=2. The curves of the loss and of the gradient's norm must agree
at every step within noise, which is measured and stated (see ``Yardstick``). Prints a table; the exit code is 1 if a run is out, which with
``--fault``, a defect put into the kernels, one is.

The norm is there because Adam does not see the scale of a gradient: with all gradients doubled the loss has the same curve.
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
from lossgate.console import make_console
from lossgate.worlds import RankContext, SimulatedWorld

LAYOUTS = ("single", "dp=2,tp=2", "cp=2,tp=2")
LEARNING_RATES = {"SFT": 3e-3, "DPO": 3e-4, "GRPO": 5e-4}
TEMPERATURE = 0.8
"""Of the policy in GRPO: it divides logits."""
NUDGED_RUNS = 5
NOISE_FACTOR, LAST_PLACES = 2.0, 4.0
"""See ``Yardstick``."""


class Trainer:
    """One rank's part of a run. ``curve`` has the batch's loss and gradient norm at every step."""

    def __init__(self, ranks: Ranks, policy: Policy, losses: Losses) -> None:
        self.ranks, self.policy, self.losses = ranks, policy, losses
        self.curve: list[tuple[float, float]] = []

    def sft(self, batches: list[Batch]) -> None:
        optimizer = self._optimizer("SFT")
        for batch in batches:
            share = Share.of(batch, self.ranks)
            self._update(optimizer, self.losses.sft(self.policy(share, self.ranks.cp), self.policy.head, share))

    def dpo(self, batches: list[Batch]) -> None:
        """The reference is the policy after SFT."""
        optimizer, reference = self._optimizer("DPO"), self.policy.frozen()
        for batch in batches:
            share = Share.of(batch, self.ranks)
            loss = self.losses.dpo(self._logprobs(self.policy, share), self._logprobs_now(reference, share), share)
            self._update(optimizer, loss, whole_on_cp=True)

    def grpo(self, rollouts: list[Batch], steps: int) -> None:
        """The reference is the policy after DPO; the old policy, in the place of that which sampled, the one that begins on these completions."""
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
        # Of this rank's tokens alone, also where the loss is the whole batch's, so dp and cp add up. Over tp nothing is to be added: the head's
        # rows are this rank's own, and the kernels return the whole gradient of hidden, of which the rest follows.
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
        """Of the gradient of the transformer, which tp ranks share, and of the head, of which each has its rows."""
        of_head = self.policy.head.new_zeros(())
        of_rest = self.policy.head.new_zeros(())
        for name, parameter in self.policy.named_parameters():
            assert parameter.grad is not None
            (of_head if name == "head" else of_rest).add_(parameter.grad.square().sum())
        dist.all_reduce(of_head, group=self.ranks.tp)
        return (of_head + of_rest).sqrt().item()


MakeLosses = Callable[[Ranks, int], Losses]


def train(layout: Layout, make_losses: MakeLosses, start: Policy, course: Course) -> Tensor:
    """The curve, ``[steps, 2]``; every rank of the layout must have the same."""

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
        raise RuntimeError(f"{layout}: ranks have different curves of what must be the same on each")
    return first


@dataclass(frozen=True)
class Yardstick:
    """The dense run, and how far from it another run of the same course may be: NOISE_FACTOR times the noise, and LAST_PLACES.

    The noise of a step is the largest distance so far, since its phase began, between the dense run and other dense ones: NUDGED_RUNS whose
    initial weights are each the next number above or below, which tell how training amplifies rounding; and one in float64,
    which tells of rounding that a nudge leaves as it is, as that of a sum of 50 log-probabilities, much coarser than they are.

    A fused run rounds as a dense one does, elsewhere: its distance is another draw of what the noise is the largest of few draws of, hence the
    factor. LAST_PLACES are float32's, of the loss or of 1, whichever is larger; they matter in a phase's first steps, where runs may all
    agree. (Where rounding decides whether GRPO clips a token curves part, which is rare and proves nothing: take another seed.)
    """

    dense: Tensor
    """``[steps, 2]``, as all here."""
    noise: Tensor
    steps: tuple[int, ...]
    """Of the phases."""

    @classmethod
    def measure(cls, start: Policy, course: Course) -> "Yardstick":
        dense = train(Layout(), DenseLosses, start, course)
        others = [train(Layout(), DenseLosses, start.nudged(seed), course) for seed in range(NUDGED_RUNS)]
        others.append(train(Layout(), DenseLosses, copy.deepcopy(start).double(), course))
        apart = torch.stack([(other - dense).abs() for other in others]).amax(0)
        steps = tuple(course.steps[phase] for phase in PHASES)
        return cls(dense, torch.cat([phase.cummax(0).values for phase in apart.split(steps)]), steps)

    @property
    def allowed(self) -> Tensor:
        return NOISE_FACTOR * self.noise + LAST_PLACES * torch.finfo(torch.float32).eps * self.dense.abs().clamp(min=1)

    @property
    def ends(self) -> list[int]:
        """The last step of each phase."""
        return [sum(self.steps[: number + 1]) - 1 for number in range(len(self.steps))]

    def place(self, step: int) -> str:
        number = next(number for number, end in enumerate(self.ends) if step <= end)
        return f"{PHASES[number]} step {step - sum(self.steps[:number])}"


@dataclass(frozen=True)
class Finding:
    """A fused run beside the dense one."""

    layout: str
    curve: Tensor
    apart: Tensor
    """``[steps, 2]``."""
    share: Tensor
    """``[steps, 2]``: of what is allowed."""
    first_out: str | None
    """None: it agrees."""

    @classmethod
    def of(cls, layout: str, curve: Tensor, yardstick: Yardstick) -> "Finding":
        apart = (curve - yardstick.dense).abs()
        share = apart / yardstick.allowed
        out = (~(share <= 1)).any(1).nonzero()  # NaN is out
        return cls(layout, curve, apart, share, yardstick.place(int(out[0])) if len(out) else None)


def compare(make_losses: MakeLosses, start: Policy, course: Course, yardstick: Yardstick) -> list[Finding]:
    return [
        Finding.of(layout, train(Layout.parse(layout), make_losses, start, course), yardstick) for layout in LAYOUTS
    ]


def table(yardstick: Yardstick, findings: Sequence[Finding]) -> Table:
    shown = Table(
        title="Loss at the end of each phase; how far loss and gradient norm are at most from those of the dense run"
    )
    for column in ("losses", "layout", *PHASES, "loss apart", "of allowed", "norm apart", "of allowed", "verdict"):
        shown.add_column(column, justify="left" if column in ("losses", "layout", "verdict") else "right")
    shown.add_row("dense", "single", *(f"{yardstick.dense[end, 0]:.6f}" for end in yardstick.ends))
    largest = yardstick.noise.amax(0)
    shown.add_row(
        "",
        "its noise",
        *(f"{yardstick.noise[end, 0]:.1e}" for end in yardstick.ends),
        f"{largest[0]:.1e}",
        "",
        f"{largest[1]:.1e}",
    )
    for finding in findings:
        (loss, norm), (of_loss, of_norm) = finding.apart.amax(0), finding.share.amax(0)
        finals = [f"{finding.curve[end, 0]:.6f}" for end in yardstick.ends]
        verdict = "agrees" if finding.first_out is None else f"OUT from {finding.first_out}"
        shown.add_row(
            "fused", finding.layout, *finals, f"{loss:.1e}", f"{of_loss:.2g}", f"{norm:.1e}", f"{of_norm:.2g}", verdict
        )
    return shown


def prepare(steps: Sequence[int], seed: int) -> tuple[Policy, Course]:
    return Policy(seed), Course(
        (Path(__file__).parent / "text.txt").read_bytes(), dict(zip(PHASES, steps, strict=True)), seed
    )


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive whole number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Training on fused losses beside training on dense ones.")
    parser.add_argument(
        "--steps", type=positive, nargs=3, default=[100, 50, 50], metavar=PHASES, help="updates in each phase"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="a defect to put into the kernels")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are tiny
    start, course = prepare(given.steps, given.seed)
    yardstick = Yardstick.measure(start, course)
    findings = compare(FAULTS[given.fault] if given.fault else FusedLosses, start, course, yardstick)
    make_console().print(table(yardstick, findings))
    return int(any(finding.first_out is not None for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
