# SPDX-License-Identifier: Apache-2.0
"""Evidence: JSON lines that say what was verified.

``records`` has the records and their published schema, and ``sealed`` the lines with their digests.
``writer`` writes lines, and ``source_state`` asks git about the sources. ``reader`` reads lines,
``gather`` reads files, ``redo`` concludes again, and ``summary`` drops the large parts. ``sight``
and ``differences`` compare two gatherings. Reading needs no torch.
"""
