# SPDX-License-Identifier: Apache-2.0
"""Layouts are read and written as text, and their ranks are numbered row by row."""

import pytest

from lossgate import Layout, UsageError
from lossgate.base.layout import layouts_up_to


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("single", Layout()),
        ("tp=2", Layout(tp=2)),
        ("tp=2,cp=3", Layout(cp=3, tp=2)),
        (" dp=4 , tp=2 ", Layout(dp=4, tp=2)),
        ("cp=1", Layout()),
    ],
)
def test_parse(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "layout 'tp': can't read 'tp'; expected 'single' or sizes of dp, cp, tp such as 'tp=2,cp=2'"),
        ("pp=2", "can't read 'pp=2'"),
        ("tp=2,tp=4", "can't read 'tp=4'"),
        ("tp=-1", "can't read 'tp=-1'"),
        ("tp=0", "layout: tp=0 is not a positive whole number"),
        ("dp=8,cp=3,tp=3", "layout dp=8,cp=3,tp=3 has 72 ranks; at most 64 can be simulated: choose a smaller one"),
    ],
)
def test_bad_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Layout.parse(text)
    assert message in str(error.value)


def test_tp_varies_fastest() -> None:
    layout = Layout(dp=2, cp=3, tp=4)
    assert [layout.coordinate(rank) for rank in (0, 1, 4, 12, 23)] == [
        {"dp": 0, "cp": 0, "tp": 0},
        {"dp": 0, "cp": 0, "tp": 1},
        {"dp": 0, "cp": 1, "tp": 0},
        {"dp": 1, "cp": 0, "tp": 0},
        {"dp": 1, "cp": 2, "tp": 3},
    ]


def test_every_layout_up_to_eight_ranks() -> None:
    layouts = list(layouts_up_to(8))
    assert len(layouts) == len(set(layouts)) == 38
    assert max(layout.ranks for layout in layouts) == 8
    assert layouts[0] == Layout()
    assert [str(layout) for layout in layouts_up_to(3, ("tp",))] == ["single", "tp=2", "tp=3"]
