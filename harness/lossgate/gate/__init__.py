# SPDX-License-Identifier: Apache-2.0
"""The release gate: evidence and a policy in, one verdict out.

``policy`` reads ``gate.toml`` into the classes of ``rules``; ``patterns`` says which cells a rule
asks for, and ``init_policy`` writes a first policy. ``decide`` holds evidence to a policy: ``runs``
has what is asked of runs, ``cells`` what is asked of cells. ``property_names`` finds misspelt names
of properties, and ``not_held`` says why a cell was not held to one. ``verdict`` is what comes out.

The gate fails closed: what it cannot see is no pass.
"""
