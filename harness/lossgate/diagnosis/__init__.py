# SPDX-License-Identifier: Apache-2.0
"""Finds out why a kernel disagrees: its outputs are compared with those of known mistakes."""
