# SPDX-License-Identifier: Apache-2.0
"""Named wrong computations: what a kernel with a known mistake returns, in float64."""
