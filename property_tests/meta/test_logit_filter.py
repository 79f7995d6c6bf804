# SPDX-License-Identifier: Apache-2.0
"""Problems with top-k and top-p keep clear of the edge of the filter, and of little else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lossgate import Precision
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS
from lossgate.numerics.float_formats import FLOAT_FORMATS
from lossgate.problems.batch import draw_tokens
from lossgate.specs.logit_filter import FilterOptions, passing_logits

FILTERS = [(8, 1.0), (None, 0.9), (8, 0.9), (3, 0.5), (1, 1.0), (None, 0.5)]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("std", [0.3, 3.0, 30.0])
def test_rounding_moves_nothing_across_the_edge(top_k: int | None, top_p: float, std: float) -> None:
    """Each logit of bfloat16 is rounded up to three times, by half a unit of the largest one."""
    logits = std * normal(0, 300, 97)
    options = FilterOptions(temperature=1.5, top_k=top_k, top_p=top_p)
    passing, close = passing_logits(logits, FLOAT_FORMATS["bfloat16"], options)
    assert bool(close.any())
    for seed in range(1, 9):
        most = 1.5 * torch.finfo(torch.bfloat16).eps * logits.abs().amax(1, keepdim=True)
        moved = logits + most * normal(seed, 300, 97).sign()
        differs = (passing_logits(moved, FLOAT_FORMATS["bfloat16"], options)[0] != passing).any(1)
        assert not bool((differs & ~close).any())
    assert bool(differs.any())  # without the margin they would not agree


def sorted_and_cut(logits: Tensor, top_p: float) -> Tensor:
    """Returns which logits stay in kernels that sort, such as those of Hugging Face and vLLM."""
    ordered, order = logits.sort(1, descending=True)
    p = ordered.softmax(1)
    return (p.cumsum(1) - p < top_p).gather(1, order.argsort(1))


def test_a_tie_at_the_edge_of_top_p_is_close() -> None:
    """Of logits that tie there, the reference keeps all, and a kernel that sorts only some."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -1.0], [2.0, 1.5, 1.0, -9.0, -9.0]], dtype=torch.float64)
    passing, close = passing_logits(logits, FLOAT_FORMATS["float32"], FilterOptions(top_p=0.6))
    assert ((sorted_and_cut(logits, 0.6) != passing).any(1) == close).all()
    assert close.tolist() == [True, False]


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_most_tokens_stay_trained(top_k: int | None, top_p: float, dtype: str) -> None:
    spec = SPECS["token_logprobs"]
    kernel = replace(dense_candidate(spec, "hidden"), precision={dtype: Precision()})
    chosen = {"top_k": top_k, "top_p": top_p}
    trained = drawn = 0
    for problem in Draws(kernel, dtype, "filter", 30, rich=True).all():
        kept = {name: value for name, value in problem.options.items() if name not in chosen}
        own = replace(
            problem, options=kept | {name: value for name, value in chosen.items() if value not in (None, 1.0)}
        )
        trained += int(BoundProblem(spec, own).batch.fields["mask"].sum())
        drawn += int(draw_tokens(own)["mask"].sum())
    assert trained > (0.4 if dtype == "bfloat16" else 0.6) * drawn
