# SPDX-License-Identifier: Apache-2.0
"""Judges the reference of a spec: is it fit to judge kernels by?

``check`` runs the checks, whose ``subject`` is a spec with problems. ``results``, ``sums``,
``gradients`` and ``judged`` have the checks.
"""
