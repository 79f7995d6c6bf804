# SPDX-License-Identifier: Apache-2.0
"""Says what a call used, beside the budgets that the candidate declares."""

from collections.abc import Iterable, Iterator, Mapping

_PHASES = ("forward", "backward")
_NAMES = {
    "largest_tensor": "largest tensor",
    "saved": "saved for backward",
    "bytes": "brought to collectives",
    "host_waits": "host waits",
}


_UNITS = ("elements", "bytes", "calls")
_NOTHING = 1e-9
"""Stands for a budget of 0."""


def nearest_to_budgets(measured: Iterable[tuple[str, str, Mapping[str, Mapping[str, float]]]]) -> Iterator[str]:
    """Yields a line for each candidate and each of its budgets: the cell that comes nearest to it.

    Args:
        measured: candidate, cell and what a call used there.
    """
    nearest: dict[tuple[str, str], tuple[float, str]] = {}
    for candidate, cell, resources in measured:
        for name, numbers in resources.items():
            used = next(((numbers[unit], unit) for unit in _UNITS if unit in numbers), None)
            if used is None or "budget" not in numbers:
                continue
            share, line = used[0] / max(numbers["budget"], _NOTHING), _of_budget(name, *used, numbers["budget"])
            if share > nearest.get((candidate, name), (-1.0, ""))[0]:
                nearest[candidate, name] = share, f"{candidate}: {line}, in {cell}"
    yield from (line for _, line in nearest.values())


def _of_budget(name: str, used: float, unit: str, budget: float) -> str:
    return f"{_NAMES.get(name, name)}: {used:,.15g} {unit} of a budget of {budget:,.15g}"


def resource_lines(resources: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yields a line for each thing that was used, and one for the sizes of the problem.

    Args:
        resources: as evidence has them: numbers by name.
    """
    for name, numbers in resources.items():
        if name == "problem":
            sizes = ", ".join(f"{size:,.15g} {dim}" for dim, size in numbers.items())
            yield f"measured with {sizes}, on each rank"
            continue
        used = [f"{number:,.15g} {what}" for what, number in numbers.items() if what not in ("budget", *_PHASES)]
        phases = [f"{numbers[phase]:,.15g} in {phase}" for phase in _PHASES if phase in numbers]
        budget = [f"of a budget of {numbers['budget']:,.15g}"] if "budget" in numbers else []
        in_brackets = [f"({', '.join(phases)})"] * bool(phases)
        yield " ".join([f"{_NAMES.get(name, name)}: {', '.join(used)}", *budget, *in_brackets])
