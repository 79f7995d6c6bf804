# SPDX-License-Identifier: Apache-2.0
"""docs/reference/kernels.md agrees with the code: how the metrics of each loss make the whole."""

import re

import pytest

from property_tests.kernels.losses_with_metrics import LOSSES, Batch

from .markdown import ROOT


def stated(loss: str) -> dict[str, str]:
    """Returns each metric of a loss and its reduction, from the table of the page."""
    table = re.search(
        r"\| loss \| parts make.*\n\|-.*\n((?:\|.*\n)+)", (ROOT / "docs/reference/kernels.md").read_text()
    )
    assert table
    found, current = dict[str, str](), ""
    for row in table[1].splitlines():
        name, reduction, metrics = (cell.strip() for cell in row.strip("|").split("|"))
        current = name.strip("`") or current
        if current == loss:
            found |= dict.fromkeys(re.findall(r"`(\w+)`", metrics), reduction.replace("`", ""))
    return found


@pytest.mark.parametrize("loss", dict.fromkeys(name.partition(",")[0] for name in LOSSES))
def test_metrics_and_how_they_make_the_whole(loss: str) -> None:
    """Options leave some metrics out."""
    of_code = dict[str, str]()
    for name, metrics_of in LOSSES.items():
        if name.partition(",")[0] == loss:
            of_code |= metrics_of(Batch.whole(), None).reductions
    assert stated(loss) == of_code
