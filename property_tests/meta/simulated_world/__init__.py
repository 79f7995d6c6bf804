# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulated world: what works in it, and how it reports misuse."""
