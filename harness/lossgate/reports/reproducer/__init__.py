# SPDX-License-Identifier: Apache-2.0
"""Writes a script that shows a failure. It needs only torch and the kernel."""

from lossgate.reports.reproducer.script import write_script as write_script
