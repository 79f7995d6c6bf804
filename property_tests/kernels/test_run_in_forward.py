# SPDX-License-Identifier: Apache-2.0
"""Tests of ``run_in_forward``, and of what a tiled head does with hooks. Wrappers on real ranks are
tested in ``distributed_tests/test_wrappers.py``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_losses import linear_cross_entropy, run_in_forward, tiled_token_logprobs

WIDTH, VOCAB = 4, 9


class Wrapper(nn.Module):
    """Doubles what the wrapped module is given, as wrappers may cast it, and counts calls."""

    __module__ = "deepspeed.runtime.engine"  # wrappers are recognised by their classes

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.module(2 * x)


class Skips(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return x


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(7, WIDTH, generator=generator), torch.randint(VOCAB, (7,), generator=generator)


def test_wrappers_and_hooks_act_once_and_the_module_is_as_before() -> None:
    inner = nn.Linear(WIDTH, VOCAB)
    wrapper, fired = Wrapper(Wrapper(inner)), list[str]()
    inner.register_forward_pre_hook(lambda *_: fired.append("before"))
    inner.register_forward_hook(lambda *_: fired.append("after"))

    def function(module: nn.Module, x: Tensor, y: Tensor | None = None) -> Tensor:
        assert module is inner
        assert fired == ["before"]
        # The function may use the module's own forward.
        return inner.forward(x).sum()

    x = torch.ones(3, WIDTH)
    found = run_in_forward(wrapper, function, x)
    torch.testing.assert_close(found, inner(4 * x).sum())
    assert fired[:2] == ["before", "after"]
    assert wrapper.calls == 1
    assert "forward" not in vars(inner)


def test_an_instances_own_forward_is_put_back_also_after_an_error() -> None:
    def own(x: Tensor) -> Tensor:
        return 5 * x

    def fails(module: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("of the function")

    module = nn.Linear(WIDTH, WIDTH)
    module.forward = own
    with pytest.raises(KeyError, match="of the function"):
        run_in_forward(module, fails, torch.ones(1))
    assert float(module(torch.ones(1))) == 5

    module = nn.Linear(WIDTH, WIDTH)
    module.register_forward_pre_hook(lambda *_: fails(module, torch.ones(1)))  # before the function
    with pytest.raises(KeyError, match="of the function"):
        run_in_forward(module, fails, torch.ones(1))
    assert "forward" not in vars(module)


def test_a_wrapper_that_does_not_call_its_module_is_named() -> None:
    with pytest.raises(RuntimeError, match="module Skips: did not call the Linear that it wraps; pass the module"):
        run_in_forward(Skips(nn.Linear(WIDTH, VOCAB)), lambda _, x: x, torch.ones(1))


def test_a_part_that_is_called_module_makes_no_wrapper() -> None:
    """Its head's forward is what comes before and after it, such as a soft-cap."""

    class SoftCapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(WIDTH, VOCAB)

        def forward(self, hidden: Tensor) -> Tensor:
            return 2 * torch.tanh(self.module(hidden) / 2)

    hidden, labels = tokens()
    for head in (SoftCapped(), nn.Sequential(SoftCapped(), nn.Identity())):
        expected = torch.log_softmax(head(hidden), 1).gather(1, labels[:, None]).squeeze(1)
        torch.testing.assert_close(tiled_token_logprobs(head, hidden, labels).logprobs, expected)


def test_hooks_that_add_keyword_arguments() -> None:
    module = nn.Linear(WIDTH, VOCAB)
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, {"factor": 3}), with_kwargs=True)
    found = run_in_forward(module, lambda _, x, factor: factor * x, torch.ones(1))
    assert float(found) == 3


def test_several_results_and_gradients_of_inputs() -> None:
    x = torch.ones(2, WIDTH, requires_grad=True)
    first, second = run_in_forward(Wrapper(nn.Linear(WIDTH, WIDTH)), lambda _, x: (x, 3 * x), x)
    (first + second).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(8).all()


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper], ids=["outside", "inside"])
def test_compiled_modules_run_the_function_as_it_is(wrap: Any) -> None:
    compiled = wrap(torch.compile(nn.Linear(WIDTH, VOCAB), backend="eager"))
    hidden, labels = tokens()
    for _ in range(2):
        seen = list[int]()

        def function(module: nn.Module, x: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(x))
            return module.forward(x)

        assert run_in_forward(compiled, function, hidden).shape == (7, VOCAB)
        assert seen == [7]
    assert tiled_token_logprobs(compiled, hidden, labels, tiles=2).logprobs.shape == (7,)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so
