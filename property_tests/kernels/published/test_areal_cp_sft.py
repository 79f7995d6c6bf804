# SPDX-License-Identifier: Apache-2.0
"""AReaL's published tests of context-parallel SFT, made again from their description.

There (areal-project/AReaL, tests/test_reassemble_cp_logprobs.py and
tests/torchrun/run_vocab_parallel.py):

- A pack that is split over cp 2, 4 and 8 and put together again is the same, exactly, and gradients
  pass within 1e-5. The all-gather is mocked, so that a gradient too large by cp would not be seen.
- Log-probabilities and entropies from vocab-parallel logits equal log-softmax within 1e-5 on 2 and
  4 ranks: 4 rows of 16, 1024 ids; at temperature 0.7 and with logits of a hundred (512 ids, there
  within 1e-4); gradients (2 rows of 4, 128 ids); tokens in one to three dims (512 ids); in chunks
  of 5 with any upstream gradient (13 tokens, 3072 ids).
- Nothing compares loss, gradients or statistics across cp in a test. Counts and means were compared
  by hand in runs on 64 and 128 GPUs.

float32 does not hold the hundredth, 1e-7: log-probabilities near -7 are within 8e-7 there, and
entropies within 6e-7. So these tests are in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dense_losses
from dense_losses.sft_statistics import vocab_range
from fused_losses import Pack, SFTStatistics, linear_logprobs, linear_sft_loss, vocab_parallel_logprobs
from lossgate import Layout
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import starts
from property_tests.kernels.published.comparison import assert_agrees

MakeWorld = Callable[..., SimulatedWorld]

PUBLISHED = 1e-5


def normal(*shape: int, seed: int = 42) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths_of_a_large_batch() -> list[int]:
    return torch.randint(1, 9, (16,), generator=torch.Generator().manual_seed(42)).tolist()


PACKS: dict[str, list[int]] = {
    "one sequence": [16],
    "two": [32, 16],
    "three": [64, 32, 16],
    "equal": [8, 8, 8, 8],
    "16 sequences": lengths_of_a_large_batch(),
    "gradients": [4, 6],
    "weighted": [3, 5],
}
"""Lengths of sequences, in units of 2 cp."""


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PACKS)
def test_a_split_pack_is_put_together_again(make_world: MakeWorld, name: str, cp: int) -> None:
    """Exactly; and any loss that all ranks compute in full has the gradient of a rank's tokens."""
    lengths = [2 * cp * length for length in PACKS[name]]
    whole, upstream = normal(sum(lengths)), normal(sum(lengths), seed=1)

    def body(context: RankContext) -> Tensor:
        group = context.mesh.get_group("cp")
        pack = Pack.of(starts(lengths), cp_group=group)
        own = pack.split(whole).requires_grad_()
        gathered = pack.gather(own, group)
        assert torch.equal(gathered, whole)
        (gradient,) = torch.autograd.grad(gathered, own, upstream)
        assert torch.equal(gradient, pack.split(upstream))
        return pack.index

    # Each token is on one rank.
    assert torch.cat(make_world(f"cp={cp}").run(body)).sort().values.tolist() == list(range(sum(lengths)))


SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "[4, 16, 1024]": ((4, 16, 1024), {}),
    "[4, 16, 1024], T=0.7": ((4, 16, 1024), {"temperature": 0.7}),
    "[2, 8, 512], T=0.7": ((2, 8, 512), {"temperature": 0.7}),
    "[2, 4, 128]": ((2, 4, 128), {}),
    "[64, 512]": ((64, 512), {}),
    "[32, 512]": ((32, 512), {}),
    "[4, 16, 512]": ((4, 16, 512), {}),
    "[13, 3072], T=0.7, chunks": ((13, 3072), {"temperature": 0.7, "chunk": 5}),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize("name", SHAPES)
