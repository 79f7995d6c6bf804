# SPDX-License-Identifier: Apache-2.0
"""The word for "every value that the spec allows"."""

from typing import Final


class AnyValue:
    """The type of ``ANY``: in ``supports``, every value that the spec allows."""

    def __repr__(self) -> str:
        return "lossgate.ANY"

    def __reduce__(self) -> str:
        return "ANY"  # it stays the same object in another process


ANY: Final = AnyValue()
"""In ``supports``: every value that the spec allows."""
