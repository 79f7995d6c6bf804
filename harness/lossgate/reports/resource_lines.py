# SPDX-License-Identifier: Apache-2.0
"""Shows the resources that a call used, and the budgets that the candidate declares."""

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
"""Divides a use if the budget is 0."""


def nearest_to_budgets(measured: Iterable[tuple[str, str, Mapping[str, Mapping[str, float]]]]) -> Iterator[str]:
    """Yields a line for each budget of each candidate, about the cell that comes nearest to it.

    Args:
        measured: for each cell, its candidate, its name and the resources that a call used.
    """
    nearest: dict[tuple[str, str], tuple[float, str]] = {}
    for candidate, cell, resources in measured:
        for name, numbers in resources.items():
            unit = next((unit for unit in _UNITS if unit in numbers), None)
            if unit is None or "budget" not in numbers:
                continue
            share = numbers[unit] / max(numbers["budget"], _NOTHING)
            if share > nearest.get((candidate, name), (-1.0, ""))[0]:
                line = _line(name, {unit: numbers[unit], "budget": numbers["budget"]})
                nearest[candidate, name] = share, f"{candidate}: {line}, in {cell}"
    yield from (line for _, line in nearest.values())


def resource_lines(resources: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yields a line for each resource, and one for the sizes of the problem.

    Args:
        resources: as evidence has them: numbers by name.
    """
    for name, numbers in resources.items():
        if name == "problem":
            sizes = ", ".join(f"{size:,.15g} {dim}" for dim, size in numbers.items())
            yield f"measured with {sizes}, on each rank"
        else:
            yield _line(name, numbers)


def _line(name: str, numbers: Mapping[str, float]) -> str:
    used = [f"{number:,.15g} {what}" for what, number in numbers.items() if what not in ("budget", *_PHASES)]
    phases = [f"{numbers[phase]:,.15g} in {phase}" for phase in _PHASES if phase in numbers]
    budget = [f"of a budget of {numbers['budget']:,.15g}"] if "budget" in numbers else []
    in_brackets = [f"({', '.join(phases)})"] if phases else []
    return " ".join([f"{_NAMES.get(name, name)}: {', '.join(used)}", *budget, *in_brackets])
