# SPDX-License-Identifier: Apache-2.0
"""Tests that lossgate tells kernels apart that filter wrongly, or forget a part of the tokens.

Each mutant is one of our kernels with one thing changed.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fused_losses import filtering, linear_logprobs, token_stage, vocab_parallel
from fused_losses.filtering import LogitFilter
from fused_losses.softmax import TokenLogprobs
from lossgate import Layout
from lossgate.engine.cell import Cell
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import Verdict
from property_tests.kernels.our_candidates import OURS

Change = Callable[[pytest.MonkeyPatch], None]


def _with_results(of: Callable[[TokenLogprobs], TokenLogprobs]) -> Change:
    """Returns a change of what the losses get from the kernel."""

    def change(patch: pytest.MonkeyPatch) -> None:
        scope = OURS["fused_linear_grpo"].kernel.__globals__
        patch.setitem(scope, "linear_logprobs", lambda *a, **given: of(linear_logprobs(*a, **given)))

    return change


def _with_filter(of: Callable[[LogitFilter, Tensor], Tensor]) -> Change:
    """Returns a change of the bound, given the filter and logits on one rank."""
    return lambda patch: patch.setattr(LogitFilter, "bound", lambda self, logits, group: of(self, logits))


BOUND = LogitFilter.bound


def _top_p_of_all(filter_: LogitFilter, logits: Tensor) -> Tensor:
    bounds = [
        BOUND(part, logits, None)
        for part in (LogitFilter(filter_.top_k), LogitFilter(None, filter_.top_p))
        if part.filters
    ]
    return torch.stack(bounds).amax(0)


def _one_more(filter_: LogitFilter, logits: Tensor) -> Tensor:
    k = None if filter_.top_k is None else filter_.top_k + 1
    return BOUND(LogitFilter(k, filter_.top_p), logits, None)


MUTANTS: dict[str, Change] = {
    "the KL has filtered log-probabilities": _with_results(lambda found: found._replace(unfiltered_logprobs=None)),
    "the policy loss has unfiltered ones": _with_results(
        lambda found: found._replace(logprobs=found.unfiltered_logprobs)
    ),
    "a label left out counts with log-probability 0": _with_results(
        lambda found: found._replace(logprobs=torch.where(found.logprobs == -torch.inf, 0.0, found.logprobs))
    ),
    "top-p before top-k": _with_filter(_top_p_of_all),
    "one logit more than k": _with_filter(_one_more),
    "a filter of the next token": _with_filter(lambda filter_, z: BOUND(filter_, z, None).roll(1)),
}
ON_RANKS: dict[str, Change] = {
    "each rank filters its own rows": lambda patch: patch.setattr(
        LogitFilter, "bound", lambda self, logits, group: BOUND(self, logits, None)
    ),
    "ranks add up no probabilities": lambda patch: patch.setattr(filtering, "_sum", lambda x, group: x),
}
SPECS = {"clipped_pg": "fused_linear_clipped_pg", "grpo": "fused_linear_grpo"}


def verdict(name: str, layout: str = "single", examples: int = 12) -> Verdict:
    return run_cell(
        Cell(OURS[name], Layout.parse(layout), "float32"), Settings(examples=examples, shrink_calls=0)
    ).verdict


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_filters_disagree(monkeypatch: pytest.MonkeyPatch, spec: str, mutant: str) -> None:
    MUTANTS[mutant](monkeypatch)
    assert verdict(SPECS[spec]) is Verdict.DISAGREE


@pytest.mark.parametrize("mutant", ON_RANKS)
def test_wrong_filters_of_a_split_vocabulary_disagree(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    ON_RANKS[mutant](monkeypatch)
    assert verdict("fused_linear_logprobs", "tp=2", examples=40) is Verdict.DISAGREE


def _last_rows_lost(patch: pytest.MonkeyPatch) -> None:
    """Forward is right; backward leaves out the tokens of a chunk that is not full."""
    patch.setattr(
        vocab_parallel._Call,
        "logits",
        lambda self, logits, tokens: _zeroed(CALL_LOGITS(self, logits, tokens), tokens, self.chunk),
    )


CALL_LOGITS = vocab_parallel._Call.logits


def _zeroed(logits: Tensor, tokens: slice, chunk: int) -> Tensor:
    return logits if tokens.stop - tokens.start in (0, chunk) else logits.zero_()


CHUNK_MUTANTS: dict[str, Change] = {
    "a last chunk that is not full is lost": _last_rows_lost,
    "every chunk has the labels of the first": lambda patch: patch.setattr(
        token_stage.Saved, "part", lambda self, tokens: PART(self, slice(0, tokens.stop - tokens.start))
    ),
    "the temperature of backward is left out": lambda patch: patch.setattr(
        token_stage.Upstream,
        "of",
        classmethod(lambda cls, given, saved, temperature, products: UPSTREAM(given, saved, 1.0, products)),
    ),
    "padding columns get a gradient": lambda patch: patch.setattr(vocab_parallel.torch, "zeros_like", torch.ones_like),
    "the entropy has no gradient": lambda patch: patch.setattr(
        token_stage.Upstream,
        "of",
        classmethod(
            lambda cls, given, saved, temperature, products: UPSTREAM(
                (given[0], None, *given[2:]), saved, temperature, products
            )
        ),
    ),
}
PART, UPSTREAM = token_stage.Saved.part, token_stage.Upstream.of


@pytest.mark.parametrize("mutant", CHUNK_MUTANTS)
def test_wrong_chunks_disagree(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    CHUNK_MUTANTS[mutant](monkeypatch)
    assert verdict("fused_vocab_parallel_logprobs", "tp=2") is Verdict.DISAGREE


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["fused_vocab_parallel_logprobs", *SPECS.values()])
def test_the_kernels_themselves_agree(name: str) -> None:
    assert verdict(name) is Verdict.AGREE
