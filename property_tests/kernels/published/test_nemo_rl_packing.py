# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's published tests of its fused packing, made again from their description.

There (NVIDIA-NeMo/RL, tests/unit/algorithms/test_sequence_packing_fusion.py), one loss call for a
pack equals one call for each sequence within 1e-5: 4 rows of 512, a vocabulary of 512, six layouts
of cp and tp, ``ClippedPGLossConfig()``, generation's log-probabilities as the reference's; and on
four layouts with top-k 8 and top-p 0.9, where metrics agree too. Gradients of logits are compared
on each rank alone, both paths are their own, and old log-probabilities are near 0 where the
policy's are near -7, so that ratios vanish and KL estimates are clamped.

Also there: test_sequence_packing_gradients.py (dual clip and a KL weight of 0.1, a vocabulary of
1000, cp 1 and 2, packed gradients summed over ranks within 1e-5), test_model_utils.py (packed
log-probabilities of 4 sequences, in chunks of 8, tp or cp 2, within 1e-5; the all-gather over cp),
and a row of 7040 tokens whose sequence has 9472, which once crashed.

float32 does not hold the hundredth, 1e-7: losses are within 8e-7 of their size there, gradients
within 5e-7 of the largest. So these tests are in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import dense_losses
from fused_losses import ClippedPGConfig, Metrics, Pack, clipped_pg_loss, vocab_parallel_logprobs
from lossgate import Layout
from lossgate.losses.clipped_pg import ClippedPgOptions
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import packed, starts
from property_tests.kernels.published.comparison import assert_agrees

MakeWorld = Callable[..., SimulatedWorld]

PUBLISHED = 1e-5
B, S = 4, 512
LAYOUTS = ["single", "tp=2", "cp=2", "cp=2,tp=2", "cp=2,tp=4", "cp=4,tp=2"]
SAMPLING: dict[str, Any] = {"top_k": 8, "top_p": 0.9}
FIELDS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")


