# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a release gate or of a report: one file that needs no network.

``page`` has what is shown, and ``render`` makes the HTML. ``entries`` and ``matrix`` put the cells
into rows and columns. ``details``, ``histograms`` and ``trend`` have what opens with a cell.
``words`` and ``origin`` have the sentences at the top.
The page's own text, style and scripts are in ``assets``.
"""

from lossgate.reports.page.page import Page
from lossgate.reports.page.render import render_page

__all__ = ["Page", "render_page"]
