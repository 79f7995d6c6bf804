# SPDX-License-Identifier: Apache-2.0
"""Says what a call used, beside the budgets that the candidate declares."""

from collections.abc import Iterator, Mapping

_PHASES = ("forward", "backward")
_NAMES = {
    "largest_tensor": "largest tensor",
    "saved": "saved for backward",
    "bytes": "brought to collectives",
    "host_waits": "host waits",
}


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
