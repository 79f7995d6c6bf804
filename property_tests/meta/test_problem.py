# SPDX-License-Identifier: Apache-2.0
"""Problems are small, pass through JSON, and give the same tensors on every machine."""

import re
from hashlib import sha256

import pytest
import torch

from lossgate import Layout, Problem, UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import PlacedProblem
from lossgate.losses import find_spec
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.random_streams import RandomStreams


def problem(**changes: object) -> Problem:
    plain = {
        "spec": "nll",
        "head": "hidden",
        "dtype": "bfloat16",
        "lengths": (4, 3),
        "masks": ("all", "all"),
        "hidden": 5,
        "vocab": 11,
        "seed": 7,
    }
    return Problem(**{**plain, **changes})  # type: ignore[arg-type]


def batch_of(example: Problem) -> GlobalBatch:
    """Returns the tensors as the ranks of the problem's layout hold them."""
    return PlacedProblem(BoundProblem(find_spec(example.spec), example), example).batch


def digest(batch: GlobalBatch) -> str:
    hashed = sha256()
    for tensors in (batch.leaves, batch.fields, batch.cotangents, batch.vocab_padding):
        for tensor in tensors.values():
            hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


EXAMPLE = problem(
    layout=Layout(cp=2, tp=2),
    masks=("response", "holes"),
    vocab_split="padded",
    bias=True,
    options={"temperature": 0.5},
    logit_std=3.0,
    label_boost=4.0,
    forced_labels=((1, 10),),
    outliers=((0, 2, 30.0),),
    cotangent="both",
)


def test_json_round_trip() -> None:
    assert Problem.from_json(EXAMPLE.to_json()) == EXAMPLE
    assert '"pad_to_multiple"' not in EXAMPLE.to_json()  # at its default


@pytest.mark.parametrize(
    ("example", "expected"),
    [(problem(), "e35e7b3f9bbd29ba"), (EXAMPLE, "00387654f10e834a"), (problem(head="logits"), "89a992c20bf6afae")],
)
def test_the_same_tensors_on_every_machine(example: Problem, expected: str) -> None:
    """The digests were written down once. Another machine, numpy or torch must give the same bits.

    The JSON of a problem and the names of its random streams seed its numbers. A new name of a
    field or a stream changes the digests of problems that use it.
    """
    assert digest(batch_of(example)) == expected


def test_random_numbers_are_as_specified() -> None:
    streams = RandomStreams(1)
    assert streams.integers("a", 1000, 4).tolist() == [990, 616, 866, 725]
    assert torch.equal(streams.normal("a", 3), RandomStreams(1).normal("a", 3))
    assert not torch.equal(streams.normal("a", 3), streams.normal("b", 3))
    many = streams.normal("many", 100_000)
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.01
    assert float(streams.uniform("many", 100_000).max()) < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inputs_hold_numbers_of_their_dtype(dtype: str) -> None:
    for leaf in batch_of(problem(dtype=dtype)).leaves.values():
        assert torch.equal(leaf.to(getattr(torch, dtype)).double(), leaf)


def test_upstream_gradients_are_neither_one_nor_uniform() -> None:
    cotangents = batch_of(problem(cotangent="both", dtype="float32")).cotangents
    live = cotangents["logprobs"][cotangents["logprobs"] != 0]
    assert cotangents["loss"] != 1
    assert len(live.abs().unique()) > 1
    for tensor in cotangents.values():
        assert torch.equal(tensor.to(torch.bfloat16).double(), tensor)


def test_labels_are_shifted_and_the_last_is_masked() -> None:
    batch = batch_of(problem())
    ids, labels, mask = (batch.fields[name] for name in ("input_ids", "labels", "mask"))
    assert labels.tolist() == ids.roll(-1).tolist()
    assert mask.tolist() == [True, True, True, False, True, True, False]
    assert batch.fields["valid_tokens"] == 5


def test_forced_labels_are_the_labels() -> None:
    batch = batch_of(problem(forced_labels=((0, 10), (2, 0))))
    assert batch.fields["labels"][[0, 2]].tolist() == [10, 0]


def test_outliers_are_put_in_place() -> None:
    assert batch_of(problem(outliers=((3, 1, 30.0),))).leaves["hidden"][3, 1] == 30


def test_a_label_boost_makes_labels_confident() -> None:
    def median_logprob(label_boost: float) -> float:
        example = problem(lengths=(64,), masks=("all",), hidden=32, label_boost=label_boost, dtype="float32")
        batch = batch_of(example)
        logits = batch.leaves["hidden"] @ batch.leaves["weight"].T
        return float(torch.log_softmax(logits, -1).gather(1, batch.fields["labels"][:, None])[:-1].median())

    assert median_logprob(12.0) > median_logprob(0.0) + 1


def test_local_fields() -> None:
    batch = batch_of(problem(layout=Layout(dp=2, cp=2, tp=2), lengths=(4, 3, 2), masks=("all",) * 3))
    fields = batch.local_fields(5)  # dp 1, cp 0, tp 1
    assert fields["cu_seqlens"].tolist() == [0, 2]
    assert fields["cu_seqlens_padded"].tolist() == [0, 4]
    assert (fields["vocab_start"], fields["vocab_end"], fields["vocab_size"]) == (6, 11, 11)
    assert fields["valid_tokens"] == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masks": ("all",)}, "problem: 1 masks for 2 sequences; give one for each"),
        (
            {"lengths": (0, 0)},
            (
                "problem: lengths=(0, 0), hidden=5, vocab=11, pad_to_multiple=1, group_size=1; "
                "expected at least one token, no negative length, and positive sizes"
            ),
        ),
        ({"vocab": 0}, "vocab=0, pad_to_multiple=1, group_size=1; expected at least one token, no negative length"),
        (
            {"forced_labels": ((9, 0),)},
            "problem: forced_labels has (9, 0); expected a token below 7 and a row below 11",
        ),
        (
            {"outliers": ((0, 9, 1.0),)},
            "problem: outliers has (0, 9); expected a token below 7 and a column below 5",
        ),
        (
            {"dtype": "float32", "rounded_to": "float32"},
            "rounded_to='float32'; expected None, or a format that is coarser than float32: bfloat16, float16, tf32",
        ),
        ({"dtype": "float16", "rounded_to": "tf32"}, "a format that is coarser than float16: bfloat16"),
        ({"dtype": "bfloat16", "rounded_to": "bfloat16"}, "coarser than bfloat16: there is none"),
        (
            {"vocab": 3, "layout": Layout(tp=4)},
            "layout larger than the problem: a vocabulary of 3 has too few rows for tp=4 ranks",
        ),
    ],
)
def test_impossible_problems_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        problem(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "missing required field `spec`"),
        ("[", "problem: Input data was truncated"),
        ("[]", "problem: Expected `object`"),
        (EXAMPLE.to_json().replace("response", "odd"), "Invalid enum value"),
        (EXAMPLE.to_json().replace("logit_std", "logits_std"), "unknown field 'logits_std'; did you mean 'logit_std'"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Problem.from_json(text)


def test_description_is_short_and_names_what_is_not_at_its_default() -> None:
    assert (
        problem().describe() == "7 tokens in 2 sequences [4, 3], masks all, hidden 5, vocab 11, layout single, "
        "bfloat16, logit_std 1, seed 7"
    )
    assert "masks [all, holes], hidden 5" in problem(masks=("all", "holes")).describe()
    assert "temperature 0.5" in EXAMPLE.describe()
    assert "forced_labels ((1, 10),)" in EXAMPLE.describe()
