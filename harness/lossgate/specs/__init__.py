# SPDX-License-Identifier: Apache-2.0
"""What a spec is: a reference with its inputs, options and coverage goals."""
