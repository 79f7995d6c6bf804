# SPDX-License-Identifier: Apache-2.0
"""The files that give a gate's verdict to other programs.

Each module has one function from a ``GateVerdict`` to text: JUnit XML, SARIF, markdown for a pull
request, and an in-toto statement. The same verdict gives the same text.
"""
