# SPDX-License-Identifier: Apache-2.0
"""Evidence: JSON lines that say what was verified, written for a gate and read by it.

``records`` has the schema, ``sealed`` the lines and their digests. ``of_result`` and ``writer``
write them, ``reader`` and ``redo`` read them. Reading needs no torch.
"""
