# SPDX-License-Identifier: Apache-2.0
"""The release gate: evidence and a policy in, one verdict out.

``rules`` has the tables of ``gate.toml``, which ``policy`` reads; ``patterns`` says which cells a
rule asks for, and ``init_policy`` writes a first policy. ``decide`` holds evidence to a policy:
``runs`` has what is asked of runs, ``cells`` what is asked of cells, and ``kept_properties`` knows
the properties that a rule may ask for. ``gate_verdict`` is what comes out.

The gate fails closed: what it cannot see is no pass.
"""
