# SPDX-License-Identifier: Apache-2.0
"""Property "agreement": the candidate computes what the reference computes."""

from lossgate.cases.case import Case
from lossgate.properties.registry import Checked, property


@property("agreement", needs_adequacy=True)
def agreement(case: Case) -> Checked:
    """Every output and gradient equals the float64 reference, up to rounding as declared."""
    return Checked(comparisons=case.comparisons)
