# SPDX-License-Identifier: Apache-2.0
"""The property ``device``, which needs no GPU."""

from collections import Counter

from lossgate.cases.case import Case
from lossgate.observe.fake_device import DIED, HUNG, KernelRaised, has_fake_device, raised_on_fake_device
from lossgate.properties.registry import Checked, property

_RANKS = 2
"""The most ranks on an axis. With more ranks, kernels take no other branches."""
_TRIES = 3
"""The number of problems on which a candidate is tried that can't run on the fake device."""
_FAILED: Counter[str] = Counter()
"""How often each candidate could not run there, by its source. A hang or a crash counts as
``_TRIES`` failures."""
_RAN: set[str] = set()
"""The sources of candidates that ran there on some problem."""


@property(
    "device",
    fits=lambda case: case.world.repeatable and has_fake_device() and max(case.problem.layout.sizes.values()) <= _RANKS,
    remedy="make tensors on the device of an input, as torch.zeros(n, device=x.device), and read no values on the host",
)
def device(case: Case) -> Checked:
    """On a device other than the CPU, no operation mixes tensors of two devices."""
    source = case.candidate.source
    if _FAILED[source] >= _TRIES:
        return Checked(says_nothing=True)
    found = raised_on_fake_device(case)
    _remember(source, found)
    if found is None:
        return Checked()
    where = f"  [{found.place}]" if found.place else ""
    if found.kind == "mixed devices":
        return Checked(faults=(f"{found.message}{where}",))
    budgets = case.candidate.budgets
    if found.kind == "waits" and budgets is not None and budgets.allows_no_wait:
        return Checked(faults=(f"the host waits for the device in {found.message}{where}",))
    return Checked(says_nothing=found.kind == "other")


def _remember(source: str, found: KernelRaised | None) -> None:
    """Counts the failures of a candidate that has not run there yet, and each hang or crash."""
    if found is None or found.kind != "other":
        _RAN.add(source)
    elif found.message in (HUNG, DIED):
        _FAILED[source] += _TRIES
    elif source not in _RAN:
        _FAILED[source] += 1
