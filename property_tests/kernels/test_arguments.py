# SPDX-License-Identifier: Apache-2.0
"""Tests that kernels refuse arguments that would give a wrong number, and say which and why.

The kernels are those that start from hidden states or logits.
"""

from collections.abc import Callable
from math import inf as INF
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_losses import (
    Metrics,
    linear_cross_entropy,
    linear_logprobs,
    linear_sft_loss,
    tiled_token_logprobs,
    unchecked_values,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprobs,
)
from lossgate.worlds import RankContext, SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]


def example(tokens: int = 6, width: int = 4, vocab: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    return hidden, weight, bias, torch.randint(1, vocab, (tokens,), generator=generator)


def sft(hidden: Tensor, weight: Tensor, labels: Tensor, **changes: Any) -> Tensor:
    given: dict[str, Any] = {"mask": torch.ones(6), "real": torch.ones(6), "sequence": torch.zeros(6).long()}
    return linear_sft_loss(hidden, weight, labels, **{**given, "sequences": 1, "valid_tokens": 6, **changes})[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda h, w, b, y: linear_logprobs(h, w.float(), y),
            "hidden is torch.float64 and weight torch.float32: expected one dtype",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y, softcap=0.0),
            "softcap 0.0: expected a finite number above 0, or None",
        ),
        (
            lambda h, w, b, y: linear_cross_entropy(h, w, y, chunk=0),
            "chunk 0: expected an integer from 1, or None",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w[:, :3], y),
            r"hidden \[6, 4\] and weight \[9, 3\]: expected \[tokens, H\] and \[vocab, H\]",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y[:5]),
            r"hidden \[6, 4\] and labels \[5\]: layout 'bsh' expects hidden",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y, bias=b[:5]),
            r"bias \[5\]: expected one for each of 9 rows of weight",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y, temperature=0.0),
            "temperature 0.0: expected a finite number above 0",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y, vocab_rows=10),
            "vocab_rows 10: expected 1 to 9, the number of rows of weight",
        ),
        (lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y[:5]), r"logits \[6, 9\] and labels \[5\]"),
        (
            lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y, vocab_rows=-1),
            "vocab_rows -1: expected 1 to 9, the number of columns of logits",
        ),
        (
            lambda h, w, b, y: linear_cross_entropy(h, w, y, mask=torch.ones(6, 1).bool()),
            r"mask \[6, 1\]: expected \[6\], one entry for each of labels",
        ),
        (
            lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y, temperature=-1.0),
            "temperature -1.0: expected a finite number above 0",
        ),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y.float()),
            "labels is torch.float32: expected int64, int32 or int16",
        ),
        (lambda h, w, b, y: linear_logprobs(h, w, y.to(torch.uint8)), "labels is torch.uint8: expected int64"),
        (lambda h, w, b, y: linear_cross_entropy(h, w, y.to(torch.int8)), "labels is torch.int8: expected int64"),
        (lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y.double()), "labels is torch.float64: expected int64"),
        (
            lambda h, w, b, y: linear_cross_entropy(h, w, y, mask=y.double() / 2),
            "mask holds .*: expected only 0 and 1",
        ),
        (lambda h, w, b, y: linear_cross_entropy(h, w, y, mask=[True] * 6), r"mask \[True.*: expected a tensor \[6\]"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, chunk=2.5), "chunk 2.5: expected an integer from 1"),
        (lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y, chunk=0), "chunk 0: expected an integer from 1"),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y, matmul_dtype=torch.int32),
            "matmul_dtype torch.int32: expected torch.float16, torch.bfloat16",
        ),
        (lambda h, w, b, y: linear_logprobs(h, w, y, softcap=INF), "softcap inf: expected a finite number above 0"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, temperature=INF), "temperature inf: expected a finite number"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, temperature="1"), "temperature '1': expected a finite number"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, vocab_rows=0), "vocab_rows 0: expected 1 to 9"),
        (
            lambda h, w, b, y: linear_logprobs(h, w, y, sequence_parallel=True),
            "sequence_parallel True: expected a tp_group",
        ),
        (lambda h, w, b, y: linear_logprobs(h, w, y, vocab_start=9), "vocab_start 9: expected 0 or None without other"),
        (
            lambda h, w, b, y: linear_cross_entropy(h, w, y, valid_tokens=-3),
            "valid_tokens -3: expected a finite number from 0",
        ),
        (lambda h, w, b, y: linear_cross_entropy(h, w, y, valid_tokens=torch.tensor(-3)), "valid_tokens -3: expected"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, temperature=torch.tensor(-1.0)), "temperature is a tensor"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, softcap=torch.tensor(0.0)), "softcap is a tensor"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, top_p=torch.tensor(0.9)), "top_p is a tensor"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, matmul_dtype="float32"), "matmul_dtype 'float32': expected torch"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, ignore_index=1.5), "ignore_index 1.5: expected an integer"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, entropy="false"), "entropy 'false': expected False or True"),
        (lambda h, w, b, y: linear_logprobs(h, w, [1] * 6), "labels is a list: expected a tensor"),
        (lambda h, w, b, y: sft(h, w, y, sequence=y * 0 - 1), "sequence: token 0 has -1, outside of the pack"),
        (lambda h, w, b, y: sft(h, w, y, sequence=None), "sequence is a NoneType: expected a tensor"),
        (lambda h, w, b, y: sft(h, w, y, epsilon=-1.0), "epsilon -1.0: expected a finite number from 0"),
        (
            lambda h, w, b, y: Metrics.over({"n": y > 0}, {"x": (h[:, :1], "n")}),
            r"n \[6\]: expected \[6, 1\], one entry for each of x",
        ),
        (lambda h, w, b, y: Metrics.over({"n": y > 0}, {"x": (h[:, 0], "k")}), "values: x is averaged over 'k'"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, top_k=0), "top_k 0: expected an integer from 1, or None"),
        (lambda h, w, b, y: linear_logprobs(h, w, y, top_p=0.0), "top_p 0.0: expected a finite number above 0 up to 1"),
        (lambda h, w, b, y: vocab_parallel_logprobs(h @ w.T, y, top_p=1.5), "top_p 1.5: expected a finite number"),
        (
            lambda h, w, b, y: linear_cross_entropy(h, w, y, reduction="none"),
            "reduction 'none': expected 'mean' or 'sum'",
        ),
        (
            lambda h, w, b, y: linear_cross_entropy(h, w, y, valid_tokens=6, reduction="sum"),
            "valid_tokens: expected none with reduction='sum'",
        ),
        (
            lambda h, w, b, y: vocab_parallel_cross_entropy(h @ w.T, y, valid_tokens=6, reduction="sum"),
            "valid_tokens: expected none with reduction='sum'",
        ),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*example())


