# SPDX-License-Identifier: Apache-2.0
"""Candidates as pytest items: one for each property, layout and dtype."""
