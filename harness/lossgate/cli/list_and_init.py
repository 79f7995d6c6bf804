# SPDX-License-Identifier: Apache-2.0
"""``lossgate list`` and ``lossgate init``: lists specs, and writes a first candidate of a spec."""

from collections.abc import Iterator
from pathlib import Path

from lossgate.cli.app import Exit, app, load_for


@app.command
def init(spec: str, /, *, head: str | None = None, name: str | None = None, folder: Path = Path()) -> int:
    """Write a candidate that runs, for you to put your kernel into, and a pytest file for it.

    Args:
        spec: The loss: a name that lossgate list shows, such as nll.
        head: Where the kernel starts: hidden, logits or logprobs; values or rewards for critics and
            reward models. By default the first that the loss has.
        name: Name of the kernel and of its file. By default my_ and the name of the loss.
        folder: Where to write. Existing files are never changed.
    """
    from lossgate.losses import find_spec
    from lossgate.reports.starter import write_starter

    kernel, test = write_starter(find_spec(spec), head, name, folder)
    print(f"wrote {kernel}: put your kernel into it, and run: lossgate verify {kernel}")
    print(f"wrote {test}: the same in pytest")
    return Exit.AGREE


@app.command(name="list")
def list_(*targets: str) -> int:
    """List specs and properties; describe a spec; or list the candidates and specs of files.

    Args:
        targets: Names of specs (nll), files (file.py) or modules (package.module), or one candidate
            or spec of either (file.py:name). "adapters" lists the public libraries whose kernels
            lossgate can verify. By default all specs and properties are listed.
    """
    from lossgate.reports.console import make_console

    console = make_console()
    for line in _lines(targets, console.width):
        console.print(line, soft_wrap=True)  # the lines are wrapped already, and nothing may be cut
    return Exit.AGREE


def _lines(targets: tuple[str, ...], width: int) -> Iterator[str]:
    load_for(targets)
    from lossgate.declaration.loading import is_name_of_a_spec
    from lossgate.losses import find_spec
    from lossgate.reports.listing import adapters, declared, described, overview

    if not targets:
        yield from overview(width)
    for number, target in enumerate(targets):
        if number:
            yield ""
        if target == "adapters":
            yield from adapters(width)
        elif is_name_of_a_spec(target):
            yield from described(find_spec(target), width)
        else:
            yield from declared(target, width)
