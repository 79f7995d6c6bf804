# SPDX-License-Identifier: Apache-2.0
"""Tells which known mistakes a configuration would have seen."""

from lossgate.audit.audit import Audit as Audit
from lossgate.audit.audit import audit as audit
