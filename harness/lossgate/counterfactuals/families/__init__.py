# SPDX-License-Identifier: Apache-2.0
"""The families of counterfactuals, one file each. ``bank`` puts them together."""
