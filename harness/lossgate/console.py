# SPDX-License-Identifier: Apache-2.0
"""The console that people read."""

from rich.console import Console

_WIDTH = 180
"""Where there is no terminal: wide enough for the tables."""


def make_console() -> Console:
    """As wide as the terminal, if there is one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)
