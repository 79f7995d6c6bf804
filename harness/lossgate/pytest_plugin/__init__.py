# SPDX-License-Identifier: Apache-2.0
"""Runs candidates as pytest items, one for each cell, and gives tests ranks."""
