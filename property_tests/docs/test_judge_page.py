# SPDX-License-Identifier: Apache-2.0
"""judge.md and adequacy.md state the constants of the judge and of what must be seen."""

from math import log2

import pytest
from calibration_pieces import LAYOUTS, Sizes, all_pieces

from kernel_bank.known_right import known_right
from lossgate.adequacy import deck
from lossgate.adequacy.kills import UNCHANGED
from lossgate.adequacy.option_mutants import NEAREST
from lossgate.cases import float_range, kinks, large
from lossgate.engine import advice
from lossgate.judge import ensemble, logit_stage, pooling, streamed
from lossgate.judge.limits import ALIKE_FACTOR, BLOCK_FACTOR, FACTORS, scale_sigmas
from lossgate.judge.statistics import NOISE, WORST
from lossgate.judge.tolerance import PLANTED
from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.round_every_operation import _BETWEEN, _FILLED, _NAMES
from lossgate.numerics.torch_operations import SPELLED_OUT

from .markdown import ROOT

RIGHT = known_right()
TEXT = " ".join(" ".join((ROOT / f"docs/explanation/{page}.md").read_text() for page in ("judge", "adequacy")).split())
NUMBERS = {4: "four", 6: "six"}

STATED = {
    "members": f"an ensemble of {ensemble._FEWEST} to {ensemble._MOST} runs",
    "fewest members": f"at least {ensemble._FEWEST} runs",
    "float32": f"the unit roundoff of float32, 2^{log2(FLOAT32.unit):.0f}",
    "noise": f"| NOISE | `rms(d/s)` | {FACTORS[NOISE]:g} times the largest of the runs |",
    "worst": f"| WORST | `max abs(d/s)` | {FACTORS[WORST]:g} times the largest of the runs |",
    "block": f"at least 0 | {BLOCK_FACTOR:g} times the largest of the runs |",
    "alike": f"v is {ALIKE_FACTOR:g} times the larger SCALE of these two",
    "alike in noise": f"and NOISE and WORST at least {ALIKE_FACTOR:g} times theirs",
    "tiles of a logsumexp": f"put together from tiles of {logit_stage._COLUMNS} columns",
    "share of float16": f"numbers above a {1 / float_range._SHARE:.0f}th of it on the way",
    "deck": f"a **deck** of {deck.SIZE} problems",
    "further batches": f"further batches of {deck.SIZE}",
    "long problems": f"{large.MANY_TOKENS.tokens:,} tokens, {large.MANY_SEQUENCES.tokens} tokens in "
    f"{large.MANY_SEQUENCES.sequences} sequences, and {large.LARGE_VOCABULARY.tokens} tokens with a vocabulary of "
    f"{large.LARGE_VOCABULARY.vocab:,}",
    "fewest problems": f"A cell never agrees on fewer than {pooling.FEWEST} problems",
    "enough for advice": f"where {advice._ENOUGH} problems had its choice",
    "large": f"more than 2^{log2(large.LARGE):.0f} logits",
    "runs of large problems": f"{streamed._RUNS} of them forward",
    "runs back": f"At least {streamed._RUNS_BACK} of them go back",
    "few runs": f"which is {scale_sigmas(streamed._RUNS_BACK):g} standard deviations for {streamed._RUNS_BACK} runs",
    "kinks": f"by {NUMBERS[kinks._SIGMAS]} standard deviations of what rounding",
    "pooled": f"{pooling.SIGMAS:g} (1 + 60 / n^2) standard deviations of the pooled scale",
    "floor": f"a {1 / pooling.FLOOR:.0f}th of the unit roundoff, and at least 2^{log2(pooling.FLOAT32_FLOOR):.0f}",
    "pooled noise": f"Its limit is {pooling.LARGEST:g} + {pooling.MORE:.0f} / n, "
    f"and fewer than {pooling.FEWEST} problems say nothing",
    "mde": f"An error of {pooling.LARGEST_MDE:.0%} in the scale",
    "equivalent": f"on each of {UNCHANGED} problems",
    "nearest": f"within {NEAREST:g} of each other",
    "kernels": f"holds {len(RIGHT)} kernels, of every spec at every head",
    "kernels and dtypes": f"and {sum(len(kernel.dtypes) for kernel in RIGHT)} pairs of kernel and dtype",
    "layouts": f"in each of its dtypes, on {len(LAYOUTS)} layouts of up to eight ranks",
    "problems": f"run on {Sizes.problems} problems each, and on {Sizes.wrong} of them every bug",
    "pieces": f"With three seeds there are {len(all_pieces(range(3), RIGHT)):,} pieces",
}


@pytest.mark.parametrize("words", STATED.values(), ids=STATED)
def test_constants(words: str) -> None:
    assert words in TEXT


@pytest.mark.parametrize("runs", [12, 32])
def test_the_limit_of_the_scale(runs: int) -> None:
    assert "v + 5 (1 + 8/M) standard deviations of the M runs" in TEXT
    assert scale_sigmas(runs) == 5 * (1 + 8 / runs)


def test_operations_that_are_spelled_out() -> None:
    assert "such as `softmax`, `logaddexp`, `var` and the backward of `log_softmax`, are spelled out" in TEXT
    assert {"_softmax", "logaddexp", "var", "_log_softmax_backward_data"} <= SPELLED_OUT.keys()
    assert "_log_softmax" not in SPELLED_OUT


def test_operations_whose_float_is_rounded() -> None:
    said = "adds, subtracts, multiplies or divides with, takes a power of, clamps or fills with, is rounded once in"
    assert said in TEXT
    assert {"add", "sub", "mul", "div", "pow"} <= _NAMES
    assert "clamp" in _BETWEEN
    assert "full" in _FILLED


def test_planted_errors() -> None:
    said = "the result times 1.01, times 0.99, zero, and without the part of one token or of one vocabulary tile"
    assert said in TEXT
    assert list(PLANTED) == ["x1.01", "x0.99", "zero", "token dropped", "vocab tile dropped"]
