# SPDX-License-Identifier: Apache-2.0
"""Tests that hold README.md and docs/**/*.md to what the code does."""
