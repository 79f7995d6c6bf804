# SPDX-License-Identifier: Apache-2.0
"""``lossgate list``."""

from lossgate.cli.app import Exit, app


@app.command(name="list")
def list_(*targets: str) -> int:
    """List specs with their options, and properties; or the candidates of files and modules.

    Args:
        targets: Files (file.py) or modules (package.module); none for specs and properties.
    """
    from lossgate.reports.console import make_console
    from lossgate.reports.listing import candidates_table, properties_table, spec_tables

    console = make_console()
    for table in [*map(candidates_table, targets)] if targets else [*spec_tables(), properties_table()]:
        console.print(table)
    return Exit.AGREE