def test_vocab_parallel_log_probabilities_and_entropies(make_world: MakeWorld, name: str, scale: int, tp: int) -> None:
    """Values and gradients, from logits and from hidden states that make them."""
    shape, options = SHAPES[name]
    temperature = options.get("temperature", 1.0)
    logits = (scale * normal(*shape)).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(123))
    upstream = (normal(*labels.shape, seed=2), normal(*labels.shape, seed=3))
    flat = logits.flatten(0, -2)
    expected = (
        dense_losses.token_logprobs(flat, labels.flatten(), temperature).view(labels.shape),
        dense_losses.token_entropy(flat, temperature).view(labels.shape),
    )
    (gradient,) = torch.autograd.grad(expected, logits, upstream)

    def body(context: RankContext) -> Tensor:
        width = shape[-1] // tp
        own = logits[..., width * context.rank : width * (context.rank + 1)].detach().requires_grad_()
        given = {"vocab_start": width * context.rank, "tp_group": context.mesh.get_group("tp"), "entropy": True}
        found = vocab_parallel_logprobs(own, labels, **given, **options)
        hidden, weight = torch.eye(labels.numel()).double(), own.detach().flatten(0, -2).T.contiguous()
        fused = linear_logprobs(hidden, weight.requires_grad_(), labels.flatten(), **given, **options)
        for values in (found, fused):
            assert values.entropy is not None
            assert_agrees([values.logprobs.view(labels.shape), values.entropy.view(labels.shape)], expected, PUBLISHED)
        of_weight = torch.autograd.grad([*fused[:2]], weight, [u.flatten() for u in upstream])[0]
        of_logits = torch.autograd.grad([*found[:2]], own, [*upstream])[0]
        assert_agrees(of_weight.T.reshape(own.shape), of_logits, PUBLISHED)
        return of_logits

    assert_agrees(torch.cat(make_world(f"tp={tp}").run(body), -1), gradient, PUBLISHED)


