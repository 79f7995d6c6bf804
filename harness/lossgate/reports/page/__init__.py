# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a release gate or of a report: one file that needs no network.

``entries`` has the cells that are shown, in rows and columns, and ``render`` makes the HTML.
``details`` has the data of a cell that is opened, and ``headline`` the sentences at the top. Text,
style and scripts of the page are in ``assets``.
"""

from lossgate.reports.page.entries import Page
from lossgate.reports.page.render import render_page

__all__ = ["Page", "render_page"]
