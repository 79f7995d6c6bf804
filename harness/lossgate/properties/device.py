# SPDX-License-Identifier: Apache-2.0
"""A property of devices, which needs no GPU."""

from lossgate.cases.case import Case
from lossgate.observe.fake_device import has_fake_device, raised_on_fake_device
from lossgate.properties.registry import Checked, property

_RANKS = 2
"""Ranks on an axis, at most: more of them take no other branches."""


@property(
    "device",
    fits=lambda case: case.world.repeatable and has_fake_device() and max(case.problem.layout.sizes.values()) <= _RANKS,
    remedy="make tensors on the device of an input: torch.zeros(n, device=x.device)",
)
def device(case: Case) -> Checked:
    """On another device than the CPU, no operation meets tensors of two devices."""
    found = raised_on_fake_device(case)
    if found is None:
        return Checked()
    where = f"  [{found.place}]" if found.place else ""
    if found.kind == "mixed devices":
        return Checked(faults=(f"{found.message}{where}",))
    if found.kind == "waits" and _declares_no_wait(case):
        return Checked(faults=(f"the host waits for the device in {found.message}{where}",))
    return Checked(says_nothing=found.kind == "other")


def _declares_no_wait(case: Case) -> bool:
    budgets = case.candidate.budgets
    return budgets is not None and budgets.host_waits == "0"
