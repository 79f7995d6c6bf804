# SPDX-License-Identifier: Apache-2.0
"""Running a candidate on the ranks of a world, and putting its results together."""
