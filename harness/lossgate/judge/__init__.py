# SPDX-License-Identifier: Apache-2.0
"""Judges outputs against a float64 reference, by the noise that the precision explains.

``ensemble`` makes the noise, ``statistics`` measures deviations in it, ``comparison`` is the
verdict on one output with ``power`` as its self-check, ``pooling`` the verdict on the scale over
many problems, ``explain`` the words.
"""
