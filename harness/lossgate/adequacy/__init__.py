# SPDX-License-Identifier: Apache-2.0
"""Whether the problems tried are enough: the coverage goals that they reach, and the option mutants
that they kill.
"""