def test_a_kernel_compiles_whole_although_weights_are_checked() -> None:
    torch.compiler.reset()
    hidden, labels = tokens()
    weight = torch.ones(VOCAB, WIDTH).cumsum(0).requires_grad_()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    for given in (weight, 2 * weight):  # a parameter, and a weight that is computed from one
        torch.testing.assert_close(compiled(hidden, given, labels), linear_cross_entropy(hidden, given, labels))
    torch.compiler.reset()


def test_torch_may_refuse_where_a_model_was_compiled_with_fullgraph() -> None:
    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(WIDTH, VOCAB)), backend="eager", fullgraph=True)
    hidden, _ = tokens()
    compiled(hidden)
    with pytest.raises(RuntimeError, match=r"fullgraph=True|torch.compiler.disable"):
        run_in_forward(compiled, lambda module, x: module.forward(x), hidden)
    torch.compiler.reset()


def test_a_forward_hook_that_would_get_log_probabilities_is_refused() -> None:
    """The way out is to compute in the head's forward what the hook computes."""

    class Halved(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) / 2

    def halve(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return logits / 2

    hidden, labels = tokens()
    hooked, head = nn.Linear(WIDTH, VOCAB), Halved(WIDTH, VOCAB)
    head.load_state_dict(hooked.state_dict())
    hooked.register_forward_hook(halve)
    for wrapped in (hooked, Wrapper(hooked)):
        with pytest.raises(ValueError, match=r"lm_head: its hook .*halve would be given log-probabilities in place of"):
            tiled_token_logprobs(wrapped, hidden, labels)
    expected = torch.log_softmax(hooked(hidden), 1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(tiled_token_logprobs(head, hidden, labels).logprobs, expected)

    quantised = nn.Linear(WIDTH, VOCAB)
    halve.__module__ = "torch.ao.quantization.quantize"  # whose hooks quantise logits
    quantised.register_forward_hook(halve)
    with pytest.raises(ValueError, match=r"lm_head: its hook .*halve would be given log-probabilities"):
        tiled_token_logprobs(quantised, hidden, labels)

    handle = nn.modules.module.register_module_forward_hook(halve)
    try:
        with pytest.raises(ValueError, match=r"lm_head: its hook .*halve would be given log-probabilities"):
            tiled_token_logprobs(head, hidden, labels)
    finally:
        handle.remove()

    watched = nn.Linear(WIDTH, VOCAB)
    watched.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"lm_head: its hook .*lambda.* would be given log-probabilities"):
        tiled_token_logprobs(watched, hidden, labels)


def test_hooks_of_a_heads_parts_see_every_tile() -> None:
    head, rows = nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Identity()), list[int]()
    head[0].register_forward_hook(lambda _, inputs, logits: rows.append(len(logits)))
    hidden, labels = tokens()
    tiled_token_logprobs(head, hidden, labels, tiles=3).logprobs.sum().backward()
    assert rows == [2, 2, 3] * 2


def test_dropout_is_refused_where_there_are_gradients() -> None:
    """Backward would draw other numbers than forward. Both ways out work."""
    hidden, labels = tokens()
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, VOCAB))
    with pytest.raises(ValueError, match=r"lm_head: its 0 drops out with probability 0.5.* \(lora_dropout=0\), call"):
        tiled_token_logprobs(head, hidden, labels)
    with torch.no_grad():
        tiled_token_logprobs(head, hidden, labels)
    head[0].eval()
    without = nn.Sequential(nn.Dropout(0.0), head[1])
    found = [tiled_token_logprobs(each, hidden, labels).logprobs for each in (head, without)]
    torch.testing.assert_close(*found)


def test_mixed_precision_of_accelerate_must_be_entered() -> None:
    """Accelerate sets the instance's forward, which ``run_in_forward`` sets aside."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(nn.Linear(WIDTH, WIDTH))
    assert "forward" in vars(model)

    def product(module: nn.Module, x: Tensor) -> Tensor:
        return x @ module.weight.T

    x = torch.ones(1, WIDTH)
    assert run_in_forward(model, product, x).dtype is torch.float32
    with accelerator.autocast():
        assert run_in_forward(model, product, x).dtype is torch.bfloat16
    assert "forward" in vars(model)
