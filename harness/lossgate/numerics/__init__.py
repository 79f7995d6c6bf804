# SPDX-License-Identifier: Apache-2.0
"""Float formats, and random rounding of float64 numbers as if to them."""
