# SPDX-License-Identifier: Apache-2.0
"""Few layouts cover what differs between all."""

from dataclasses import replace
from typing import Any

import pytest

from lossgate import Layout, candidate
from lossgate.base.layout import layouts_up_to
from lossgate.engine.matrix import covering, layouts_and_dtypes
from lossgate.engine.plan import plan
from lossgate.engine.settings import PROFILES, Settings


@candidate("nll", head="logits", axes=("dp", "cp", "tp"), dtypes=("bfloat16", "float32", "float16"))
def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
    return inputs.logits.sum()


def names(layouts: list[Layout]) -> str:
    return " ".join(map(str, layouts))


COVERING = {
    ("dp cp tp", 8): "single dp=2 cp=2 tp=2 dp=2,cp=3 dp=3,tp=2 cp=2,tp=3 dp=2,cp=2,tp=2",
    ("dp cp tp", 4): "single dp=2 cp=2 tp=2 dp=3 cp=3 tp=3 dp=2,cp=2 dp=2,tp=2 cp=2,tp=2",
    ("dp cp tp", 2): "single dp=2 cp=2 tp=2",
    ("dp cp", 8): "single dp=2 cp=2 dp=2,cp=3",
    ("tp", 8): "single tp=2 tp=3",
    ("", 8): "single",
}


@pytest.mark.parametrize(("axes", "ranks"), COVERING)
def test_layouts_that_cover_what_differs(axes: str, ranks: int) -> None:
    possible = list(layouts_up_to(ranks, axes.split()))
    assert names(covering(possible)) == COVERING[axes, ranks]


def by_dtype(settings: Settings, own: object = kernel) -> dict[str, list[Layout]]:
    found: dict[str, list[Layout]] = {}
    for layout, dtype in layouts_and_dtypes(own, settings):
        found.setdefault(dtype, []).append(layout)
    return found


def test_the_finest_dtype_has_them_and_one_more_and_others_have_three() -> None:
    found = by_dtype(Settings(ranks=8))
    assert {dtype: len(layouts) for dtype, layouts in found.items()} == {"bfloat16": 3, "float32": 9, "float16": 3}
    assert {Layout(), Layout(2, 2, 2)} <= {*found["bfloat16"]} & {*found["float16"]}
    assert set(covering(list(layouts_up_to(8)))) <= {*found["float32"]}


def test_the_first_dtype_has_them_where_float32_is_not_verified() -> None:
    found = by_dtype(Settings(ranks=8, dtypes=("float16", "bfloat16")))
    assert [len(layouts) for layouts in found.values()] == [9, 3]


def test_many_candidates_see_many_layouts() -> None:
    kernels = [replace(kernel, name=f"kernel {number}") for number in range(60)]
    seen = {layout for one in kernels for layout, _ in layouts_and_dtypes(one, Settings(ranks=8))}
    assert len(seen) > 0.9 * len(list(layouts_up_to(8)))


def test_another_seed_takes_another_layout() -> None:
    assert len({names(by_dtype(Settings(ranks=8, seed=seed))["float32"]) for seed in range(8)}) > 4


@pytest.mark.parametrize(
    ("axes", "layouts"), [((), "single"), (("cp",), "single cp=2"), (("dp", "tp"), "single dp=3,tp=2")]
)
def test_a_quick_look_is_one_rank_and_the_layout_that_splits_most_axes_in_one_dtype(
    axes: tuple[str, ...], layouts: str
) -> None:
    found = by_dtype(PROFILES["quick"], replace(kernel, axes=axes))
    assert {dtype: names(of_dtype) for dtype, of_dtype in found.items()} == {"float32": layouts}
    named = by_dtype(replace(PROFILES["quick"], layouts=("tp=2",), dtypes=("float16", "bfloat16")))
    assert {dtype: names(of_dtype) for dtype, of_dtype in named.items()} == {"float16": "tp=2", "bfloat16": "tp=2"}


def test_the_full_matrix_and_named_layouts_are_all_in_every_dtype() -> None:
    assert len(plan([kernel], Settings(ranks=8, matrix="full"))) == 3 * len(list(layouts_up_to(8)))
    named = by_dtype(Settings(layouts=("tp=4", "dp=3", "tp=4")))
    assert {names(layouts) for layouts in named.values()} == {"tp=4 dp=3"}
