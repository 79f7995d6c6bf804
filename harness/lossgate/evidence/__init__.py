# SPDX-License-Identifier: Apache-2.0
"""Evidence: JSON lines that say what was verified, written for a gate and read by it.

``records`` has the schema, ``sealed`` the lines and their digests. ``writer`` writes them;
``reader``, ``gather`` and ``redo`` read them; ``summary``, ``sight`` and ``differences`` compare
them. Reading needs no torch.
"""
