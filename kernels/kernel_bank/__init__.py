# SPDX-License-Identifier: Apache-2.0
"""Kernels whose truth is known, for tests and benchmarks: right ones, and a bank of known bugs."""
