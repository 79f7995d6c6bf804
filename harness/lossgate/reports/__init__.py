# SPDX-License-Identifier: Apache-2.0
"""Shows runs, evidence, gates and specs to people, and writes files for other programs.

``terminal`` shows a run, ``evidence_table`` evidence, ``cell_story`` one cell of it,
``changed_cells`` its changes, ``gate_text`` a gate and ``listing`` specs. ``stories`` chooses the
cells that are described, and ``describe`` describes them. ``gate_files/`` has files for other
programs, ``page/`` the HTML page, and ``reproducer/`` scripts that show a failure.
"""
