# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's published tests of its fused packing, made again from their description.

Sizes, lengths, layouts and the default loss are theirs. They hold the fused path to the unfused one
within 1e-5, on GPUs, and compare gradients of each rank alone. Here a pack over ranks is held to
dense losses of single sequences, in float64.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_losses import ClippedPGConfig, Pack, clipped_pg_loss, vocab_parallel_logprobs
from lossgate import Layout
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import packed, starts

S = VOCAB = 512
LENGTHS = [S // 4, S // 2, S // 3, 3 * S // 4]
TIGHT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-14}


class Batch:
    """Rows ``[4, 512]`` as NeMo-RL has them: entries describe a token, not the prediction of it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(VOCAB, (len(LENGTHS), S), generator=generator)
        self.logits = torch.randn(len(LENGTHS), S, VOCAB, generator=generator, dtype=torch.float64)
        self.mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
        of_others = torch.randn(3, len(LENGTHS), S, generator=generator, dtype=torch.float64)
        advantages, prev, generation = of_others
        self.fields = {
            "advantages": advantages,
            "prev_logprobs": prev - 5,
            "generation_logprobs": generation - 5,
            "reference_logprobs": generation - 5,
        }


def loss_of(logprobs: Tensor, fields: dict[str, Tensor], sequence: Tensor, **given: Any) -> Any:
    return clipped_pg_loss(
        logprobs,
        **fields,
        sequence=sequence,
        valid_tokens=sum(LENGTHS) - len(LENGTHS),
        valid_sequences=len(LENGTHS),
        config=ClippedPGConfig(),
        **given,
    )


@cache
def unfused() -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
    """Returns the loss, the gradient of logits, and each sequence's metrics, one by one."""
    batch, total, metrics = Batch(), torch.zeros((), dtype=torch.float64), dict[str, list[Tensor]]()
    logits = batch.logits.requires_grad_()
    for i, length in enumerate(LENGTHS):
        ids = batch.ids[i, 1:length]
        logprobs = logits[i, : length - 1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
        fields = {name: values[i, 1:length] for name, values in batch.fields.items()}
        one = torch.ones(1, dtype=torch.bool)
        loss, found = loss_of(logprobs, fields, torch.zeros_like(ids), mask=batch.mask[i, 1:length], sample_mask=one)
        total = total + loss
        for name, metric in found.items():
            metrics.setdefault(name, []).append(metric)
    (gradient,) = torch.autograd.grad(total, logits)
    return total.detach(), gradient, metrics


@pytest.mark.parametrize("form", ["rows", "[1, T]"])
@pytest.mark.parametrize("layout", ["single", "tp=2", "cp=2", "cp=2,tp=2", "cp=2,tp=4", "cp=4,tp=2"])
def test_a_pack_of_nemo_rls_sizes_equals_its_sequences(
    make_world: Callable[..., SimulatedWorld], layout: str, form: str
) -> None:
    """Loss, gradient of every rank's logits, and metrics are equal; the gradient is not zero."""
    shape = Layout.parse(layout)
    multiple = (2 * shape.cp if shape.cp > 1 else 1) * shape.tp
    padded = [-(-length // multiple) * multiple for length in LENGTHS]
    batch, (expected, of_logits, parts) = Batch(), unfused()

    def body(context: RankContext) -> tuple[Tensor, dict[str, Tensor]]:
        tp_group, cp_group = context.mesh.get_group("tp"), context.mesh.get_group("cp")
        pack = Pack.of(starts(LENGTHS), starts(padded), cp_group=cp_group)

        def as_given(rows: Tensor) -> Tensor:
            return rows if form == "rows" else packed(rows, LENGTHS, padded, form, padding=1)

        own = slice(*(VOCAB * r // tp_group.size() for r in (tp_group.rank(), tp_group.rank() + 1)))
        logits = pack.from_rows(as_given(batch.logits), shift=0, fill=9)[:, own].requires_grad_()
        loss, metrics = loss_of(
            vocab_parallel_logprobs(
                logits, pack.labels(as_given(batch.ids)), vocab_start=own.start, tp_group=tp_group
            ).logprobs,
            {name: pack.from_rows(as_given(values), shift=1) for name, values in batch.fields.items()},
            pack.sequence,
            mask=pack.from_rows(as_given(batch.mask), shift=1),
            sample_mask=torch.ones(len(LENGTHS), dtype=torch.bool),
            cp_group=cp_group,
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(gradient, pack.from_rows(of_logits, shift=0)[:, own], **TIGHT)
        assert gradient.abs().max() > 0  # Two graphs that are both cut would agree.
        return loss.detach(), metrics

    results = make_world(layout).run(body)
    first = [r for rank, r in enumerate(results) if shape.coordinate(rank)["tp"] == 0]
    torch.testing.assert_close(torch.stack([loss for loss, _ in first]).sum(), expected, **TIGHT)
    for name, values in parts.items():
        torch.testing.assert_close(whole(name, [m[name] for _, m in first]), whole(name, values), **TIGHT)


def whole(name: str, parts: list[Tensor]) -> Tensor:
    stacked = torch.stack(parts)
    return stacked.amin() if name.endswith("_min") else stacked.amax() if name.endswith("_max") else stacked.sum()
