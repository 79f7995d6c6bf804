# SPDX-License-Identifier: Apache-2.0
"""The release gate holds evidence to a policy and gives one verdict.

``rules`` has the tables of ``gate.toml``, and ``policy`` reads them. ``policy_patterns`` finds the
cells that a rule asks for, and ``init_policy`` writes a first policy. ``decide`` holds evidence to
a policy: ``runs`` judges runs, ``cells`` judges cells, and ``kept_properties`` knows the properties
that a rule may ask for. ``gate_verdict`` has the classes of the verdict.

The gate fails closed: it stays closed if it cannot see that all is well.
"""
