# SPDX-License-Identifier: Apache-2.0
"""Operations that round get noise, all others none, and nothing that an operation reads changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lossgate.numerics.float_formats import FLOAT32, FLOAT_FORMATS
from lossgate.numerics.noise import Noise
from lossgate.numerics.round_every_operation import RoundEveryOperation
from lossgate.numerics.torch_operations import SPELLED_OUT

Operation = Callable[[Tensor], Any]

UNIT = FLOAT32.unit
INDEX = torch.tensor([[0, 2, 1], [3, 3, 0]]).repeat(3, 1)


def numbers() -> Tensor:
    """Returns ``[6, 4]`` numbers, none of which float32 holds exactly."""
    return torch.linspace(0.3, 2.9, 24, dtype=torch.float64).sin().reshape(6, 4) + 0.1


def rounded(operation: Operation, x: Tensor, seed: int = 0) -> Any:
    with RoundEveryOperation(Noise(seed), FLOAT32):
        return operation(x)


VIEWS: dict[str, Operation] = {
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "split": lambda x: x.split(2),
    "split_with_sizes": lambda x: x.split([1, 5]),
    "chunk": lambda x: x.chunk(3, 1),
    "tensor_split": lambda x: x.tensor_split(4),
    "unbind": lambda x: x.unbind(1),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 3, 1),
    "narrow": lambda x: x.narrow(0, 1, 3),
    "select": lambda x: x[2],
    "slice": lambda x: x[1:5:2, 1:],
    "view": lambda x: x.view(4, 6),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "expand": lambda x: x[:, :1].expand(6, 5),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "unsqueeze": lambda x: x[None],
    "movedim": lambda x: x.movedim(0, 1),
    "as_strided": lambda x: x.as_strided((3, 2), (4, 1)),
    "detach": lambda x: x.detach(),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "t in place": lambda x: x.detach().t_(),
    "transpose in place": lambda x: x.detach().transpose_(0, 1),
    "squeeze in place": lambda x: x[:, :1].squeeze_(1),
    "unsqueeze in place": lambda x: x.detach().unsqueeze_(0),
    "as_strided in place": lambda x: x.detach().as_strided_((3, 2), (4, 1)),
}
EXACT: dict[str, Operation] = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "sort": lambda x: x.sort(1),
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: x.topk(2, 1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "median": lambda x: x.median(1),
    "mode": lambda x: x.mode(1),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: x.cummin(1),
    "max": lambda x: x.max(1),
    "min over all": lambda x: x.min(),
    "amax": lambda x: x.amax(1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "clamp": lambda x: x.clamp(0.2, 0.9),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "relu": lambda x: F.relu(x),
    "hardtanh": lambda x: F.hardtanh(x),
    "abs": lambda x: x.abs(),
    "neg": lambda x: -x,
    "sign": lambda x: x.sign(),
    "floor": lambda x: x.floor(),
    "trunc": lambda x: x.trunc(),
    "nan_to_num": lambda x: x.nan_to_num(0.0),
    "copysign": lambda x: x.copysign(-x),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "gather": lambda x: x.gather(1, INDEX),
    "index": lambda x: x[torch.tensor([3, 1])],
    "index_select": lambda x: x.index_select(0, torch.tensor([3, 1])),
    "take": lambda x: x.take(torch.tensor([3, 1])),
    "masked_select": lambda x: x.masked_select(x > 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "rot90": lambda x: x.rot90(),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tril": lambda x: x.tril(),
    "pad": lambda x: F.pad(x, (1, 1)),
    "pad by reflection": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "diag_embed": lambda x: x.diag_embed(),
    "scatter": lambda x: x.scatter(1, INDEX, 0.5),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x[1]),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[1:2]),
    "scatter_reduce amax": lambda x: x.scatter_reduce(1, INDEX, x[:, :3], "amax"),
    "zeros_like": lambda x: torch.zeros_like(x),
    "full_like": lambda x: torch.full_like(x, 0.3),
    "embedding": lambda x: F.embedding(torch.tensor([1, 2]), x),
    "filled in place": lambda x: x.clone().fill_(0.3),
    "copied in place": lambda x: torch.zeros_like(x).copy_(x),
    "masked in place": lambda x: x.clone().masked_fill_(x > 0.5, 0.3),
    "largest by norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "smallest by norm": lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=1),
    "counted by norm": lambda x: torch.linalg.vector_norm(x, 0, dim=1),
    "compared": lambda x: x > x.flip(0),
    "compared in place": lambda x: x.clone().gt_(x.flip(0)),
    "compared with a number in place": lambda x: x.clone().gt_(0.5),
    "compared into floats": lambda x: torch.gt(x, x.flip(0), out=torch.empty_like(x)),
    "both true in place": lambda x: x.clone().logical_and_(x > 0.5),
    "copied by a view": lambda x: torch.squeeze_copy(x[:, :1]),
    "unique": lambda x: x.unique(),
    "put": lambda x: x.put(torch.tensor([3, 1]), x[0, :2]),
    "relu's gradient": lambda x: torch.ops.aten.threshold_backward(x, x, 0.5),
    "of nothing": lambda x: x[:, :0].log_softmax(1),
}
ROUNDING: dict[str, Operation] = {
    "add": lambda x: x + 0.7,
    "mul": lambda x: x * x.flip(0),
    "div": lambda x: x / 3,
    "exp": lambda x: x.exp(),
    "log1p": lambda x: x.abs().log1p(),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "mm": lambda x: x @ x.T,
    "mv": lambda x: x @ x[0],
    "bmm": lambda x: torch.bmm(x[None], x.T[None]),
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.T),
    "logsumexp": lambda x: x.logsumexp(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "softmax": lambda x: x.softmax(1),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0]), x[1:3]),
    "scatter_add": lambda x: x.scatter_add(1, INDEX, x[:, :3]),
    "index_put, accumulated": lambda x: x.index_put((torch.tensor([0, 0]),), x[1:3], accumulate=True),
    "scatter_reduce sum": lambda x: x.scatter_reduce(1, INDEX, x[:, :3], "sum"),
    "scatter with reduce": lambda x: x.scatter(1, INDEX, 0.3, reduce="multiply"),
    "added in place": lambda x: x.clone().add_(0.7),
    "added up in place": lambda x: x.clone().index_add_(0, torch.tensor([0, 0]), x[1:3]),
    "written by out=": lambda x: torch.mul(x, x.flip(0), out=torch.empty_like(x)),
    "nansum": lambda x: x.nansum(1),
    "nansum of all": lambda x: x.nansum((0, 1), keepdim=True),
    "norm": lambda x: x.norm(dim=1, keepdim=True),
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 1)),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "var": lambda x: x.var(1),
    "var without correction": lambda x: x.var(correction=0, dim=0, keepdim=True),
    "var of all": lambda x: x.var()[None],
    "var_mean": lambda x: torch.var_mean(x, dim=1),
    "std": lambda x: x.std(1, unbiased=False),
    "std_mean": lambda x: torch.std_mean(x, dim=1, keepdim=True),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "scatter_reduce mean": lambda x: x.scatter_reduce(1, INDEX, x[:, :3], "mean"),
    "put, accumulated": lambda x: x.put(torch.tensor([3, 3]), x[0, :2], accumulate=True),
    "addmm, subtracted": lambda x: torch.addmm(x[:, :1], x, x.T, beta=0.3, alpha=-1),
    "index_add, subtracted": lambda x: x.index_add(0, torch.tensor([0, 0]), x[1:3], alpha=-1),
    "sum written by out=": lambda x: torch.sum(x, 1, out=torch.empty(6, dtype=x.dtype)),
    "mm written by out=": lambda x: torch.mm(x, x.T, out=torch.empty(6, 6, dtype=x.dtype)),
    "cumsum in place": lambda x: x.clone().cumsum_(1),
    "logit": lambda x: (x.abs() / 2).logit(1e-3),
    "silu": lambda x: F.silu(x),
}


@pytest.mark.parametrize("name", [*VIEWS, *EXACT, *ROUNDING])
def test_what_an_operation_reads_stays_as_it_is(name: str) -> None:
    x, operation = numbers(), {**VIEWS, **EXACT, **ROUNDING}[name]
    rounded(operation, x)
    assert torch.equal(x, numbers())


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_views(name: str) -> None:
    x = numbers()
    for view, plain in zip(tree_leaves(rounded(VIEWS[name], x)), tree_leaves(VIEWS[name](x)), strict=True):
        assert torch.equal(view, plain)
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", EXACT)
def test_what_does_not_round_is_exact(name: str) -> None:
    found, plain = rounded(EXACT[name], numbers()), EXACT[name](numbers())
    for one, other in zip(tree_leaves(found), tree_leaves(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ROUNDING)
def test_what_rounds_is_off_by_about_a_unit(name: str) -> None:
    """Sums and products of a few terms are off by a few units of their largest entry."""
    plain = tree_leaves(ROUNDING[name](numbers()))
    found = [tree_leaves(rounded(ROUNDING[name], numbers(), seed)) for seed in range(20)]
    for i, exact in enumerate(plain):
        errors = torch.stack([one[i] - exact for one in found])
        assert float(errors.abs().max()) > 0.2 * UNIT * float(exact.abs().max())
        assert float(errors.abs().max()) < 8 * UNIT * float(exact.abs().max())


def test_an_operation_in_place_rounds_what_it_has_written() -> None:
    x = numbers()
    with RoundEveryOperation(Noise(0), FLOAT32):
        returned = x.add_(0.7)
        x[0].mul_(3.0)
    assert returned is x
    assert bool((x != numbers() + 0.7).any(1).all())
    assert torch.allclose(x[0], 3 * (numbers()[0] + 0.7), rtol=1e-6)


INFINITE: dict[str, Operation] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(1),
    "mm": lambda x: x @ torch.ones(4, 2, dtype=x.dtype),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(3, 4, dtype=torch.int64), x),
    "nansum": lambda x: x.nansum(1),
    "norm": lambda x: x.norm(dim=1),
    "expm1": lambda x: x.expm1(),
    "logaddexp": lambda x: torch.logaddexp(x, x),
    "logsumexp": lambda x: x.logsumexp(1),
    "comparison": lambda x: torch.cat([x > 0.5, x < 0.5, x == 0.5, x == x.flip(0)]),
    "comparison with a tensor": lambda x: torch.cat([op(x, torch.zeros_like(x)) for op in (torch.gt, torch.eq)]),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", INFINITE)
def test_what_is_infinite_stays_so(name: str, seed: int) -> None:
    x = torch.ones(3, 4, dtype=torch.float64)
    x[0, 0], x[1, 0] = -torch.inf, torch.inf
    found, plain = rounded(INFINITE[name], x, seed), INFINITE[name](x)
    assert torch.equal(found.isfinite(), plain.isfinite())
    assert torch.equal(found[~plain.isfinite()], plain[~plain.isfinite()])
    assert torch.allclose(found.double(), plain.double())


def test_numbers_that_are_equal_up_to_rounding_are_a_tie() -> None:
    x = numbers()
    near, apart = x * (1 + 4 * UNIT), x * (1 + 20 * UNIT)
    for operation, tie in ((torch.gt, False), (torch.lt, False), (torch.ge, True), (torch.eq, True)):
        assert bool((rounded(lambda x, op=operation: op(near, x), x) == tie).all())
    assert bool((rounded(lambda x: apart.abs() > x.abs(), x)).all())


def test_the_largest_takes_the_whole_gradient_beside_infinities() -> None:
    """Backward of ``amax`` compares with the largest, which what is masked by -inf is not."""

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        masked = torch.where(torch.tensor([True, False, True, False]), x, -torch.inf)
        return torch.autograd.grad(masked.amax(1).sum(), x)[0]

    assert torch.allclose(rounded(gradient, numbers()), gradient(numbers()), rtol=4 * UNIT, atol=0)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: (x.t().split(2)[1] * x.chunk(2, 1)[0].t()).sum() + x.diagonal().square().sum(),
    "unfold": lambda x: x.unfold(0, 3, 2).square().sum(),
    "sort and topk": lambda x: (x.sort(1).values * torch.arange(4.0)).sum() + x.topk(2, 1).values.square().sum(),
    "log_softmax": lambda x: x.log_softmax(1)[:, 0].sum(),
    "softmax": lambda x: (x.softmax(1) * torch.arange(4.0)).sum(),
    "logsumexp": lambda x: x.logsumexp(1).square().sum(),
    "tanh and sigmoid": lambda x: (x.tanh() * x.sigmoid()).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_gradients_are_off_by_rounding_alone(name: str, mapped: bool) -> None:
    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        function = GRADIENTS[name]
        values = torch.vmap(function)(x) if mapped else function(x)
        return torch.autograd.grad(values.sum(), x)[0]

    x = torch.stack([numbers()] * 8) if mapped else numbers()
    found, plain = rounded(gradient, x), gradient(x)
    assert torch.allclose(found, plain, rtol=0, atol=32 * UNIT * float(plain.abs().max()))
    assert not torch.equal(found, plain)


CANCELLING: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: x.log_softmax(1)[:, 0],
    "log_softmax, weighted": lambda x: (x.log_softmax(1) * weights(x)).sum(1),
    "softmax": lambda x: (x.softmax(1) * weights(x)).sum(1),
    "logsumexp": lambda x: x.logsumexp(1) - x[:, 0],
    "logaddexp": lambda x: torch.logaddexp(x[:, 3], x[:, 3]),
    "addcmul": lambda x: torch.addcmul(-x[:, 1] * x[:, 2], x[:, 1], x[:, 2] + 1e-3),
    "lerp": lambda x: torch.lerp(x[:, 1], 3.7 * x[:, 2], 0.3) - 0.7 * x[:, 1] - 1.1 * x[:, 2],
    "logcumsumexp": lambda x: x.logcumsumexp(1)[:, 1] - x[:, 0],
    "var": lambda x: (x + 1000).var(1),
    "norm": lambda x: x.norm(dim=1) - x[:, 0],
    "sigmoid": lambda x: x.sigmoid().sum(1),
    "tanh": lambda x: x.tanh().sum(1),
    "silu": lambda x: F.silu(x - 20).sum(1),
    "logit": lambda x: (0.5 + 1e-4 * x[:, 1]).logit(),
}
"""Functions of ``[n, 4]``, whose first entry is large and whose last is -log 2. Values or gradients
are small differences."""


def weights(x: Tensor) -> Tensor:
    """Returns weights whose sum is nearly 0."""
    return torch.tensor([0.0, 0.7, 0.4, -1.1 + 1e-4], dtype=x.dtype)


@pytest.mark.parametrize("side", ["value", "gradient"])
@pytest.mark.parametrize("name", CANCELLING)
def test_noise_covers_what_float32_gets_wrong_where_numbers_cancel(name: str, side: str) -> None:
    """The standard deviation of the noise is neither far below nor far above real errors.

    Factors of 1/3 and 30 leave room for the luck of a few hundred draws.
    """
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0], x[:, 3] = x[:, 0] + 9.0, -0.6931472  # -log 2

    def run(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        value = CANCELLING[name](at)
        return value.detach().double() if side == "value" else torch.autograd.grad(value.sum(), at)[0][:, 0].double()

    exact = run(x.double())
    real = (run(x) - exact).square().mean().sqrt()
    noise = torch.stack([rounded(run, x.double(), seed) - exact for seed in range(8)]).square().mean().sqrt()
    assert real / 3 <= noise <= 30 * real


@pytest.mark.parametrize("mapped", [False, True], ids=["one number", "one of each row"])
def test_what_is_added_to_many_numbers_is_rounded_alike(mapped: bool) -> None:
    """Of ``x + 0.1`` with x from 8 to 16, float32 drops the same part for each x."""
    x = 12 + torch.randn(5, 2000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    more = torch.full((5, 1) if mapped else (), 0.1)

    def mean_error(found: Tensor, added: Tensor) -> Tensor:
        return (found - x.double() - added).mean(1).abs().mean()

    def noise_of(added: Tensor) -> Tensor:
        runs = [rounded(lambda x: added + x, x.double(), seed) for seed in range(8)]
        return torch.stack([mean_error(run, added) for run in runs]).mean()

    real = mean_error((x + more).double(), more.double())
    assert real > 0.1 * FLOAT32.unit * 16  # so it does not average out
    assert real / 3 < noise_of(more.double()) < 3 * real
    assert noise_of(torch.ones_like(more).double()) < real / 10  # 1 is a multiple of the spacing of each x


def test_noise_would_be_missing_without_what_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {key: value for key, value in SPELLED_OUT.items() if key != "logaddexp"}
    monkeypatch.setattr("lossgate.numerics.round_every_operation.SPELLED_OUT", others)
    with pytest.raises(AssertionError, match="<="):
        test_noise_covers_what_float32_gets_wrong_where_numbers_cancel("logaddexp", "value")


INTO = torch.zeros(1, 8, dtype=torch.float64)
TO_FIRST = torch.zeros(3, dtype=torch.int64)
ADDING_UP: dict[str, Operation] = {
    "sum": lambda x: x.sum(0),
    "nansum": lambda x: x.nansum(0),
    "mean": lambda x: x.mean(0),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "index_add": lambda x: INTO.index_add(0, TO_FIRST, x)[0],
    "index_add, scaled": lambda x: INTO.index_add(0, TO_FIRST, x, alpha=0.01)[0],
    "scatter_add": lambda x: INTO.scatter_add(0, TO_FIRST[:, None].expand(3, 8), x)[0],
    "index_put": lambda x: INTO.index_put((TO_FIRST,), x, accumulate=True)[0],
    "scatter_reduce": lambda x: INTO.scatter_reduce(0, TO_FIRST[:, None].expand(3, 8), x, "sum")[0],
    "scatter_reduce, mean": lambda x: INTO.scatter_reduce(
        0, TO_FIRST[:, None].expand(3, 8), x, "mean", include_self=False
    )[0],
    "mm": lambda x: (torch.ones(1, 3, dtype=x.dtype) @ x)[0],
    "mv": lambda x: x.T @ torch.ones(3, dtype=x.dtype),
    "addmm": lambda x: torch.addmm(INTO, torch.ones(1, 3, dtype=x.dtype), x)[0],
    "addmm, subtracted": lambda x: torch.addmm(INTO, torch.ones(1, 3, dtype=x.dtype), x, alpha=-1)[0],
    "addmv": lambda x: torch.addmv(INTO[0], x.T, torch.ones(3, dtype=x.dtype)),
    "bmm": lambda x: torch.bmm(torch.ones(1, 1, 3, dtype=x.dtype), x[None])[0, 0],
    "baddbmm": lambda x: torch.baddbmm(INTO[None], torch.ones(1, 1, 3, dtype=x.dtype), x[None])[0, 0],
}


@pytest.mark.parametrize("name", ADDING_UP)
def test_what_adds_up_is_off_by_units_of_its_largest_term(name: str) -> None:
    """Sums of large terms that cancel are small, and their errors are not."""
    terms = torch.tensor([1000.0, -1000.0, 1.0], dtype=torch.float64)[:, None].expand(3, 8).contiguous()
    exact = ADDING_UP[name](terms)
    noise = torch.stack([rounded(ADDING_UP[name], terms, seed) - exact for seed in range(8)]).square().mean().sqrt()
    assert 100 * UNIT < float((noise / exact).abs().mean()) < 3000 * UNIT


def test_a_sum_of_one_term_is_rounded_once() -> None:
    x = numbers()[:, :1]
    errors = torch.stack([rounded(lambda x: x.sum(1), x, seed) for seed in range(40)]) - x.sum(1)
    assert bool((errors.abs() <= 1.5 * UNIT * x.sum(1).abs()).all())


NEARLY_ZERO: dict[str, Operation] = {
    "logsumexp": lambda x: x.logsumexp(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1)[:, -1],
    "expm1": lambda x: (1e-9 * x).expm1(),
}


@pytest.mark.parametrize("name", NEARLY_ZERO)
def test_results_near_0_have_the_error_of_what_cancels_inside(name: str) -> None:
    x, operation = numbers().log_softmax(1), NEARLY_ZERO[name]
    errors = torch.stack([rounded(operation, x, seed) - operation(x) for seed in range(20)])
    assert float(errors.abs().max()) > 0.3 * UNIT


def test_a_row_of_log_softmax_has_one_error_of_its_normaliser() -> None:
    """Of logits near 1000 it is that of a number near 1000, and the same for the whole row."""
    x = numbers() + 1000
    errors = torch.stack([rounded(lambda x: x.log_softmax(1), x, seed) - x.log_softmax(1) for seed in range(20)])
    assert float(errors.abs().max()) > 100 * UNIT
    assert float(errors.std(2).max()) < 8 * UNIT


def test_the_normaliser_of_a_coarse_log_softmax_is_coarse() -> None:
    """Torch's own, of bfloat16 on a CPU, gives 0 here: it rounds max + log(sum) to bfloat16."""
    x = torch.tensor([[1.1328125, 8.8125]], dtype=torch.float64)
    exact, real = x.log_softmax(1)[0, 1], x.bfloat16().log_softmax(1)[0, 1]
    assert float(real) == 0
    found: list[float] = []
    for seed in range(20):
        with RoundEveryOperation(Noise(seed), FLOAT_FORMATS["bfloat16"]):
            found.append(float(x.log_softmax(1)[0, 1] - exact))
    assert max(found) > float(real - exact)


def test_results_are_rounded_to_the_format_that_is_asked_for() -> None:
    x, bfloat16 = numbers(), FLOAT_FORMATS["bfloat16"]
    with RoundEveryOperation(Noise(0), bfloat16):
        found = x * 0.7
    relative = float(((found - x * 0.7) / (x * 0.7)).abs().max())
    assert 0.3 * bfloat16.unit < relative < bfloat16.unit


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", ["mean", "sum"])
def test_scattered_means_and_sums_are_those_of_torch(name: str, include: bool) -> None:
    def scattered(x: Tensor) -> Tensor:
        return torch.full_like(x, 2.0).scatter_reduce(1, INDEX, x[:, :3], name, include_self=include)

    assert torch.allclose(rounded(scattered, numbers()), scattered(numbers()), rtol=8 * UNIT, atol=8 * UNIT)
