# SPDX-License-Identifier: Apache-2.0
"""Large problems are judged one run and some tokens at a time, and as small ones are.

Here they are small ones that are taken for large.
"""

import weakref
from dataclasses import replace
from zlib import crc32

import pytest
import torch

from lossgate import Candidate, Layout, Precision, Problem
from lossgate.cases import kernel_noise
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.large import size_of
from lossgate.dense_candidates import dense_candidate
from lossgate.judge import streamed
from lossgate.judge.comparison import Comparison
from lossgate.judge.statistics import SCALE
from lossgate.losses import SPECS
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import RoundedRun, SumOfProducts
from lossgate.specs import token_chunks
from lossgate.specs.heads import HEADS
from lossgate.worlds import SimulatedWorld

SIZES = {"lengths": (19, 14), "masks": ("all", "random"), "hidden": 24, "vocab": 40, "seed": 4}


def problem(dtype: str, layout: str, spec: str = "nll", head: str = "hidden", **given: object) -> Problem:
    return Problem(spec=spec, head=head, dtype=dtype, layout=Layout.parse(layout), **{**SIZES, **given})  # pyright: ignore[reportArgumentType]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every problem for a large one, of which few tokens are computed at once."""
    monkeypatch.setattr(kernel_noise, "is_large", lambda _: True)
    monkeypatch.setattr(streamed, "_BLOCK", 6 * SIZES["vocab"])
    monkeypatch.setattr(streamed, "_PIECE", 4 * SIZES["vocab"])
    monkeypatch.setattr(token_chunks, "_AT_ONCE", 5 * SIZES["vocab"])


def judged(candidate: Candidate, example: Problem) -> dict[str, Comparison]:
    world = SimulatedWorld(example.layout)
    case = Case(candidate, example, world)
    found = {str(comparison.output): comparison for comparison in case.comparisons}
    world.close()
    return found


FILTERED = {"spec": "token_logprobs", "options": {"top_k": 8}, "cotangent": "logprobs"}

WAYS = {
    "bfloat16": ("bfloat16", "single", Precision(), {}),
    "float32, a bias, a temperature": ("float32", "tp=2", Precision(), {"bias": True}),
    "ranks of tokens": ("bfloat16", "dp=2,cp=2", Precision(), {"bias": True}),
    "chunks": ("bfloat16", "cp=2", Precision(accumulate="bfloat16", chunk=7), {}),
    "gradients in forward": ("bfloat16", "single", Precision(grads_in_forward=True), {}),
    "TF32": ("float32", "single", Precision(products="tf32"), {}),
    "at the logits": ("bfloat16", "tp=2", Precision(), {"head": "logits"}),
    "a filter": ("float32", "single", Precision(), FILTERED),
    "a clipped loss": ("bfloat16", "single", Precision(), {"spec": "grpo", "options": {"temperature": 0.7}}),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("way", WAYS)
def test_large_problems_have_the_limits_of_small_ones(way: str, request: pytest.FixtureRequest) -> None:
    dtype, layout, precision, given = WAYS[way]
    example = problem(dtype, layout, **given)
    candidate = dense_candidate(SPECS[example.spec], example.head)
    candidate = replace(candidate, precision={**candidate.precision, dtype: precision})
    at_once = judged(candidate, example)
    request.getfixturevalue("small_parts")
    in_parts = judged(candidate, example)
    assert at_once.keys() == in_parts.keys()
    for output, one in at_once.items():
        other = in_parts[output]
        assert one.agrees == other.agrees
        for name in one.limits:
            most = 3 if name == SCALE else 2  # SCALE's limit is that of few numbers
            assert 1 / most < (other.limits[name] + 1e-12) / (one.limits[name] + 1e-12) < most, (output, name)


@pytest.mark.usefixtures("small_parts")
def test_a_run_makes_the_same_errors_again() -> None:
    """It goes forward twice: for the loss, and for the gradients."""
    example = problem("bfloat16", "cp=2", options={})
    bound = BoundProblem(SPECS["nll"], example)
    stages = Precision().stages("bfloat16", caller_reduces_hidden=False)

    def noise_of(run: int, what: str) -> Noise:
        return Noise(crc32(f"{run} {what}".encode()))

    stream = streamed._Stream(HEADS["hidden"], bound.batch, bound.bound_spec, example.partition, stages, noise_of)
    first, run = stream.values(2).logprobs[1], stream.run(1)
    assert len(stream.blocks) > 4
    for block in stream.blocks:
        for tokens, stage in stream.stages_of(run, block, stream.products(block.tokens)):
            assert torch.equal(stage.values.logprobs[0], first[tokens])
            stage.backward({"logprobs": torch.ones(1, len(tokens), dtype=torch.float64)})
    assert not torch.equal(stream.values(2).logprobs[0], first)


def test_the_reference_in_chunks_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, head, options in (
        ("nll", "hidden", {}),
        ("token_logprobs", "logits", {"top_k": 8}),
        ("grpo", "hidden", {}),
    ):
        cotangent = "logprobs" if spec == "token_logprobs" else "loss"
        example = problem("bfloat16", "single", spec, head, options=options, cotangent=cotangent)
        whole = BoundProblem(SPECS[spec], example).reference(())
        with monkeypatch.context() as small:
            small.setattr(token_chunks, "_AT_ONCE", 5 * SIZES["vocab"])
            in_chunks = BoundProblem(SPECS[spec], example).reference(())
        assert whole.keys() == in_chunks.keys()
        for output, tensor in whole.items():
            assert torch.allclose(in_chunks[output], tensor, rtol=1e-11, atol=1e-15), (spec, output)


def test_a_bias_does_not_make_runs_fewer() -> None:
    """Its gradient has as many entries as the vocabulary."""
    sizes = {"lengths": (520,), "masks": ("all",), "hidden": 64, "vocab": 4000}
    problems = [problem("bfloat16", "single", **sizes, bias=bias) for bias in (False, True)]
    assert [streamed.runs_of(size_of(one)) for one in problems] == [(12, 12), (12, 12)]
    assert streamed.runs_of(1 << 25) == (12, 4)


def test_runs_that_round_the_weight_hold_one_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    example = problem("float32", "single")
    bound = BoundProblem(SPECS["nll"], example)
    stages = Precision(products="tf32").stages("float32", caller_reduces_hidden=False)
    stream = streamed._Stream(
        HEADS["hidden"], bound.batch, bound.bound_spec, example.partition, stages, lambda *_: Noise(0)
    )
    made: list[weakref.ref[object]] = []
    make = stream.run

    def run(number: int) -> streamed._OneRun:
        made.append(weakref.ref(new := make(number)))
        assert sum(one() is not None for one in made) == 1
        return new

    monkeypatch.setattr(stream, "run", run)
    stream.values(5)
    assert len(made) == 5


def test_a_product_loses_one_share_in_all_its_rows() -> None:
    stages = Precision(accumulators="truncated").stages("bfloat16", caller_reduces_hidden=False)
    ones = torch.ones(40, 4000, dtype=torch.float64)
    total = SumOfProducts(RoundedRun(Noise(1), 3, stages))
    total.add(ones, ones.T)
    parts = [slice(i, i + 8) for i in range(0, 40, 8)]
    lost = [(total.exact[some] - total.rounded(some)).mean((-1, -2)) for some in parts]
    assert lost[0].std() > 0.05
    assert all(torch.allclose(one, lost[0], atol=0.005) for one in lost)
