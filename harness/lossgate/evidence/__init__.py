# SPDX-License-Identifier: Apache-2.0
"""One JSON line for each cell, for a gate to read."""
