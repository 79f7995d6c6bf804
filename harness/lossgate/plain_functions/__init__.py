# SPDX-License-Identifier: Apache-2.0
"""Functions that know nothing of lossgate, as candidates."""
