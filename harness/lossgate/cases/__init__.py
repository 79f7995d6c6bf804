# SPDX-License-Identifier: Apache-2.0
"""Draws problems for a candidate, makes their tensors, runs the ranks, and compares the results."""
