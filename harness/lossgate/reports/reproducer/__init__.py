# SPDX-License-Identifier: Apache-2.0
"""Writes a failure as one file of Python that needs only torch and the kernel."""

from lossgate.reports.reproducer.script import write_script as write_script
