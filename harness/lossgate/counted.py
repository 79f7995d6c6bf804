# SPDX-License-Identifier: Apache-2.0
"""Says in words how many of something there are."""


def counted(number: int, what: str) -> str:
    """Returns a number and a noun, with the plural's "s" where it belongs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
