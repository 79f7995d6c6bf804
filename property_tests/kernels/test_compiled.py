# SPDX-License-Identifier: Apache-2.0
"""Tests of the table in kernels.md on torch.compile: which kernels compile in one graph, and how
often they do.
"""

from typing import Any, ClassVar

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck

from fused_losses import Pack, linear_cross_entropy, linear_logprobs, vocab_parallel_logprobs
from property_tests.kernels.compiled_programs import PROGRAMS, SIZES, compilations

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compile_in_one_graph_and_at_most_twice_over_all_sizes(name: str) -> None:
    """The first compilation is for one size, and the second for all others."""
    assert len(set(SIZES)) > torch._dynamo.config.recompile_limit
    for dynamic in (None, True):
        assert compilations(name, dynamic) <= 2


class _Checked(torch.fx.Interpreter):
    """Runs a graph, and checks that our operators return what they have announced."""

    operators: ClassVar = set[str]()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "fused_losses":
            opcheck(target, args, kwargs, test_utils=("test_schema", "test_faketensor"))
            self.operators.add(str(target))
        return super().call_function(target, args, kwargs)


def _checked(graph: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(_Checked(graph).run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filtered", [False, True])
def test_operators_return_what_they_announce(filtered: bool, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"top_k": 4, "top_p": 0.9} if filtered else {"entropy": True}
    labels = torch.tensor([3, 1, -100, 2, 5])

    def program(h: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        found = linear_logprobs(h, w, labels, bias=bias, vocab_rows=7, unfiltered=True, logit_range=True, **options)
        logits = vocab_parallel_logprobs(h @ w.T, labels, vocab_rows=7, **options)
        return found.logprobs.sum() + logits.logprobs.sum() + linear_cross_entropy(h, w, labels, bias=bias)

    hidden = torch.randn(5, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 9, dtype=dtype).T.requires_grad_()  # not contiguous
    bias = torch.randn(9, dtype=dtype, requires_grad=True)
    torch.compiler.reset()
    _Checked.operators.clear()
    backend = aot_autograd(fw_compiler=_checked, bw_compiler=_checked)
    torch.compile(program, backend=backend, fullgraph=True)(hidden, weight, bias).backward()
    assert len(_Checked.operators) == 5


def test_a_new_setting_compiles_anew_and_a_new_count_does_not() -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    torch.compiler.reset()
    hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    compiled = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)
    for count in range(2, 9):
        compiled(hidden, weight, labels, valid_tokens=count)
    assert graphs == 2
    for temperature in (0.5, 0.6, 0.7):
        compiled(hidden, weight, labels, valid_tokens=9, temperature=temperature)
    assert graphs == 5


def test_a_pack_reads_lengths_so_it_breaks_the_graph() -> None:
    labels = torch.tensor([[3, 1, 8], [2, 5, 7]])

    def program(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, Pack.of(torch.tensor([0, 3, 6])).labels(labels))

    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(program, backend="aot_eager")(hidden, weight), program(hidden, weight))
    torch.compiler.reset()
    with pytest.raises(Exception, match="data-dependent"):
        torch.compile(program, backend="aot_eager", fullgraph=True)(hidden, weight)
