# SPDX-License-Identifier: Apache-2.0
"""The properties that candidates must have.

Importing this package registers all properties, agreement first.
"""

from lossgate.properties import agreement
from lossgate.properties import bad_inputs as bad_inputs
from lossgate.properties import calls as calls
from lossgate.properties import device as device
from lossgate.properties import equivalent as equivalent
from lossgate.properties import extreme_logits as extreme_logits
from lossgate.properties import frozen as frozen
from lossgate.properties import input_memory as input_memory
from lossgate.properties import masked as masked
from lossgate.properties import mixed_precision as mixed_precision
from lossgate.properties import ranks as ranks
from lossgate.properties import resources as resources
from lossgate.properties import special_problems as special_problems
from lossgate.properties import upstream as upstream
from lossgate.properties.registry import PROPERTIES, Checked, Property, find_property, property

__all__ = ["PROPERTIES", "Checked", "Property", "agreement", "find_property", "property"]