@dataclass(frozen=True)
class Case:
    """What one of their tests computes the loss of."""

    lengths: tuple[int, ...] = (S // 4, S // 2, S // 3, 3 * S // 4)
    vocab: int = 512
    near: bool = True
    """Whether old and other policies are near the policy; in theirs they are near 0."""
    distance: float = 0.2
    """How far the old policy is, in nats."""
    sampling: bool = False
    """Whether top-k and top-p are on."""
    options: tuple[tuple[str, float], ...] = ()

    @property
    def filter(self) -> dict[str, Any]:
        return SAMPLING if self.sampling else {}

    @property
    def config(self) -> dict[str, Any]:
        return {**dict(self.options), "epsilon": 1e-8}

    @property
    def valid_tokens(self) -> int:
        return sum(self.lengths) - B

    def padded(self, layout: Layout) -> list[int]:
        """Returns padded lengths: multiples of 2 cp, the last of which fills the bin if cp > 1."""
        multiple = 2 * layout.cp if layout.cp > 1 else 1
        padded = [-(-length // multiple) * multiple for length in self.lengths]
        padded[-1] += B * S - sum(padded) if layout.cp > 1 else 0
        return padded


CASES = {
    "as published": Case(near=False),
    "near the old policy": Case(),
    "dual clip, V=1000": Case(
        lengths=(S // 4, S // 4, S // 4, 3 * S // 4),
        vocab=1000,
        distance=1.5,
        options=(("reference_policy_kl_penalty", 0.1), ("ratio_clip_c", 3.0)),
    ),
    "sampling, as published": Case(near=False, sampling=True),
    "sampling": Case(sampling=True),
}


@dataclass
class Batch:
    """Rows ``[4, 512]`` as NeMo-RL has them: entries describe a token, not the prediction of it."""

    case: Case
    ids: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    fields: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case, generator = self.case, torch.Generator().manual_seed(42)
        self.logits = torch.randn(B, S, case.vocab, generator=generator, dtype=torch.float64)
        self.ids = torch.randint(case.vocab, (B, S), generator=generator)
        if case.sampling and case.near:
            # Random ids are nearly all filtered out. These are among the 10 likeliest.
            rank = torch.randint(10, (B, S - 1, 1), generator=generator)
            self.ids[:, 1:] = self.logits[:, :-1].topk(10).indices.gather(2, rank).squeeze(2)
        policy = torch.zeros(B, S, dtype=torch.float64)
        if case.near:
            flat = self.logits[:, :-1].reshape(-1, case.vocab), self.ids[:, 1:].flatten()
            policy[:, 1:] = dense_losses.filtered_token_logprobs(*flat, **case.filter).view(B, S - 1)
        noise = 0.1 * torch.randn(3, B, S, generator=generator, dtype=torch.float64)
        generation = policy.clamp(min=-5) + 2 * noise[2]
        self.fields = dict(
            zip(
                FIELDS,
                (10 * noise[0], policy + 10 * case.distance * noise[1], generation, generation.clone()),
                strict=True,
            )
        )

    @property
    def mask(self) -> Tensor:
        """``[4, 512]`` numbers 0 and 1, as theirs."""
        return (torch.arange(S) < torch.tensor(self.case.lengths)[:, None]).float()


def loss_of(
    case: Case, found: Any, fields: dict[str, Tensor], sequence: Tensor, **given: Any
) -> tuple[Tensor, Metrics]:
    return clipped_pg_loss(
        found.logprobs,
        unfiltered_logprobs=found.unfiltered_logprobs,
        **fields,
        sequence=sequence,
        valid_tokens=case.valid_tokens,
        valid_sequences=B,
        config=ClippedPGConfig(**case.config),
        **given,
    )


Expected = tuple[Tensor, Tensor, dict[str, Tensor]]


@cache
def reference(name: str) -> Expected:
    """Computes loss, gradient of logits and metrics by the dense references, without a pack."""
    case = CASES[name]
    batch = Batch(case)
    logits, lengths = batch.logits.requires_grad_(), case.lengths
    rows = torch.cat([logits[i, : length - 1] for i, length in enumerate(lengths)])

    def of_tokens(x: Tensor) -> Tensor:
        return torch.cat([x[i, 1:length] for i, length in enumerate(lengths)])

    loss, metrics = dense_losses.clipped_pg(
        logprobs=dense_losses.filtered_token_logprobs(rows, of_tokens(batch.ids), **case.filter),
        unfiltered_logprobs=dense_losses.token_logprobs(rows, of_tokens(batch.ids)),
        **{field: of_tokens(x) for field, x in batch.fields.items()},
        mask=torch.ones(len(rows), dtype=torch.bool),
        sequence=torch.arange(B).repeat_interleave(torch.tensor(lengths) - 1),
        sample_mask=torch.ones(B, dtype=torch.bool),
        valid_tokens=torch.tensor(case.valid_tokens),
        valid_sequences=torch.tensor(B),
        options=ClippedPgOptions(**case.config),
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    del metrics["loss"]
    return loss.detach(), gradient, metrics


@cache
def unfused(name: str) -> Expected:
    """Computes the same by the kernels, one sequence at a time."""
    case = CASES[name]
    batch, total, metrics = Batch(case), torch.zeros((), dtype=torch.float64), Metrics()
    logits = batch.logits.requires_grad_()
    for i, length in enumerate(case.lengths):
        ids, own = batch.ids[i, 1:length], slice(1, length)
        found = vocab_parallel_logprobs(logits[i, : length - 1], ids, unfiltered=True, **case.filter)
        loss, parts = loss_of(
            case,
            found,
            {field: x[i, own] for field, x in batch.fields.items()},
            torch.zeros_like(ids),
            mask=batch.mask[i, own],
            sample_mask=torch.ones(1),
        )
        total, metrics = total + loss, metrics + parts
    (gradient,) = torch.autograd.grad(total, logits)
    return total.detach(), gradient, metrics.export()


@pytest.mark.parametrize("name", CASES)
def test_one_call_for_each_sequence_is_the_reference(name: str) -> None:
    assert_agrees(unfused(name), reference(name), PUBLISHED)


def settings() -> list[tuple[str, str, str]]:
    """Returns cases, layouts and forms of the rows: all of theirs, and packed ids once."""
    two = [(name, layout, "rows") for name in ("as published", "near the old policy") for layout in LAYOUTS]
    two += [("dual clip, V=1000", layout, "rows") for layout in ("single", "cp=2")]
    two += [(name, layout, "rows") for name in CASES if "sampling" in name for layout in LAYOUTS[:4]]
    return two + [(name, layout, "[1, T]") for name in ("sampling", "near the old policy") for layout in LAYOUTS[3:5]]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(("name", "layout", "form"), settings())
def test_one_call_for_a_pack_is_one_for_each_sequence(make_world: MakeWorld, name: str, layout: str, form: str) -> None:
    """Loss, gradients of every rank's logits and metrics are those of single sequences.

    The reference and both paths agree. The gradient is not zero, since graphs that are all cut
    would agree; and the upstream gradient is not 1.
    """
    case, shape = CASES[name], Layout.parse(layout)
    batch, padded, width = Batch(case), case.padded(shape), case.vocab // shape.tp
    one_by_one, dense = unfused(name), reference(name)

    def body(context: RankContext) -> tuple[Tensor, Tensor, Metrics]:
        tp_group, cp_group = context.mesh.get_group("tp"), context.mesh.get_group("cp")
        pack = Pack.of(starts(list(case.lengths)), starts(padded), cp_group=cp_group)

        def as_given(rows: Tensor) -> Tensor:
            return rows if form == "rows" else packed(rows, list(case.lengths), padded, form, padding=1)

        own = slice(width * tp_group.rank(), width * (tp_group.rank() + 1))
        # NeMo-RL's packed logits are [1, T / cp, V / tp]; rows of padding hold zeros.
        logits = pack.from_rows(as_given(batch.logits), shift=0)[None, :, own].detach().requires_grad_()
        found = vocab_parallel_logprobs(
            logits[0],
            pack.labels(as_given(batch.ids)),
            vocab_start=own.start,
            tp_group=tp_group,
            unfiltered=True,
            chunk=100,
            **case.filter,
        )
        loss, metrics = loss_of(
            case,
            found,
            {field: pack.from_rows(as_given(x), shift=1) for field, x in batch.fields.items()},
            pack.sequence,
            mask=pack.from_rows(as_given(batch.mask), shift=1),
            sample_mask=torch.ones(B),
            cp_group=cp_group,
        )
        (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(-3.0, dtype=torch.float64))
        for _, expected, _ in (one_by_one, dense):
            assert_agrees(gradient[0], -3 * pack.from_rows(expected, shift=0)[:, own], PUBLISHED)
        assert gradient.abs().max() > 0
        return loss.detach(), gradient, metrics.reduce(cp_group)

    for rank, (_, _, metrics) in enumerate(results := make_world(layout).run(body)):
        same_tp = [r for other, r in enumerate(results) if tp_of(shape, other) == tp_of(shape, rank)]
        total = torch.stack([loss for loss, *_ in same_tp]).sum()
        for loss, _, expected in (one_by_one, dense):
            assert_agrees(total, loss, PUBLISHED)
            assert_agrees(metrics.export(), expected, PUBLISHED)


def tp_of(layout: Layout, rank: int) -> int:
    return layout.coordinate(rank)["tp"]


@pytest.mark.parametrize("layout", ["tp=2", "cp=2"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_packed_log_probabilities_are_those_of_rows(make_world: MakeWorld, layout: str, chunk: int | None) -> None:
    """Four sequences of 24, 48, 16 and 40 tokens; shifted before the split, or in rows after it."""
    lengths, width, vocab = [24, 48, 16, 40], 48, 1024
    generator = torch.Generator().manual_seed(42)
    logits = torch.randn(B, width, vocab, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocab, (B, width), generator=generator)
    of_rows = dense_losses.token_logprobs(logits[:, :-1].reshape(-1, vocab), ids[:, 1:].flatten()).view(B, -1)
    inside = torch.arange(1, width) < torch.tensor(lengths)[:, None]

    def body(context: RankContext) -> Tensor:
        tp_group, cp_group = context.mesh.get_group("tp"), context.mesh.get_group("cp")
        pack = Pack.of(starts(lengths), cp_group=cp_group)
        own = slice(vocab // tp_group.size() * tp_group.rank(), vocab // tp_group.size() * (tp_group.rank() + 1))
        found = vocab_parallel_logprobs(
            pack.from_rows(logits, shift=0)[:, own],
            pack.labels(ids),
            vocab_start=own.start,
            tp_group=tp_group,
            chunk=chunk,
        )
        return pack.to_rows(found.logprobs, width, cp_group)

    for rows in make_world(layout).run(body):
        assert_agrees(rows[:, :-1], torch.where(inside, of_rows, 0.0), PUBLISHED)


def test_the_all_gather_over_cp_keeps_values_and_gradients(make_world: MakeWorld) -> None:
    """Theirs divides the gradient by cp afterwards; here it is that of the loss at once."""
    rows, length, width = 2, 8, 16
    whole = torch.arange(rows * length * width, dtype=torch.float64).view(-1, width)

    def body(context: RankContext) -> None:
        group = context.mesh.get_group("cp")
        pack = Pack.of(starts([length] * rows), cp_group=group)
        own = pack.split(whole).requires_grad_()
        gathered = pack.gather(own, group)
        assert_agrees(gathered, whole, PUBLISHED)
        (gradient,) = torch.autograd.grad(gathered.square().sum(), own)
        assert_agrees(gradient, 2 * own, PUBLISHED)

    make_world("cp=2").run(body)


def test_a_sequence_may_be_longer_than_its_row() -> None:
    """The padding of the last sequence fills the bin, and lengths are given with it."""
    width, inflated = 7040, 9472
    ids = torch.arange(1, width + 1)[None]
    labels = Pack.of(torch.tensor([0, inflated]), row_width=width).labels(ids)
    assert torch.equal(labels[: width - 1], ids[0, 1:])
    assert (labels[width - 1 :] == -100).all()
    assert len(labels) == inflated
