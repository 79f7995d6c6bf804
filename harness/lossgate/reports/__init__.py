# SPDX-License-Identifier: Apache-2.0
"""What people read: the terminal, listings, failure files."""
