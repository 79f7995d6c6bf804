# SPDX-License-Identifier: Apache-2.0
"""What every room needs: errors, layouts, names and spelling, and processes."""
