# SPDX-License-Identifier: Apache-2.0
"""Tests of the statistics of supervised fine-tuning: plain Python, hand computation, properties."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_losses import mean_entropy, nll
from dense_losses.sft_statistics import sft_statistics, vocab_range

SEQUENCE = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
MASK = [False, True, True, True, False, True, False, False, False, False]  # sequence 2 has no trained token
REAL = [True] * 8 + [False] * 2  # sequence 3 is padding
TOKENS, VOCAB, SEQUENCES = len(SEQUENCE), 5, 4

COUNTS = ("n_seqs", "n_tokens", "n_valid_tokens", "prompt_tokens")
STATISTICS = ("ppl", "loss", "entropy", "vocab_min_logits", "vocab_max_logits")
PER_TOKEN = {
    "logprobs": MASK,
    "entropy": MASK,
    "vocab_min": REAL,
    "vocab_max": REAL,
}  # inputs, and where each of them counts


def example(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    least, greatest = vocab_range(torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64))
    return {
        "logprobs": -torch.rand(TOKENS, generator=generator, dtype=torch.float64) * 3,
        "entropy": torch.rand(TOKENS, generator=generator, dtype=torch.float64),
        "vocab_min": least,
        "vocab_max": greatest,
        "mask": torch.tensor(MASK),
        "real": torch.tensor(REAL),
        "sequence": torch.tensor(SEQUENCE),
        "sequences": SEQUENCES,
        "valid_sequences": torch.tensor(2),
        "real_tokens": torch.tensor(8),
        "valid_tokens": torch.tensor(4),
    }


def tokens_of(e: dict[str, Any], which: Tensor) -> dict[str, Any]:
    return {name: x[which] if isinstance(x, Tensor) and x.dim() else x for name, x in e.items()}


def floats(statistics: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(x) for name, x in statistics.items()}


def of_statistic(name: str, average: float, least: float, greatest: float) -> dict[str, float]:
    return {f"{name}_avg": average, f"{name}_min": least, f"{name}_max": greatest}


def summary(name: str, values: list[float]) -> dict[str, float]:
    return of_statistic(name, math.fsum(values) / len(values), min(values), max(values))


@pytest.mark.parametrize("seed", range(5))
def test_by_plain_python(seed: int) -> None:
    e = example(seed)
    rows = list(zip(SEQUENCE, MASK, REAL, *(e[name].tolist() for name in PER_TOKEN), strict=True))
    ppl = []
    for i in range(SEQUENCES):
        own = [row[3] for row in rows if row[0] == i and row[1]]
        ppl += [math.prod(math.exp(x) for x in own) ** (-1 / len(own))] if own else []
    expected = {
        **dict(zip(COUNTS, (2, 8, 4, 4), strict=True)),
        **summary("ppl", ppl),
        **summary("loss", [-row[3] for row in rows if row[1]]),
        **summary("entropy", [row[4] for row in rows if row[1]]),
        **summary("vocab_min_logits", [row[5] for row in rows if row[2]]),
        **summary("vocab_max_logits", [row[6] for row in rows if row[2]]),
    }
    assert floats(sft_statistics(**e)) == pytest.approx(expected, rel=1e-13)


def test_by_hand() -> None:
    """Two sequences, a prompt token and a padding token.

    The probabilities are 1/2 and 1/8 in one sequence, a perplexity of 4, and 1/10 in the other.
    """
    e = {
        "logprobs": torch.tensor([0.25, 0.5, 0.125, 0.1, 0.01], dtype=torch.float64).log(),
        "entropy": torch.tensor([9.0, 1.0, 2.0, 6.0, 9.0], dtype=torch.float64),
        "vocab_min": torch.tensor([-8.0, -1.0, -2.0, -5.0, -99.0], dtype=torch.float64),
        "vocab_max": torch.tensor([8.0, 1.0, 2.0, 5.0, 99.0], dtype=torch.float64),
        "mask": torch.tensor([False, True, True, True, False]),
        "real": torch.tensor([True, True, True, True, False]),
        "sequence": torch.tensor([0, 0, 0, 1, 1]),
        "sequences": 2,
        "valid_sequences": torch.tensor(2),
        "real_tokens": torch.tensor(4),
        "valid_tokens": torch.tensor(3),
    }
    expected = {
        **dict(zip(COUNTS, (2, 4, 3, 1), strict=True)),
        **of_statistic("ppl", 7, 4, 10),
        **of_statistic("loss", math.log(160) / 3, math.log(2), math.log(10)),
        **of_statistic("entropy", 3, 1, 6),
        **of_statistic("vocab_min_logits", -4, -8, -1),
        **of_statistic("vocab_max_logits", 4, 1, 8),
    }
    assert floats(sft_statistics(**e)) == pytest.approx(expected, rel=1e-14)
    half = {name: torch.tensor(2 * n) for name, n in (("valid_sequences", 2), ("real_tokens", 4), ("valid_tokens", 3))}
    # The batch has as much again elsewhere.
    expected |= {f"{name}_avg": expected[f"{name}_avg"] / 2 for name in STATISTICS}
    assert floats(sft_statistics(**{**e, **half})) == pytest.approx(expected, rel=1e-14)


def test_each_average_has_its_own_count() -> None:
    e = example()
    once = sft_statistics(**e)
    for count, names in {
        "valid_sequences": STATISTICS[:1],
        "valid_tokens": STATISTICS[1:3],
        "real_tokens": STATISTICS[3:],
    }.items():
        changed = sft_statistics(**{**e, count: 2 * e[count]})
        assert {name for name in once if once[name] != changed[name]} == {f"{name}_avg" for name in names}


def test_loss_and_entropy_equal_nll_and_mean_entropy() -> None:
    e = example()
    found = sft_statistics(**e)
    assert float(found["loss_avg"]) == pytest.approx(float(nll(e["logprobs"], e["mask"], e["valid_tokens"])), rel=1e-15)
    assert float(found["entropy_avg"]) == pytest.approx(
        float(mean_entropy(e["entropy"], e["mask"], e["valid_tokens"])), rel=1e-15
    )


def test_perplexity_is_not_the_exp_of_the_average_loss() -> None:
    """The mean of exps is larger than the exp of the mean.

    A cut through a sequence changes the perplexity, but not the loss.
    """
    e = example()
    found = sft_statistics(**e)
    assert found["ppl_avg"] > found["loss_avg"].exp() + 0.01
    cut = {**e, "sequence": torch.tensor([0, 0, 4, 4, 1, 1, 2, 2, 3, 3]), "sequences": 5}
    assert abs(sft_statistics(**cut)["ppl_max"] - found["ppl_max"]) > 0.01
    assert sft_statistics(**cut)["loss_avg"] == found["loss_avg"]


def test_the_range_is_over_the_whole_vocabulary() -> None:
    logits = torch.tensor([[1.0, -3.0, 2.0, 7.0], [0.0, 0.0, -1.0, 0.0]], dtype=torch.float64)
    least, greatest = vocab_range(logits)
    assert least.tolist() == [-3, -1]
    assert greatest.tolist() == [7, 0]
    shards = [vocab_range(shard) for shard in logits.chunk(2, -1)]
    assert torch.equal(torch.minimum(shards[0][0], shards[1][0]), least)
    assert torch.equal(torch.maximum(shards[0][1], shards[1][1]), greatest)


def test_a_rank_with_padding_alone() -> None:
    """Such a rank adds nothing to sums, and its extremes lose to those of every other rank."""
    e = {**example(), "mask": torch.zeros(TOKENS, dtype=torch.bool), "real": torch.zeros(TOKENS, dtype=torch.bool)}
    found = floats(sft_statistics(**e))
    assert not any(found[name] for name in COUNTS)
    for name in STATISTICS:
        assert [found[f"{name}_{what}"] for what in ("avg", "min", "max")] == [0, math.inf, -math.inf]
    no_tokens = {**tokens_of(e, torch.zeros(TOKENS, dtype=torch.bool)), "sequences": 0}
    assert floats(sft_statistics(**no_tokens)) == found
    nowhere = {name: torch.tensor(0) for name in ("valid_sequences", "real_tokens", "valid_tokens")}
    assert floats(sft_statistics(**{**e, **nowhere})) == found


def test_a_rank_with_prompts_alone() -> None:
    e = {**example(), "mask": torch.zeros(TOKENS, dtype=torch.bool)}
    found = floats(sft_statistics(**e))
    assert [found[name] for name in COUNTS] == [0, 8, 0, 8]
    for name in ("ppl", "loss", "entropy"):
        assert [found[f"{name}_{what}"] for what in ("avg", "min", "max")] == [0, math.inf, -math.inf]
    assert {name: x for name, x in found.items() if name.startswith("vocab")} == {
        name: x for name, x in floats(sft_statistics(**example())).items() if name.startswith("vocab")
    }


def test_statistics_carry_no_gradient() -> None:
    e = example()
    found = sft_statistics(**{name: x.requires_grad_() if name in PER_TOKEN else x for name, x in e.items()})
    assert not any(x.requires_grad for x in found.values())
