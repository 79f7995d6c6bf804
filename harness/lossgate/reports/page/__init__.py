# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a release gate or of a report: one file that needs no network.

``entries`` has what is shown, and ``render`` makes the HTML. ``cell_rows`` puts the cells into rows
and columns. ``details`` and ``histograms`` have what opens with a cell, and ``headline`` the
sentences at the top.
The page's own text, style and scripts are in ``assets``.
"""

from lossgate.reports.page.entries import Page
from lossgate.reports.page.render import render_page

__all__ = ["Page", "render_page"]
