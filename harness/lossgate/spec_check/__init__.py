# SPDX-License-Identifier: Apache-2.0
"""Judges the reference of a spec: is it fit to judge kernels by?

``check`` runs the checks, whose ``subject`` is a spec with problems, and has those of parts.
``reference_values``, ``gradients`` and ``trial_run`` have the other checks.
"""