EPSILON = torch.zeros((), requires_grad=True)
KERNELS: dict[str, Callable[..., Tensor]] = {
    "linear_logprobs": lambda h, w, y, **given: linear_logprobs(h, w, y, **given).logprobs,
    "linear_cross_entropy": lambda h, w, y, **given: linear_cross_entropy(h + EPSILON.to(h), w, y, **given),
    "linear_cross_entropy, no gradient": linear_cross_entropy,
    "vocab_parallel_logprobs": lambda h, w, y, **given: vocab_parallel_logprobs(h @ w.T, y, **given).logprobs,
    "vocab_parallel_cross_entropy": lambda h, w, y, **given: vocab_parallel_cross_entropy(h @ w.T, y, **given),
}
LOSSES = [name for name in KERNELS if "cross_entropy" in name]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("label", [9, 99, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(name: str, label: int) -> None:
    hidden, weight, _, labels = example()
    labels[3] = label
    with pytest.raises(ValueError, match=r"labels: token 3 has .*outside of the vocabulary"):
        KERNELS[name](hidden, weight, labels)


@pytest.mark.parametrize("name", LOSSES)
def test_labels_of_masked_tokens_may_be_anything(name: str) -> None:
    hidden, weight, _, labels = example()
    mask = torch.arange(6) != 3
    expected = KERNELS[name](hidden, weight, labels, mask=mask)
    labels[3] = 10**9
    assert KERNELS[name](hidden, weight, labels, mask=mask) == expected


@pytest.mark.parametrize("name", ["linear_logprobs", "vocab_parallel_logprobs"])
def test_ignored_labels_have_log_probability_0_and_no_gradient(name: str) -> None:
    hidden, weight, _, labels = example()
    labels[2] = -100
    hidden.requires_grad_()
    logprobs = KERNELS[name](hidden, weight, labels)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert logprobs[2] == 0
    assert (gradient != 0).any(1).tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("name", KERNELS)
def test_without_the_check_a_label_outside_of_the_vocabulary_has_nan(name: str) -> None:
    hidden, weight, _, labels = example()
    labels[3] = 99
    with unchecked_values():
        found = KERNELS[name](hidden, weight, labels)
    assert found.isnan().tolist() == (True if name in LOSSES else [False, False, False, True, False, False])
    with pytest.raises(ValueError, match="outside of the vocabulary"):  # it is checked again
        KERNELS[name](hidden, weight, labels)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_masks_of_numbers_are_those_of_bools(name: str, dtype: torch.dtype) -> None:
    hidden, weight, _, labels = example()
    mask = torch.arange(6) % 2 == 0
    assert KERNELS[name](hidden, weight, labels, mask=mask.to(dtype)) == KERNELS[name](
        hidden, weight, labels, mask=mask
    )


SPLITS = {
    "no start": ({}, "vocab_start is missing: (weight|logits) is one of 2 shards"),
    "the same start on both ranks": (
        {"vocab_start": 0},
        "vocab_start: 2 ranks own the label of token|outside of the voc",
    ),
    "a gap": (
        {"vocab_start": lambda rank: 6 * rank},
        "labels: token . has a label outside of the vocabulary, the rows of",
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", SPLITS)
def test_wrong_splits_of_the_vocabulary_are_refused_on_every_rank(make_world: MakeWorld, name: str, split: str) -> None:
    hidden, weight, _, _ = example(vocab=8)
    given, message = SPLITS[split]

    def body(context: RankContext) -> None:
        own = {key: value(context.rank) if callable(value) else value for key, value in given.items()}
        group = context.mesh.get_group("tp")
        with pytest.raises(ValueError, match=message):
            KERNELS[name](
                hidden.clone(), weight[4 * context.rank :][:4], torch.tensor([0, 1, 5, 4, 3, 2]), tp_group=group, **own
            )

    make_world("tp=2").run(body)


def test_a_weight_that_megatron_marks_as_a_shard_needs_its_group(make_world: MakeWorld) -> None:
    hidden, weight, _, _ = example(vocab=8)

    def body(context: RankContext) -> None:
        shard = nn.Parameter(weight[:4])
        shard.tensor_model_parallel = True
        labels = torch.tensor([0, 1, 2, 3, 3, 2])  # all on the first rank: labels alone show nothing
        with pytest.raises(ValueError, match="weight is marked as a shard of tensor parallelism"):
            linear_logprobs(hidden, shard, labels)
        head = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        head.weight = shard
        with pytest.raises(ValueError, match="its weight is marked as a shard of tensor parallelism"):
            tiled_token_logprobs(head, hidden, labels)

    make_world("tp=2").run(body)


@pytest.mark.parametrize("name", KERNELS)
def test_second_derivatives_are_refused(name: str) -> None:
    """A gradient penalty through a backbone: its upstream gradient is a constant."""
    hidden, weight, _, labels = example()
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(KERNELS[name](hidden.tanh(), weight, labels).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("name", KERNELS)
def test_a_graph_of_gradients_that_nobody_uses_does_no_harm(name: str) -> None:
    hidden, weight, _, labels = example()
    expected, found = (
        torch.autograd.grad(
            KERNELS[name](hidden.requires_grad_().tanh(), weight, labels).sum(), hidden, create_graph=create_graph
        )[0]
        for create_graph in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_transforms_of_torch_func_are_refused(name: str) -> None:
    hidden, weight, _, labels = example()
    with pytest.raises(ValueError, match=r"belongs to a transform of torch.func"):
        torch.func.grad(lambda h: KERNELS[name](h, weight, labels).sum())(hidden)
