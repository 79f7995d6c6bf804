# SPDX-License-Identifier: Apache-2.0
"""Problems: small, JSON-able, and the same tensors on every machine."""

from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lossgate import Layout, Problem, UsageError
from lossgate.cases.materialize import materialize
from lossgate.problems.batch import Batch
from lossgate.problems.random_streams import Bits


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


def digest(batch: Batch) -> str:
    hashed = sha256()
    for tensor in (*batch.leaves.values(), *batch.fields.values(), *batch.cotangents.values(), *batch.filler.values()):
        hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


EXAMPLE = problem(
    layout=Layout(cp=2, tp=2),
    masks=("response", "holes"),
    vocab_split="padded",
    bias=True,
    options={"temperature": 0.5},
    spread=3.0,
    confidence=4.0,
    pins=((1, 10),),
    spikes=((0, 2, 30.0),),
    cotangent="both",
)


def test_json_round_trip() -> None:
    assert Problem.from_json(EXAMPLE.to_json()) == EXAMPLE
    assert '"multiple"' not in EXAMPLE.to_json()  # at its default


@pytest.mark.parametrize(
    ("example", "expected"),
    [(problem(), "e35e7b3f9bbd29ba"), (EXAMPLE, "26dcf3e48e0f7232"), (problem(head="logits"), "89a992c20bf6afae")],
)
def test_the_same_tensors_on_every_machine(example: Problem, expected: str) -> None:
    """Digests written down once: another machine, another numpy or torch must give the same bits."""
    assert digest(materialize(example)) == expected


def test_random_numbers_are_as_specified() -> None:
    bits = Bits(1)
    assert bits.integers("a", 1000, 4).tolist() == [990, 616, 866, 725]
    assert torch.equal(bits.normal("a", 3), Bits(1).normal("a", 3))
    assert not torch.equal(bits.normal("a", 3), bits.normal("b", 3))
    many = bits.normal("many", 100_000)
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.01
    assert float(bits.uniform("many", 100_000).max()) < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inputs_hold_numbers_of_their_dtype(dtype: str) -> None:
    for leaf in materialize(problem(dtype=dtype)).leaves.values():
        assert torch.equal(leaf.to(getattr(torch, dtype)).double(), leaf)


def test_upstream_gradients_are_neither_one_nor_uniform() -> None:
    cotangents = materialize(problem(cotangent="both", dtype="float32")).cotangents
    live = cotangents["logprobs"][cotangents["logprobs"] != 0]
    assert cotangents["loss"] != 1
    assert len(live.abs().unique()) > 1
    for tensor in cotangents.values():
        assert torch.equal(tensor.to(torch.bfloat16).double(), tensor)


def test_labels_are_shifted_and_the_last_is_masked() -> None:
    batch = materialize(problem())
    ids, labels, mask = (batch.fields[name] for name in ("input_ids", "labels", "mask"))
    assert labels.tolist() == ids.roll(-1).tolist()
    assert mask.tolist() == [True, True, True, False, True, True, False]
    assert batch.fields["valid_tokens"] == 5


def test_pins_force_labels() -> None:
    batch = materialize(problem(pins=((0, 10), (2, 0))))
    assert batch.fields["labels"][[0, 2]].tolist() == [10, 0]


def test_spikes_are_put() -> None:
    assert materialize(problem(spikes=((3, 1, 30.0),))).leaves["hidden"][3, 1] == 30


def test_confidence_lifts_the_labels() -> None:
    def mean_logprob(confidence: float) -> float:
        batch = materialize(problem(lengths=(64,), masks=("all",), hidden=32, confidence=confidence, dtype="float32"))
        logits = batch.leaves["hidden"] @ batch.leaves["weight"].T
        return float(torch.log_softmax(logits, -1).gather(1, batch.fields["labels"][:, None])[:-1].median())

    assert mean_logprob(12.0) > mean_logprob(0.0) + 1


def test_padding_is_masked_garbage() -> None:
    batch = materialize(problem(multiple=4))
    padding = torch.ones(batch.partition.tokens, dtype=torch.bool)
    padding[batch.partition.real_tokens] = False
    assert padding.sum() == 1
    assert not batch.fields["mask"][padding].any()
    assert batch.leaves["hidden"][padding].abs().sum() > 0


def test_local_fields() -> None:
    batch = materialize(problem(layout=Layout(dp=2, cp=2, tp=2), lengths=(4, 3, 2), masks=("all",) * 3))
    fields = batch.local_fields(5)  # dp 1, cp 0, tp 1
    assert fields["cu_seqlens"].tolist() == [0, 2]
    assert fields["cu_seqlens_padded"].tolist() == [0, 4]
    assert (fields["vocab_start"], fields["vocab_end"], fields["vocab_size"]) == (6, 11, 11)
    assert fields["valid_tokens"] == 6


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_real_tokens_are_the_same_on_every_layout(cp: int, multiple: int, dp: int) -> None:
    """A layout pads; it does not change labels or masks of the tokens themselves."""
    one = materialize(problem())
    other = materialize(problem(layout=Layout(dp=dp, cp=cp), multiple=multiple))
    for name in ("input_ids", "labels", "mask"):
        assert torch.equal(other.fields[name][other.partition.real_tokens], one.fields[name][one.partition.real_tokens])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"masks": ("all",)}, "problem: 1 masks for 2 sequences"),
        ({"lengths": (0, 0)}, "it needs at least one token"),
        ({"vocab": 0}, "positive sizes"),
        ({"pins": ((9, 0),)}, r"pin \(9, 0\) is outside of 7 tokens x 11 rows"),
        ({"spikes": ((0, 9, 1.0),)}, r"spike at \(0, 9\) is outside of 7 tokens x 5 columns"),
        ({"vocab": 3, "layout": Layout(tp=4)}, "layout larger than the problem"),
    ],
)
def test_impossible_problems_are_told(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        problem(**changes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "missing required field `spec`"),
        ("[", "Expected `object`"),
        (EXAMPLE.to_json().replace("response", "odd"), "Invalid enum value"),
    ],
)
def test_bad_json_is_told(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Problem.from_json(text)


def test_description_is_short_and_names_what_is_not_plain() -> None:
    assert (
        problem().describe()
        == "7 tokens in 2 sequences [4, 3], masks all/all, hidden 5, vocab 11, layout single, bfloat16, logit spread 1, seed 7"
    )
    assert "temperature 0.5" in EXAMPLE.describe()
    assert "pins ((1, 10),)" in EXAMPLE.describe()
