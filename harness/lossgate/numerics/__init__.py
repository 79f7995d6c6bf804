# SPDX-License-Identifier: Apache-2.0
"""Float formats, and float64 arithmetic with random errors as large as those of rounding."""
