# SPDX-License-Identifier: Apache-2.0
"""Whether enough problems were tried: which goals they reach and which mutants they kill."""
