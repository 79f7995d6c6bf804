# SPDX-License-Identifier: Apache-2.0
"""A problem bound to a candidate and a world."""
