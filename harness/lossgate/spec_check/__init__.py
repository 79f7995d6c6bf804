# SPDX-License-Identifier: Apache-2.0
"""Judges the reference of a spec: is it fit to judge kernels by?"""
