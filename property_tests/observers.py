# SPDX-License-Identifier: Apache-2.0
"""What a kernel makes, by the observer of the benchmarks."""

from benchmarks.observers import Made

__all__ = ["Made"]
