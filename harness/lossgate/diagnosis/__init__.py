# SPDX-License-Identifier: Apache-2.0
"""Why a kernel disagrees: what it returned, compared with what known mistakes return."""
