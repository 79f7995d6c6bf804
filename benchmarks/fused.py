# SPDX-License-Identifier: Apache-2.0
"""Measures linear cross-entropy, forward and backward: time, peak memory and error.

One run covers our kernels and their peers.

    python benchmarks/fused.py [--tokens 4096 --hidden 1024 --vocab 32768]
        [--dtype float32 bfloat16] [--repeats 3] [--accuracy]

Each kernel runs in a process of its own, on two threads. Memory is the growth of the process at its
peak beyond the inputs. Errors are relative to a float64 computation in chunks. Ratios are relative
to ``linear_cross_entropy`` in the same dtype. The row of a peer that is not installed shows the
import error; after torch, install them with
``pip install --no-deps liger-kernel cut-cross-entropy``.

``--accuracy`` prints the error of the weight's gradient in bfloat16 as chunks shrink.
"""

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from fused_losses import linear_cross_entropy, linear_logprobs

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours_through_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return -linear_logprobs(hidden, weight, labels).logprobs.mean()


def _dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor, chunked: bool) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Runs Liger's GRPO, since its chunked losses have no cross-entropy.

    On policy and with advantages of 1, its gradients are those of cross-entropy; its loss is -1.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = max(1, len(labels) // 256)  # Liger processes one row at a time.
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")
    ones = torch.ones(rows, len(labels) // rows)
    return loss(hidden.view(rows, -1, hidden.shape[1]), weight, labels.view(rows, -1), ones, ones[:, 0])[0]


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut

    return cut(hidden, weight, labels, impl="torch_compile")


KERNELS: dict[str, Loss] = {
    "ours": linear_cross_entropy,
    "ours, through log-probabilities": _ours_through_logprobs,
    "ours, float32 products": partial(linear_cross_entropy, matmul_dtype=torch.float32),
    "dense": _dense,
    "torch F.linear_cross_entropy": partial(_torch, chunked=False),
    "torch F.linear_cross_entropy, chunked": partial(_torch, chunked=True),
    "cut-cross-entropy, torch_compile": _cut_cross_entropy,
    "Liger chunked GRPO, of the same gradients": _liger,
}

OF_ANOTHER_LOSS = {"Liger chunked GRPO, of the same gradients"}
"""Kernels whose loss cannot be compared, only their gradients."""


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draws states ``[tokens, hidden]``, a weight ``[vocab, hidden]`` and labels ``[tokens]``."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator).to(dtype)
    w = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype)
    return h.requires_grad_(), w.requires_grad_(), torch.randint(vocab, (tokens,), generator=generator)


def peak_mib() -> float:
    """Returns the peak memory of this process.

    ``ru_maxrss`` would return that of the parent process if it is larger.
    """
    return next(
        int(line.split()[1]) / 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def forget_peak() -> None:
    """Resets the peak to the memory that this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, sizes: tuple[int, int, int], dtype: torch.dtype, repeats: int, connection: Any) -> None:
    """Measures a kernel inside its own process.

    It sends seconds, MiB, loss and gradients through the connection, or else the error as a string.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    try:
        KERNELS[name](*inputs(8, 16, 32, dtype)).backward()  # This imports and compiles.
        h, w, y = inputs(*sizes, dtype)
        forget_peak()
        before, taken = peak_mib(), []
        loss = torch.zeros(())
        for _ in range(repeats):
            h.grad = w.grad = None
            start = perf_counter()
            loss = KERNELS[name](h, w, y)
            loss.backward()
            taken.append(perf_counter() - start)
        assert h.grad is not None
        assert w.grad is not None
        connection.send(
            (min(taken), peak_mib() - before, float(loss.detach()), h.grad.double().numpy(), w.grad.double().numpy())
        )
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def exact(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[float, Tensor, Tensor]:
    """Computes loss and gradients in float64, in chunks."""
    h, w, y = (t.detach().double() if t.is_floating_point() else t for t in inputs(*sizes, dtype))
    loss, grad_h, grad_w = 0.0, torch.zeros_like(h), torch.zeros_like(w)
    for start in range(0, len(h), 256):
        part = slice(start, start + 256)
        log_p = torch.log_softmax(h[part] @ w.T, 1)
        loss -= float(log_p.gather(1, y[part, None]).sum()) / len(h)
        d = log_p.exp_() / len(h)
        d[torch.arange(len(d)), y[part]] -= 1 / len(h)
        grad_h[part], grad_w = d @ w, grad_w.addmm_(d.T, h[part])
    return loss, grad_h, grad_w


def run(name: str, sizes: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> Any:
    """Runs ``measure`` in a new process and returns what it sends."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(name, sizes, dtype, repeats, theirs))
    process.start()
    theirs.close()
    result = mine.recv()
    process.join()
    return result


def compare(sizes: tuple[int, int, int], dtype: torch.dtype, repeats: int, console: Console) -> None:
    """Prints the table of all kernels for one dtype."""
    table = Table(
        title=f"{str(dtype).removeprefix('torch.')}, T={sizes[0]}, H={sizes[1]}, V={sizes[2]}", title_justify="left"
    )
    for heading in ("", "seconds", "MiB", "time / ours", "MiB / ours", "error of loss", "of dX", "of dW"):
        table.add_column(heading, justify="left" if not heading else "right")
    loss, *gradients = exact(sizes, dtype)
    ours: tuple[float, float] | None = None
    for name in KERNELS:
        result = run(name, sizes, dtype, repeats)
        if isinstance(result, str):
            table.add_row(name, result)
            continue
        seconds, mib, its_loss, *its = result
        ours = ours or (seconds, mib)
        errors = [float((torch.from_numpy(a) - b).norm() / b.norm()) for a, b in zip(its, gradients, strict=True)]
        shown = [
            f"{seconds:.2f}",
            f"{mib:.0f}",
            f"{seconds / ours[0]:.2f}",
            f"{mib / ours[1]:.2f}",
            "another" if name in OF_ANOTHER_LOSS else f"{abs(its_loss / loss - 1):.1e}",
        ]
        table.add_row(name, *shown, *(f"{error:.2g}" for error in errors))
    console.print(table)


def accuracy(console: Console) -> None:
    """Prints the error of dW in bfloat16 as chunks shrink, at T=2048, H=64, V=256.

    At these sizes, the error with an accumulator in bfloat16 was measured to grow from 0.30% with
    one chunk to 1.84% with one chunk for each token.
    """
    table = Table(title="relative error of dW in bfloat16, T=2048, H=64, V=256", title_justify="left")
    for heading in ("chunk", "cross-entropy", "log-probabilities", "both, float32 products"):
        table.add_column(heading, justify="right")
    _, _, expected = exact((2048, 64, 256), torch.bfloat16)

    def error(kernel: Loss) -> str:
        h, w, y = inputs(2048, 64, 256, torch.bfloat16)
        kernel(h, w, y).backward()
        assert w.grad is not None
        return f"{float((w.grad.double() - expected).norm() / expected.norm()):.3%}"

    for chunk in (2048, 256, 128, 16, 1):
        logprobs: Loss = lambda h, w, y, c=chunk: -linear_logprobs(h, w, y, chunk=c).logprobs.mean()  # noqa: E731
        fine = partial(linear_cross_entropy, chunk=chunk, matmul_dtype=torch.float32)
        table.add_row(str(chunk), error(partial(linear_cross_entropy, chunk=chunk)), error(logprobs), error(fine))
    console.print(table)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of runs, of which the fastest counts")
    parser.add_argument("--accuracy", action="store_true", help="print the error of dW in bfloat16 as chunks shrink")
    given, console = parser.parse_args(), Console(width=160 if not sys.stdout.isatty() else None)
    if given.accuracy:
        accuracy(console)
        return
    for dtype in given.dtype:
        compare((given.tokens, given.hidden, given.vocab), getattr(torch, dtype), given.repeats, console)


if __name__ == "__main__":
    main()
