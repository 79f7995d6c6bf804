# SPDX-License-Identifier: Apache-2.0
"""Judges outputs against a float64 reference, by the noise that the declared precision explains.

``ensemble`` draws that noise, and ``streamed`` does so for large problems. Both run a kernel's
stages in ``logit_stage`` and ``loss_stage``. ``limits`` makes a limit of the noise for each of the
``statistics``. ``tolerance`` holds a result to the limits, and checks that it would have seen
planted errors. ``comparison`` is the outcome for one output of one problem, ``pooled_output``
that of many problems, and ``explain`` puts both into words.
"""
