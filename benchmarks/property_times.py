# SPDX-License-Identifier: Apache-2.0
"""Prints what each property cost in a run, from its evidence, and a bug that shows why it is asked.

    lossgate verify ci/candidates/ours.py --profile ci --evidence out.jsonl
    python benchmarks/property_times.py out.jsonl

The time of agreement is that of the cells without their other properties. The bug is that of the
bank: see ``kernel_bank.property_bugs``. Those that no other property shows say "alone".
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_bank.property_bugs import PROPERTY_BUGS
from lossgate.engine.cell_record import CellRecord
from lossgate.evidence.reader import GoodLine, read_lines


def cells_in(files: Iterable[Path]) -> list[CellRecord]:
    """Returns the records of cells; lines that are damaged are left out."""
    lines = [line for file in files for line in read_lines(file)]
    records = [line.record for line in lines if isinstance(line, GoodLine)]
    return [record for record in records if isinstance(record, CellRecord)]


def table(cells: Sequence[CellRecord]) -> list[str]:
    """Returns the lines of the table, the dearest property first."""
    seconds, checks = Counter[str](), Counter[str]()
    for found in (one for cell in cells for one in cell.properties):
        seconds[found.name] += found.seconds  # pyright: ignore[reportArgumentType]  # a Counter of floats
        checks[found.name] += found.problems
    others = sum(seconds.values())
    agreement = sum(cell.seconds for cell in cells) - others
    lines = [f"{'property':20} {'seconds':>9} {'checks':>7} {'ms':>6}  of agreement  a bug that it shows"]
    lines += [f"{'agreement':20} {agreement:9.1f} {len(cells):7} cells"]
    for name, own in seconds.most_common():
        each = 1000 * own / max(checks[name], 1)
        lines.append(f"{name:20} {own:9.1f} {checks[name]:7} {each:6.0f} {own / agreement:13.3f}  {_bug(name)}")
    return [*lines, f"{'all beside agreement':20} {others:9.1f}; {others / agreement:.2f} of agreement"]


def _bug(name: str) -> str:
    """Returns the bug of a property in words, and whether no other property shows it."""
    if name not in PROPERTY_BUGS:
        return ""
    known = PROPERTY_BUGS[name]
    return f"{known.bug.sentence}{'' if known.also else ' (alone)'}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", nargs="+", type=Path, help="files that verify --evidence has written")
    cells = cells_in(parser.parse_args(arguments).evidence)
    if not cells:
        print("there is no cell in the evidence", file=sys.stderr)
        return 1
    print("\n".join(table(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
