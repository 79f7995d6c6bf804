# SPDX-License-Identifier: Apache-2.0
"""Tests of SFT on each rank's own tokens: nothing depends on how tokens are split.

They cover loss, gradients and statistics, and the defects that AReaL has had.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lossgate
from fused_losses import Metrics, Pack, SFTStatistics, linear_logprobs, linear_sft_loss, sft
from lossgate import Layout
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.our_candidates import OURS

MakeWorld = Callable[..., SimulatedWorld]


# ``ci/gate`` verifies it on up to two ranks, in every dtype.
test_sft_agrees = pytest.mark.slow(lossgate.suite(OURS["fused_linear_sft"], layouts=["dp=2,cp=2,tp=2"], examples=12))

VOCAB, WIDTH = 9, 4


class Corpus:
    """Sequences with prompts; some sequences have no trained tokens."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(4)
        self.lengths = lengths
        width = max(lengths)
        self.ids = torch.randint(VOCAB, (len(lengths), width), generator=generator)
        self.mask = torch.zeros(len(lengths), width, dtype=torch.bool)
        for i, length in enumerate(lengths):
            self.mask[i, length // 2 : length] = i % 3 != 2
        self.embedding = torch.randn(len(lengths), width, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)

    def part(self, which: list[int]) -> "Corpus":
        own = Corpus([self.lengths[i] for i in which] or [0])
        own.ids, own.mask, own.embedding, own.weight = (
            self.ids[which],
            self.mask[which],
            self.embedding[which],
            self.weight,
        )
        own.lengths = [self.lengths[i] for i in which]
        return own

    @property
    def trained(self) -> int:
        inside = torch.arange(self.ids.shape[1] - 1) + 1 < torch.tensor(self.lengths)[:, None]
        return int((self.mask[:, 1:] & inside).sum())


def loss_of(
    corpus: Corpus, valid: int, weight: Tensor, multiple: int = 1, cp_group: Any = None, **tp: Any
) -> tuple[Tensor, SFTStatistics]:
    cp = 1 if cp_group is None else cp_group.size()
    unit = multiple * (2 * cp if cp > 1 else 1)
    true, padded = ([0, *(-(-n // u) * u for n in corpus.lengths)] for u in (1, unit))
    pack = Pack.of(torch.tensor(true).cumsum(0), torch.tensor(padded).cumsum(0), cp_group=cp_group)
    hidden = torch.stack(
        [pack.from_rows(corpus.embedding[:, :, i], shift=0, fill=float("nan")) for i in range(WIDTH)], 1
    )
    return linear_sft_loss(
        hidden.requires_grad_(),
        weight,
        pack.labels(corpus.ids),
        mask=pack.from_rows(corpus.mask, shift=1),
        real=pack.real,
        sequence=pack.sequence,
        sequences=pack.sequences,
        valid_tokens=valid,
        cp_group=cp_group,
        chunk=3,
        **tp,
    )


def alone(corpus: Corpus) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    weight = corpus.weight.clone().requires_grad_()
    loss, statistics = loss_of(corpus, corpus.trained, weight)
    loss.backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad, statistics.export()


def test_statistics_by_hand() -> None:
    """Two sequences have one and two trained tokens; perplexity takes the mean before the exp."""
    weight = torch.eye(2, dtype=torch.float64)
    hidden = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    mask, sequence = torch.tensor([True, True, True, False]), torch.tensor([0, 1, 1, 1])
    given: dict[str, Any] = {
        "mask": mask,
        "real": torch.tensor([True, True, True, True]),
        "sequence": sequence,
        "sequences": 3,
    }
    loss, statistics = linear_sft_loss(hidden, weight, torch.zeros(4, dtype=torch.long), valid_tokens=3, **given)
    of_tokens = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64).neg().exp().add(1).log()
    ppl = torch.stack([of_tokens[0], of_tokens[1:].mean()]).exp()
    found = statistics.export()
    torch.testing.assert_close(loss, of_tokens.mean())
    expected = {
        "n_seqs": 2,
        "n_tokens": 4,
        "n_valid_tokens": 3,
        "prompt_tokens": 1,
        "ppl_avg": ppl.mean(),
        "ppl_min": ppl.min(),
    }
    expected |= {
        "ppl_max": ppl.max(),
        "loss_avg": of_tokens.mean(),
        "loss_max": of_tokens.max(),
        "loss_min": of_tokens.min(),
    }
    expected |= {
        "vocab_min_logits_avg": 0.0,
        "vocab_max_logits_avg": 1.5,
        "vocab_max_logits_max": 3.0,
        "vocab_max_logits_min": 0.0,
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], torch.as_tensor(value, dtype=torch.float64))


@pytest.mark.parametrize("layout", ["cp=2", "tp=3", "dp=2", "dp=2,cp=2,tp=2", "cp=3,tp=2"])
def test_nothing_depends_on_the_split(make_world: MakeWorld, layout: str) -> None:
    """Loss, gradients and statistics are those of one rank, also if a dp rank trains nothing.

    In AReaL, counts were once too small by a factor of cp, loss and perplexity were those of one cp
    rank's tokens, extrema of logits cover one tp shard, and inputs other than labels and masks were
    not split. The perplexity is right only if exp comes after the sum over cp, and the loss of an
    evaluation only if its reduction fits how the loss is split.
    """
    corpus, shape = Corpus([5, 8, 3, 1, 7, 2]), Layout.parse(layout)

    def body(context: RankContext) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        dp, cp, tp = (context.mesh.get_group(axis) for axis in ("dp", "cp", "tp"))
        # Sequences 2 and 5 consist of a prompt alone.
        own = corpus.part([0, 1, 3, 4] if dp.rank() == 0 else [2, 5]) if dp.size() > 1 else corpus
        start, end = (VOCAB * r // tp.size() for r in (tp.rank(), tp.rank() + 1))
        weight = corpus.weight[start:end].clone().requires_grad_()
        loss, statistics = loss_of(own, corpus.trained, weight, cp_group=cp, vocab_start=start, tp_group=tp)
        loss.backward()
        assert weight.grad is not None
        return loss.detach(), weight.grad, statistics.reduce(cp, dp).export()

    world = make_world(layout)
    results = world.run(body)
    loss, gradient, expected = alone(corpus)
    coordinates = [shape.coordinate(rank) for rank in range(shape.ranks)]
    torch.testing.assert_close(
        torch.stack([r[0] for r, at in zip(results, coordinates, strict=True) if at["tp"] == 0]).sum(), loss
    )
    shards = [
        torch.stack([r[1] for r, at in zip(results, coordinates, strict=True) if at["tp"] == tp]).sum(0)
        for tp in range(shape.tp)
    ]
    torch.testing.assert_close(torch.cat(shards), gradient)
    for _, _, statistics in results:
        torch.testing.assert_close(statistics, expected)


@hypothesis.given(st.permutations(range(6)), st.lists(st.integers(0, 6), max_size=3), st.integers(1, 5))
def test_nothing_depends_on_microbatches_or_padding(order: list[int], cuts: list[int], multiple: int) -> None:
    """That includes empty microbatches and ``loss_avg``, the loss of an evaluation.

    Megatron-LM divides losses by the number of microbatches, which AReaL must undo.
    """
    corpus = Corpus([5, 8, 3, 1, 7, 2])
    weight = corpus.weight.clone().requires_grad_()
    edges = [0, *sorted(cuts), 6]
    total, statistics = torch.zeros((), dtype=torch.float64), Metrics()
    for first, last in pairwise(edges):
        loss, own = loss_of(corpus.part(list(order)[first:last]), corpus.trained, weight, multiple)
        total, statistics = total + loss, statistics + own
    total.backward()
    expected_loss, gradient, expected = alone(corpus)
    torch.testing.assert_close(total.detach(), expected_loss)
    torch.testing.assert_close(weight.grad, gradient)
    torch.testing.assert_close(statistics.export(), expected)
    torch.testing.assert_close(expected["loss_avg"], expected_loss)


def test_collectives_do_not_depend_on_data(make_world: MakeWorld) -> None:
    """A rank without trained tokens or without any tokens calls the same collectives.

    In AReaL, such a rank skipped the loss function, so ranks called different collectives. Its
    forward-only path over cp pairs labels with the wrong logits, because it does not gather them.
    Here no logits are gathered, in training or evaluation, and none need to be.
    """

    def collectives(corpora: list[Corpus], train: bool) -> list[list[str]]:
        def body(context: RankContext) -> None:
            dp, cp = context.mesh.get_group("dp"), context.mesh.get_group("cp")
            weight = corpora[0].weight.clone().requires_grad_(train)
            loss, statistics = loss_of(corpora[dp.rank()], 7, weight, cp_group=cp)
            statistics.reduce(cp, dp)
            if train:
                loss.backward()

        world = make_world("dp=2,cp=2")
        world.run(body)
        return [
            [f"{logged.collective} {logged.shown}" for logged in world.log if logged.rank == rank] for rank in range(4)
        ]

    both, untrained, empty = Corpus([4, 6]), Corpus([4, 6]).part([1]), Corpus([4, 6]).part([])
    untrained.mask = torch.zeros_like(untrained.mask)
    for train in (True, False):
        ranks = collectives([both, untrained], train)
        # One sum of [2, sequences] over cp, then one collective over each of cp and dp.
        assert [len(rank) for rank in ranks] == [3] * 4
        names = [
            [entry.split()[0] + entry.split()[1] for entry in rank]
            for rank in (*ranks, *collectives([both, empty], train))
        ]
        assert all(rank == names[0] for rank in names)
        assert not any(",8]" in entry or f", {VOCAB}]" in entry for rank in ranks for entry in rank)


def test_a_rank_without_trained_tokens_has_a_loss_with_a_graph() -> None:
    """AReaL skips the SFT loss function there, and its DPO returns a constant without a graph."""
    corpus = Corpus([4, 6])
    corpus.mask = torch.zeros_like(corpus.mask)
    weight = corpus.weight.clone().requires_grad_()
    loss, statistics = loss_of(corpus, 0, weight)
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()
    found = statistics.export()
    assert (found["n_seqs"], found["ppl_avg"], found["loss_min"], found["loss_max"]) == (
        0,
        0,
        float("inf"),
        -float("inf"),
    )


def test_epsilon_is_added_to_the_count_and_a_sum_is_not_divided() -> None:
    corpus = Corpus([5, 8])
    (loss, _), valid = loss_of(corpus, corpus.trained, corpus.weight), corpus.trained
    pack = Pack.of(torch.tensor([0, 5, 13]))
    hidden = torch.cat([corpus.embedding[0, :5], corpus.embedding[1]])
    given: dict[str, Any] = {
        "mask": pack.from_rows(corpus.mask, shift=1),
        "real": pack.real,
        "sequence": pack.sequence,
        "sequences": 2,
    }
    other, _ = linear_sft_loss(
        hidden, corpus.weight, pack.labels(corpus.ids), valid_tokens=valid, epsilon=1e-5, **given
    )
    torch.testing.assert_close(other * (valid + 1e-5), loss * valid)
    summed, _ = linear_sft_loss(
        hidden, corpus.weight, pack.labels(corpus.ids), valid_tokens=valid, reduction="sum", **given
    )
    torch.testing.assert_close(summed, loss * valid)


PARTS = {
    "n_seqs": (),
    "n_tokens": (),
    "n_valid_tokens": (),
    "prompt_tokens": (),
    "ppl": (),
    "loss": (),
    "entropy": ("entropy",),
    "vocab_min_logits": ("logit_range",),
    "vocab_max_logits": ("logit_range",),
}
"""What each statistic needs."""


@pytest.mark.parametrize("wanted", [(), ("entropy",), ("logit_range",), ("entropy", "logit_range")], ids=str)
def test_statistics_in_parts(monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...]) -> None:
    """The parts are those of the whole, in names and bits, and the others are not computed."""
    asked = list[dict[str, Any]]()

    def spy(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return linear_logprobs(*given, **options)

    monkeypatch.setattr(sft, "linear_logprobs", spy)
    corpus = Corpus([5, 8, 3])
    _, whole = loss_of(corpus, corpus.trained, corpus.weight)
    options = {name: name in wanted for name in ("entropy", "logit_range")}
    loss, part = loss_of(corpus, corpus.trained, corpus.weight, **options)
    expected = [n for n in whole if set(PARTS[n if n in PARTS else n.rpartition("_")[0]]) <= set(wanted)]
    assert list(part) == expected
    assert all(torch.equal(part[name], whole[name]) for name in expected)
    torch.testing.assert_close(part["loss_avg"], loss)
    assert {name: asked[-1][name] for name in options} == options


def test_masks_may_be_numbers_0_and_1() -> None:
    corpus = Corpus([5, 8, 3])
    hidden, labels = torch.cat([*corpus.embedding]), corpus.ids.flatten()
    mask, real = corpus.mask.flatten(), torch.ones(24)
    given: dict[str, Any] = {"sequence": torch.arange(24) // 8, "sequences": 3, "valid_tokens": 9}
    (loss, found), (other, others) = (
        linear_sft_loss(hidden, corpus.weight, labels, mask=m, real=r, **given)
        for m, r in ((mask, real.bool()), (mask.float(), real.int()))
    )
    assert torch.equal(loss, other)
    assert found.floats() == others.floats()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": ({"reduction": "max"}, "reduction 'max': expected 'mean' or 'sum'"),
    "epsilon": ({"epsilon": -1}, "epsilon -1: expected a finite number from 0"),
    "valid_tokens": ({"valid_tokens": -3}, "valid_tokens -3: expected a finite number from 0"),
    "sequences": ({"sequences": 1.5}, "sequences 1.5: expected an integer from 0"),
    "no mask": ({"mask": None}, "mask None: expected a tensor"),
    "another number": ({"real": torch.full((4,), 0.5)}, "real holds 0.5: expected only 0 and 1"),
    "another shape": ({"mask": torch.ones(4, 1)}, r"mask \[4, 1\]: expected \[4\], one entry for each of labels"),
    "sequence": ({"sequence": torch.zeros(3)}, r"sequence \[3\]: expected \[4\], one for each token, as labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_raise_errors_that_name_them(name: str) -> None:
    changes, message = REFUSED[name]
    hidden, labels = torch.zeros(4, WIDTH, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    given: dict[str, Any] = {"mask": labels == 0, "real": labels == 0, "sequence": labels, "sequences": 1}
    with pytest.raises(ValueError, match=message):
        linear_sft_loss(hidden, Corpus([4]).weight, labels, **{"valid_tokens": 4, **given, **changes})
