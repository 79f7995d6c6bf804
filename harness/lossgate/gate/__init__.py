# SPDX-License-Identifier: Apache-2.0
"""The release gate: evidence and a policy in, one verdict out.

``policy`` reads ``gate.toml``, ``decide`` holds evidence to it, ``verdict`` is what comes out. The
gate fails closed: what it cannot see is no pass.
"""
