# SPDX-License-Identifier: Apache-2.0
"""How much of a run is shown."""

from enum import IntEnum


class Volume(IntEnum):
    """How much of a run is shown."""

    QUIET = 0
    """What does not pass, and the summary."""
    NORMAL = 1
    """Also the verdict table, and without a terminal a line for each cell."""
    VERBOSE = 2
    """All cells, what does not agree in full, all that kernels print, and what the work cost."""
