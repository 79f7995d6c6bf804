# SPDX-License-Identifier: Apache-2.0
"""The command line for tests: in this process or in one of its own, and kernels for it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KERNELS = """
import torch, lossgate
from lossgate import ANY

def cross_entropy(inputs, options):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)

@lossgate.candidate("nll", head="logits", axes=("dp", "cp"), good_for="a test")
def right(inputs, options, mesh):
    return cross_entropy(inputs, options)

@lossgate.candidate("nll", head="logits", axes=("dp", "cp"))
def wrong(inputs, options, mesh):
    return cross_entropy(inputs, options) * (1.01 if inputs.labels.numel() > 2 else 1.0)

@lossgate.candidate("nll", head="logits")
def shapeless(inputs, options, mesh):
    return inputs.logits.sum(0)
"""


def in_a_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own, as a user does.

    Most of its time goes into loading torch.
    """
    return subprocess.run(
        [sys.executable, "-m", "lossgate", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@dataclass(frozen=True)
class Done:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


Lossgate = Callable[..., Done]
