# SPDX-License-Identifier: Apache-2.0
"""Measures what the statistics of ``linear_sft_loss`` cost, part by part.

    python benchmarks/sft_statistics.py [--tokens 1024 --hidden 512 --vocab 16384]
        [--dtype float32] [--repeats 5]

Rows take turns on one thread, and the run with the least processor time counts. Ratios are relative
to counts, loss and perplexity alone.
"""

import argparse
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fused_losses import linear_logprobs, linear_sft_loss

ROWS: dict[str, dict[str, bool] | None] = {
    "counts, loss, perplexity": {"entropy": False, "logit_range": False},
    ".. and the range of logits": {"entropy": False, "logit_range": True},
    ".. and the entropy": {"entropy": True, "logit_range": False},
    "all": {"entropy": True, "logit_range": True},
    "the loss alone": None,
}
"""The parts that each row asks for; None for ``linear_logprobs`` without statistics."""


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draws states ``[tokens, hidden]``, a weight ``[vocab, hidden]`` and labels ``[tokens]``."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator).to(dtype)
    w = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype)
    return h.requires_grad_(), w.requires_grad_(), torch.randint(vocab, (tokens,), generator=generator)


def loss_of(parts: dict[str, bool] | None, h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Computes the loss of eight sequences of equal length, with the statistics of a row."""
    if parts is None:
        return -linear_logprobs(h, w, y).logprobs.mean()
    every = torch.ones_like(y, dtype=torch.bool)
    given: dict[str, Any] = {"mask": every, "real": every, "sequence": torch.arange(len(y)) * 8 // len(y)}
    return linear_sft_loss(h, w, y, **given, sequences=8, valid_tokens=len(y), **parts)[0]


def fastest(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Returns the least processor time of each run, in seconds."""
    taken = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = process_time()
            run()
            taken[name] = min(taken[name], process_time() - start)
    return taken


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in {"tokens": 1024, "hidden": 512, "vocab": 16384, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    given, console = parser.parse_args(), Console(width=160 if not sys.stdout.isatty() else None)
    torch.set_num_threads(1)
    batch = inputs(given.tokens, given.hidden, given.vocab, getattr(torch, given.dtype))
    steps = fastest({n: lambda p=p: loss_of(p, *batch).backward() for n, p in ROWS.items()}, given.repeats)
    with torch.no_grad():
        evaluations = fastest({n: lambda p=p: loss_of(p, *batch) and None for n, p in ROWS.items()}, given.repeats)
    table = Table(title=f"{given.dtype}, T={given.tokens}, H={given.hidden}, V={given.vocab}", title_justify="left")
    for heading in ("", "forward and backward, s", "ratio", "evaluation, s", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    base = next(iter(ROWS))
    for name in ROWS:
        of_both = [(seconds[name], seconds[name] / seconds[base]) for seconds in (steps, evaluations)]
        table.add_row(name, *(f"{number:.2f}" for pair in of_both for number in pair))
    console.print(table)


if __name__ == "__main__":
    main()
