# SPDX-License-Identifier: Apache-2.0
"""Measures GRPO through an lm-head, forward and backward: time, peak memory and error.

One run covers our ways, open-instruct's tiled algorithm and the dense one.

    python benchmarks/tiled.py [--tokens 2048 --hidden 1024 --vocab 32768]
        [--dtype float32 bfloat16] [--repeats 3]

All run in turn in one process on one thread, in tiles of 256 tokens where they have tiles. Seconds
are those of the processor, which other programs disturb little; the fastest of the repeats counts.
Memory is the growth of the process at its peak beyond the inputs. Errors are those of the weight's
gradient, relative to float64. Ratios are relative to open-instruct's algorithm.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch
from fused import forget_peak, peak_mib
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fused_losses import grpo_loss, linear_logprobs, tiled_grpo_loss, tiled_token_logprobs

TILE = 256
BETA, LOWER, HIGHER = 0.05, 0.2, 0.272


@dataclass(frozen=True)
class Batch:
    """The tokens of a rank. Every tensor but hidden is ``[tokens]``."""

    hidden: Tensor
    labels: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor
    reference: Tensor

    @classmethod
    def of(cls, tokens: int, width: int, vocab: int, dtype: torch.dtype) -> "Batch":
        """Draws a batch, whose ratios and KL divergences are moderate."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
        labels = torch.randint(vocab, (tokens,), generator=generator)
        advantages, old, reference = torch.randn(3, tokens, generator=generator).unbind()
        likely = -torch.tensor(float(vocab)).log() - 0.5
        mask = torch.rand(tokens, generator=generator) < 0.9
        return cls(hidden, labels, mask, advantages, 0.2 * old + likely, 0.2 * reference + likely)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``grpo_loss``."""
        return {
            "mask": self.mask,
            "advantages": self.advantages,
            "old_logprobs": self.old,
            "reference_logprobs": self.reference,
            "valid_tokens": int(self.mask.sum()),
        }


class _GradientsInForward(torch.autograd.Function):
    """open-instruct's algorithm, with what losses.md says of it at O3, O9, O10 and O15.

    Forward calls the head for each chunk of tokens and runs backward at once. That adds the head's
    gradients to ``.grad``, and those of hidden to a buffer. Backward hands the buffer on. All
    numbers have the dtype of the head.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Module, batch: Batch) -> Tensor:
        buffer, count = torch.zeros_like(hidden), batch.mask.sum()
        total, start = torch.zeros((), device=hidden.device), 0
        fields = (hidden, batch.labels, batch.mask, batch.advantages, batch.old, batch.reference)
        for x, *others in zip(*(field.chunk(-(-len(hidden) // TILE)) for field in fields), strict=True):
            x = x.detach().requires_grad_()
            x.grad = buffer[start : start + len(x)]
            start += len(x)
            with torch.enable_grad():
                part = _summed_loss(head(x), *others)
            total += part.detach()
            torch.autograd.backward(part, 1 / count.to(part.dtype))
        ctx.save_for_backward(buffer)
        return total / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * upstream, None, None


def _summed_loss(
    logits: Tensor, labels: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, reference: Tensor
) -> Tensor:
    new = logits.gather(1, labels[:, None]).squeeze(1) - logits.logsumexp(1)
    ratio, d = (new - old).exp(), (new - reference).clamp(-40, 40)
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - LOWER, 1 + HIGHER))
    return ((policy + BETA * (torch.expm1(-d) + d)) * mask).sum()


Loss = Callable[[nn.Linear, Batch], Tensor]


def _two_passes(head: nn.Linear, batch: Batch) -> Tensor:
    return grpo_loss(tiled_token_logprobs(head, batch.hidden, batch.labels).logprobs, **batch.options)[0]


def _from_the_weight(head: nn.Linear, batch: Batch) -> Tensor:
    logprobs = linear_logprobs(batch.hidden, head.weight, batch.labels, chunk=TILE).logprobs
    return grpo_loss(logprobs, **batch.options)[0]


def _dense(head: nn.Linear, batch: Batch) -> Tensor:
    logits = head(batch.hidden)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
    return grpo_loss(log_p.gather(1, batch.labels[:, None]).squeeze(1), **batch.options)[0]


ORIGINAL = "open-instruct's algorithm"
WAYS: dict[str, Loss] = {
    ORIGINAL: lambda head, batch: _GradientsInForward.apply(batch.hidden, head, batch),  # type: ignore[return-value]
    "tiled_grpo_loss": lambda head, batch: tiled_grpo_loss(head, batch.hidden, batch.labels, **batch.options)[0],
    "tiled_token_logprobs, grpo_loss": _two_passes,
    "linear_logprobs, grpo_loss": _from_the_weight,
    "dense": _dense,
}


def step(way: str, head: nn.Linear, batch: Batch) -> tuple[float, float]:
    """Returns the seconds and MiB of forward and backward; gradients stay in ``.grad``."""
    head.weight.grad = batch.hidden.grad = None
    forget_peak()
    before, began = peak_mib(), process_time()
    WAYS[way](head, batch).backward()
    return process_time() - began, peak_mib() - before


def exact(head: nn.Linear, batch: Batch) -> Tensor:
    """Computes the weight's gradient in float64, in chunks."""
    weight, h = head.weight.detach().double().requires_grad_(), batch.hidden.detach().double()
    logprobs = linear_logprobs(h, weight, batch.labels, chunk=TILE).logprobs
    return torch.autograd.grad(grpo_loss(logprobs, **batch.options)[0], [weight])[0]


def compare(sizes: tuple[int, int, int], dtype: torch.dtype, repeats: int, console: Console) -> None:
    """Prints the table of all ways for one dtype."""
    tokens, width, vocab = sizes
    torch.manual_seed(0)
    head, batch = nn.Linear(width, vocab, bias=False, dtype=dtype), Batch.of(*sizes, dtype)
    expected, errors = exact(head, batch), dict[str, float]()
    for way in WAYS:  # This warms up, too.
        step(way, head, batch)
        assert head.weight.grad is not None
        errors[way] = float((head.weight.grad.double() - expected).norm() / expected.norm())
    del expected
    measured = [{way: step(way, head, batch) for way in WAYS} for _ in range(repeats)]
    best = {way: _least([each[way] for each in measured]) for way in WAYS}
    table = Table(title=f"{str(dtype).removeprefix('torch.')}, T={tokens}, H={width}, V={vocab}", title_justify="left")
    for heading in ("", "seconds", "MiB", "time / original", "MiB / original", "error of dW"):
        table.add_column(heading, justify="left" if not heading else "right")
    for way, (seconds, mib) in best.items():
        ratios = f"{seconds / best[ORIGINAL][0]:.2f}", f"{mib / best[ORIGINAL][1]:.2f}"
        table.add_row(way, f"{seconds:.2f}", f"{mib:.0f}", *ratios, f"{errors[way]:.1e}")
    console.print(table)


def _least(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(seconds for seconds, _ in measured), min(mib for _, mib in measured)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3, help="number of runs, of which the fastest counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in given.dtype:
        compare((given.tokens, given.hidden, given.vocab), getattr(torch, dtype), given.repeats, Console(width=120))


if __name__ == "__main__":
    main()
