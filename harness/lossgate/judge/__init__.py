# SPDX-License-Identifier: Apache-2.0
"""Judges outputs against a float64 reference, by the noise that the precision explains.

``ensemble`` makes the noise, with ``token_stage`` and ``loss_stage`` for the stages of a kernel;
``alike`` adds what random noise does not show. ``statistics`` measures deviations in it,
``comparison`` is the verdict on one output with ``power`` as its self-check, ``pooling`` the
verdict on the scale over many problems, ``explain`` the words.
"""
