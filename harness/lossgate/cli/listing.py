# SPDX-License-Identifier: Apache-2.0
"""``lossgate list``."""

from collections.abc import Iterator

from lossgate.cli.app import Exit, app, load_for


@app.command(name="list")
def list_(*targets: str) -> int:
    """List specs and properties; describe a spec; or list the candidates and specs of files.

    Args:
        targets: Names of specs (nll), files (file.py) or modules (package.module), or one candidate
            or spec of either (file.py:name); none for all specs and properties.
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
    from lossgate.reports.listing import declared, described, overview

    if not targets:
        yield from overview(width)
    for number, target in enumerate(targets):
        if number:
            yield ""
        yield from described(find_spec(target), width) if is_name_of_a_spec(target) else declared(target, width)
