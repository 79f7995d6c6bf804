# SPDX-License-Identifier: Apache-2.0
"""Kernels whose truth is known: dense candidates that are right, and a bank of known bugs."""
