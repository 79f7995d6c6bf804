# SPDX-License-Identifier: Apache-2.0
"""Whether the problems tried would have shown what a wrong kernel does."""
