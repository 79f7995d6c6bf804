# SPDX-License-Identifier: Apache-2.0
"""Prints the table: ``python -m distributed_tests.wrappers``. Exits with 1 if a cell is wrong."""

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from distributed_tests.wrappers.model import HEADS
from distributed_tests.wrappers.table import COLUMNS, table
from distributed_tests.wrappers.wrappers import WRAPPERS


def main() -> int:
    argparse.ArgumentParser("python -m distributed_tests.wrappers", description=__doc__).parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    entries = table(full=True)
    shown = Table("wrapper", *(f"{head}, {column}" for head in HEADS for column in COLUMNS))
    for wrapper in WRAPPERS:
        shown.add_row(wrapper, *(str(entries[wrapper, head, column]) for head in HEADS for column in COLUMNS))
    console = Console(width=170, highlight=False)
    console.print(shown)
    for place, entry in entries.items():
        for text in entry.wrong:
            console.print(f"{', '.join(place)}: {text}", markup=False)
    refusals = {entry.refused: entry.way_out.text for entry in entries.values() if entry.way_out}
    for message, way_out in refusals.items():
        console.print(
            f"impossible in torch, for a dense head too: {message}; way out, which works: {way_out}", markup=False
        )
    wrong = sum(bool(entry.wrong) for entry in entries.values())
    refused = sum(bool(entry.refused) for entry in entries.values())
    console.print(
        f"{len(entries) - wrong - refused} cells work, {refused} are refused with a way out that works, "
        f"{wrong} are wrong; {time.monotonic() - began:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
