# SPDX-License-Identifier: Apache-2.0
"""What a candidate is held to.

One file for each property; importing this package registers all of them.
"""

from lossgate.properties import agreement
from lossgate.properties.registry import PROPERTIES, Checked, Property, find_property, property

__all__ = ["PROPERTIES", "Checked", "Property", "agreement", "find_property", "property"]
