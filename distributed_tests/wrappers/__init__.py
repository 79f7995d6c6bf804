# SPDX-License-Identifier: Apache-2.0
"""Training steps of a tiny transformer under data-parallel wrappers, for each kind of lm-head."""
