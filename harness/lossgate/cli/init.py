# SPDX-License-Identifier: Apache-2.0
"""``lossgate init``."""

from pathlib import Path

from lossgate.cli.app import Exit, app


@app.command
def init(spec: str, /, *, head: str | None = None, name: str | None = None, folder: Path = Path()) -> int:
    """Write a candidate that runs, and a pytest file for it, to put your kernel into.

    Args:
        spec: The loss: a name that lossgate list shows, such as nll.
        head: Where the kernel starts: hidden, logits or logprobs; values or rewards for critics and
            reward models. By default the first that the loss has.
        name: Name of the kernel and of its file. By default my_ and the name of the loss.
        folder: Where to write. Files that are there are never changed.
    """
    from lossgate.losses import find_spec
    from lossgate.reports.starter import write_starter

    kernel, test = write_starter(find_spec(spec), head, name, folder)
    print(f"wrote {kernel}: put your kernel into it, and run: lossgate verify {kernel}")
    print(f"wrote {test}: the same in pytest")
    return Exit.AGREE
