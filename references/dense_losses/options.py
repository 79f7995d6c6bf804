# SPDX-License-Identifier: Apache-2.0
"""Options that say what they mean where they are declared."""

from dataclasses import field
from typing import Any


def option(default: Any, meaning: str) -> Any:
    """Returns a field of a dataclass with a default, and its meaning in the field's metadata.

    Args:
        default: The default.
        meaning: What the option does, for people.
    """
    return field(default=default, metadata={"meaning": meaning})
