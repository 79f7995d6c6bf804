# SPDX-License-Identifier: Apache-2.0
"""Tests of the judge: correct kernels of every declared precision agree, each bug disagrees, and
every check can fail.
"""
