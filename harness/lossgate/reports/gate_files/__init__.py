# SPDX-License-Identifier: Apache-2.0
"""The files that give a gate's verdict to other programs.

JUnit XML, SARIF, markdown for a pull request, and an in-toto statement have a module each, with one
function from a ``GateVerdict`` to text. The same verdict gives the same text. ``findings`` has what
they and the screen have in common, and ``source_places`` finds the lines to which SARIF points.
"""
