# SPDX-License-Identifier: Apache-2.0
"""A property of devices, which needs no GPU."""

from lossgate.cases.case import Case
from lossgate.observe.fake_device import DIED, HUNG, has_fake_device, raised_on_fake_device
from lossgate.properties.registry import Checked, property

_RANKS = 2
"""Ranks on an axis, at most: more of them take no other branches."""
_LOST: set[str] = set()
"""The sources of candidates that hang or die on the fake device. They are not run there again."""


@property(
    "device",
    fits=lambda case: case.world.repeatable and has_fake_device() and max(case.problem.layout.sizes.values()) <= _RANKS,
    remedy="make tensors on the device of an input, as torch.zeros(n, device=x.device), and read no values on the host",
)
def device(case: Case) -> Checked:
    """On another device than the CPU, no operation meets tensors of two devices."""
    if case.candidate.source in _LOST:
        return Checked(says_nothing=True)
    found = raised_on_fake_device(case)
    if found is not None and found.message in (HUNG, DIED):
        _LOST.add(case.candidate.source)
    if found is None:
        return Checked()
    where = f"  [{found.place}]" if found.place else ""
    if found.kind == "mixed devices":
        return Checked(faults=(f"{found.message}{where}",))
    budgets = case.candidate.budgets
    if found.kind == "waits" and budgets is not None and budgets.allows_no_wait:
        return Checked(faults=(f"the host waits for the device in {found.message}{where}",))
    return Checked(says_nothing=found.kind == "other")
