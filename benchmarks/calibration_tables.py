# SPDX-License-Identifier: Apache-2.0
"""The tables of ``calibration.py``: finished pieces, of one file or of several, added up."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibration_counts import RightCounts, WrongCounts, largest_step, median_step
from rich.console import Console
from rich.table import Table

from lossgate.base.names import DTYPES


@dataclass
class Merged:
    """What all pieces counted. A piece that stands in several files counts once."""

    pieces: int = 0
    seeds: set[int] = field(default_factory=set)
    seconds: float = 0.0
    kernels: dict[tuple[str, str], RightCounts] = field(default_factory=lambda: defaultdict(RightCounts))
    """By kernel and dtype."""
    groups: dict[tuple[str, str, str], RightCounts] = field(default_factory=lambda: defaultdict(RightCounts))
    """By spec, head and dtype."""
    pairs: dict[str, RightCounts] = field(default_factory=lambda: defaultdict(RightCounts))
    """Differences of two kernels, by dtype."""
    wrong: dict[tuple[str, str], WrongCounts] = field(default_factory=lambda: defaultdict(WrongCounts))
    """By bug and dtype."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> "Merged":
        merged = cls()
        for record in {str(one["piece"]): one for one in records}.values():
            merged._add(record)
        return merged

    def _add(self, record: Mapping[str, Any]) -> None:
        piece, dtype = record["piece"], record["piece"]["dtype"]
        self.pieces += 1
        self.seeds.add(piece["seed"])
        self.seconds += record["seconds"]
        for name, data in record["right"].items():
            counts = RightCounts.of(data)
            self.kernels[name, dtype].merge(counts)
            self.groups[piece["spec"], piece["head"], dtype].merge(counts)
        self.pairs[dtype].merge(RightCounts.of(record["pairs"]))
        for name, data in record["wrong"].items():
            self.wrong[name, dtype].merge(WrongCounts(**data))

    @property
    def alarms(self) -> int:
        """False alarms, of kernels, of two and of pools."""
        counts = (*self.groups.values(), *self.pairs.values())
        return sum(len(one.alarms) + one.pool_alarms for one in counts)


_RIGHT = ("problems", "comparisons", "alarms", "largest statistic, of its limit", "median MDE", "pools", "alarms")


def _row(counts: RightCounts) -> list[str]:
    where, share = counts.largest
    pools = "-"
    if counts.pools:
        pools = f"{counts.pools}: {median_step(counts.pool_mdes):.1g}, {largest_step(counts.pool_mdes):.1g}"
    return [
        f"{counts.problems:,}",
        f"{counts.comparisons:,}",
        str(len(counts.alarms)),
        f"{share:.2f} ({where})",
        f"{median_step(counts.mdes):.1g}",
        pools,
        f"{counts.pool_alarms}, at most {counts.pool_margin:.2f} (scale) and {counts.pool_noise_margin:.2f} (noise)",
    ]


def show(merged: Merged, *, alarms: bool) -> None:
    """Prints every table.

    Args:
        merged: what was counted.
        alarms: whether to print each false alarm with its problem, too.
    """
    console = Console(width=160, highlight=False)
    seeds = ", ".join(map(str, sorted(merged.seeds)))
    groups = Table("spec", "head", "dtype", *_RIGHT, title=f"Right kernels, seeds {seeds}")
    for key, counts in sorted(merged.groups.items()):
        groups.add_row(*key, *_row(counts))
    kernels = Table("kernel", "dtype", *_RIGHT, title="Right kernels, one by one")
    for key, counts in sorted(merged.kernels.items()):
        kernels.add_row(*key, *_row(counts))
    pairs = Table("dtype", *_RIGHT, title="Differences of two right kernels")
    for dtype, counts in merged.pairs.items():
        pairs.add_row(dtype, *_row(counts))
    wrong = Table("bug", *DTYPES, title="Bugs caught, of those visible (of all)")
    for name in sorted({name for name, _ in merged.wrong}):
        wrong.add_row(name, *(_caught(merged.wrong.get((name, dtype))) for dtype in DTYPES))
    for table in (kernels, groups, pairs, wrong):
        console.print(table)
    if alarms:
        for (name, dtype), counts in sorted(merged.kernels.items()):
            for alarm in counts.alarms:
                findings = "; ".join(alarm["findings"])
                console.print(f"FALSE ALARM  {name}  {dtype}\n  {findings}\n  {alarm['problem']}", markup=False)
    console.print(_summary(merged))


def _caught(counts: WrongCounts | None) -> str:
    if counts is None:
        return "-"
    of_visible = f"{100 * counts.visible_caught / counts.visible:.1f}%" if counts.visible else "-"
    return f"{of_visible} of {counts.visible:,} ({100 * counts.caught / counts.problems:.1f}%)"


def _summary(merged: Merged) -> str:
    groups, pairs = merged.groups.values(), merged.pairs.values()
    names = {name for name, _ in merged.kernels}
    return (
        f"{len(names)} kernels in {merged.pieces} pieces: {sum(len(c.alarms) for c in groups)} false alarms in "
        f"{sum(c.comparisons for c in groups):,} comparisons, {sum(c.pool_alarms for c in groups)} in "
        f"{sum(c.pools for c in groups):,} pools, and {sum(len(c.alarms) for c in pairs)} in "
        f"{sum(c.comparisons for c in pairs):,} differences of two; {merged.seconds:,.0f} s"
    )
