# SPDX-License-Identifier: Apache-2.0
"""Judges a candidate's outputs: against a float64 reference, by the noise that its declared precision may have.

``grids`` and ``ensemble`` make the noise, ``statistics`` measures deviations in it, ``agreement`` is the verdict on one
problem with ``power`` as its self-check, ``pooling`` the verdict on the scale over many, ``explain`` the words.
"""
