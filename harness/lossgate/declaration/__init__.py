# SPDX-License-Identifier: Apache-2.0
"""What a user writes: a candidate, its precision and its contract."""