class Corpus:
    """Sequences with prompts as AReaL packs them: ids ``[T]`` in one dim.

    Some sequences have no trained tokens. The mask says which tokens are trained, and is rolled for
    the labels. No first token of a sequence is trained.
    """

    VOCAB, WIDTH = 64, 8

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.lengths = [13, 40, 7, 1, 24, 16, 33, 2]
        self.ids = torch.randint(self.VOCAB, (sum(self.lengths),), generator=generator)
        self.hidden = normal(sum(self.lengths), self.WIDTH, seed=8)
        self.weight = normal(self.VOCAB, self.WIDTH, seed=9)
        trained = [torch.arange(n) >= (n if i % 3 == 2 else max(1, n // 2)) for i, n in enumerate(self.lengths)]
        self.mask = torch.cat(trained)

    @property
    def valid_tokens(self) -> int:
        return int(self.mask.sum())


def reference(corpus: Corpus) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    """Computes loss, gradients of hidden states and weight, and statistics of the whole corpus."""
    hidden, weight = corpus.hidden.clone().requires_grad_(), corpus.weight.clone().requires_grad_()
    logits = dense_losses.linear_logits(hidden, weight)
    sequence = torch.arange(len(corpus.lengths)).repeat_interleave(torch.tensor(corpus.lengths))
    # The label of a token is the next one. The last of a sequence gets one that is not trained.
    logprobs = dense_losses.token_logprobs(logits, corpus.ids.roll(-1), 0.7)
    mask, valid = corpus.mask.roll(-1), torch.tensor(corpus.valid_tokens)
    loss = dense_losses.nll(logprobs, mask, valid, epsilon=1e-5)
    low, high = vocab_range(logits)
    statistics = dense_losses.sft_statistics(
        logprobs=logprobs,
        entropy=dense_losses.token_entropy(logits, 0.7),
        vocab_min=low,
        vocab_max=high,
        mask=mask,
        real=torch.ones_like(mask),
        sequence=sequence,
        sequences=len(corpus.lengths),
        valid_sequences=torch.tensor(len(sequence[mask].unique())),
        real_tokens=torch.tensor(len(mask)),
        valid_tokens=valid,
    )
    return loss.detach(), torch.autograd.grad(loss, [hidden, weight]), statistics


def of_rank(
    corpus: Corpus, which: list[int], context: RankContext, logits: bool, padding: int
) -> tuple[Tensor, Tensor, Tensor, SFTStatistics]:
    """Computes loss, gradients of all hidden states and of weight, and statistics of a rank.

    Args:
        corpus: the whole one.
        which: the sequences of this dp rank.
        context: of the rank.
        logits: whether to form this rank's logits.
        padding: padded lengths are multiples of so many times 2 cp.
    """
    cp_group, tp_group = context.mesh.get_group("cp"), context.mesh.get_group("tp")
    multiple = 2 * cp_group.size() * padding
    lengths = [corpus.lengths[i] for i in which]
    padded = [-(-length // multiple) * multiple for length in lengths]
    # As in AReaL, a dummy sequence ends the pack.
    pack = Pack.of(starts([*lengths, multiple]), starts([*padded, multiple]), cp_group=cp_group, tail=1)
    first = starts(corpus.lengths)
    tokens = torch.cat([torch.arange(int(first[i]), int(first[i + 1])) for i in which])

    def own(x: Tensor, shift: int, fill: float = 0) -> Tensor:
        return pack.from_rows(torch.cat([x[tokens], x.new_ones(multiple, *x.shape[1:])]), shift=shift, fill=fill)

    place = own(torch.arange(len(corpus.ids)), 0, fill=-1)
    hidden = own(corpus.hidden, 0, fill=float("nan")).requires_grad_()
    width = corpus.VOCAB // tp_group.size()
    weight = corpus.weight[width * tp_group.rank() : width * (tp_group.rank() + 1)].clone().requires_grad_()
    labels, mask = own(corpus.ids, 1, fill=-100), own(corpus.mask, 1)
    split: dict[str, Any] = {"vocab_start": width * tp_group.rank(), "tp_group": tp_group, "temperature": 0.7}
    where: dict[str, Any] = {
        "mask": mask,
        "real": pack.real,
        "sequence": pack.sequence,
        "sequences": pack.sequences,
        "cp_group": cp_group,
    }
    if logits:
        partial = hidden.nan_to_num() @ weight.T
        found = vocab_parallel_logprobs(partial, labels, entropy=True, logit_range=True, **split)
        loss = -torch.where(mask, found.logprobs, 0.0).sum() / (corpus.valid_tokens + 1e-5)
        statistics = SFTStatistics.of(found, **where)
    else:
        loss, statistics = linear_sft_loss(
            hidden, weight, labels, valid_tokens=corpus.valid_tokens, epsilon=1e-5, chunk=20, **split, **where
        )
    of_hidden, of_weight = torch.autograd.grad(loss, [hidden, weight])
    of_all = torch.zeros_like(corpus.hidden).index_add(0, place.clamp(min=0), of_hidden * (place >= 0)[:, None])
    return loss.detach(), of_all, of_weight, statistics


@pytest.mark.parametrize("path", ["fused", "from logits"])
@pytest.mark.parametrize("padding", [1, 3])
@pytest.mark.parametrize(
    "layout", ["single", "cp=2", "cp=4", "cp=8", "tp=2", "cp=4,tp=2", "cp=2,tp=4", "dp=2,cp=2", "dp=2,cp=2,tp=2"]
)
def test_sft_does_not_depend_on_the_layout(make_world: MakeWorld, layout: str, padding: int, path: str) -> None:
    """Loss, gradients, counts, and mean, minimum and maximum of all statistics.

    One dp rank has only sequences without trained tokens.
    """
    corpus, shape = Corpus(), Layout.parse(layout)
    every = list(range(len(corpus.lengths)))

    def body(context: RankContext) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        dp, cp = context.mesh.get_group("dp"), context.mesh.get_group("cp")
        which = every if dp.size() == 1 else [i for i in every if (i % 3 == 2) == (dp.rank() == 1)]
        loss, of_hidden, of_weight, statistics = of_rank(corpus, which, context, path == "from logits", padding)
        return loss, of_hidden, of_weight, statistics.reduce(cp, dp).export()

    results = make_world(layout).run(body)
    loss, (of_hidden, of_weight), statistics = reference(corpus)
    of_tp = [[r for rank, r in enumerate(results) if shape.coordinate(rank)["tp"] == tp] for tp in range(shape.tp)]
    for ranks in of_tp:
        assert_agrees(torch.stack([rank[0] for rank in ranks]).sum(), loss, PUBLISHED)
    # From logits, each tp rank has a part of the gradient of hidden states.
    shares = [torch.stack([rank[1] for rank in ranks]).sum(0) for ranks in of_tp]
    assert_agrees(torch.stack(shares).sum(0) if path == "from logits" else shares[0], of_hidden, PUBLISHED)
    assert_agrees(torch.cat([torch.stack([rank[2] for rank in ranks]).sum(0) for ranks in of_tp]), of_weight, PUBLISHED)
    for *_, found in results:
        assert_agrees(found, statistics, PUBLISHED)
