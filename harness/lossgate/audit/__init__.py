# SPDX-License-Identifier: Apache-2.0
"""What a configuration would have seen: which known mistakes its problems show."""

from lossgate.audit.audit import Audit as Audit
from lossgate.audit.audit import audit as audit
