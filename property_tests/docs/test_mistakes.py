# SPDX-License-Identifier: Apache-2.0
"""migrating.md on mistakes in calls: the message of each that is refused, a check for each other.

Each mistake is made here, in a trainer of few tokens.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fused_losses import (
    ClippedPGConfig,
    Pack,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
)
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import FakeGroup

from .markdown import ROOT

MakeWorld = Callable[[str], SimulatedWorld]

# A batch of two pairs, as trainers hold it: ids and masks of tokens, not shifted

ROWS, LENGTH, WIDTH, VOCAB, RESPONSE = 4, 6, 8, 11, 100
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(VOCAB - 1, (ROWS, LENGTH), generator=GENERATOR)
TOKEN_MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]])
HIDDEN = torch.randn(ROWS, LENGTH, WIDTH, generator=GENERATOR, dtype=torch.float64)
WEIGHT = torch.randn(VOCAB, WIDTH, generator=GENERATOR, dtype=torch.float64).requires_grad_()
ADVANTAGES = torch.linspace(-1, 1, ROWS * LENGTH, dtype=torch.float64)
SEQUENCE = torch.arange(ROWS).repeat_interleave(LENGTH)

LABELS = F.pad(IDS[:, 1:], (0, 1), value=-100)
MASK = F.pad(TOKEN_MASK[:, 1:], (0, 1))
COUNT = int(MASK.sum())


def sft(hidden: Tensor = HIDDEN, weight: Tensor = WEIGHT, **changes: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, **{"labels": LABELS, "mask": MASK, "valid_tokens": COUNT, **changes})


def logprobs_of(labels: Tensor = LABELS, **options: Any) -> Tensor:
    return linear_logprobs(HIDDEN, WEIGHT, labels, **options).logprobs.flatten()


def old_logprobs(**options: Any) -> Tensor:
    with torch.no_grad():
        return logprobs_of(**options)


def grpo(**changes: Any) -> tuple[Tensor, Any]:
    given = {"advantages": ADVANTAGES, "mask": MASK.flatten(), "valid_tokens": COUNT, "beta": 0, **changes}
    return grpo_loss(logprobs_of(temperature=0.7), **given)


def gspo(**changes: Any) -> tuple[Tensor, Any]:
    config = ClippedPGConfig(
        sequence_level_importance_ratios=True, token_level_loss=False, reference_policy_kl_penalty=0
    )
    policies = dict.fromkeys(("prev_logprobs", "generation_logprobs"), old_logprobs())
    given = {**_pairs(), **policies, "advantages": ADVANTAGES, "valid_tokens": COUNT, "config": config, **changes}
    return clipped_pg_loss(logprobs_of(), **given)


def dpo(logprobs: Tensor | None = None, **changes: Any) -> tuple[Tensor, Any]:
    given = {"reference_logprobs": old_logprobs(), **_pairs(), **changes}
    return dpo_loss(logprobs_of() if logprobs is None else logprobs, **given)


def _pairs() -> dict[str, Any]:
    mask = MASK.flatten()
    return {"mask": mask, "sequence": SEQUENCE, "sample_mask": torch.ones(ROWS), "valid_sequences": ROWS}


def split_pack() -> Pack:
    """Returns the pack of the first of two cp ranks, whose rows are twice as long."""
    return Pack.of(torch.arange(ROWS + 1) * 2 * LENGTH, cp_group=FakeGroup(2, 0))  # type: ignore[arg-type]


REFUSED: dict[str, Callable[[], Any]] = {
    "pairs counted for sequences": lambda: dpo(valid_sequences=ROWS // 2),
    "the count of another mask, or of one rank's share": lambda: grpo(valid_tokens=COUNT - 1),
    "a count that a mask in bfloat16 has rounded": lambda: sft(valid_tokens=MASK.bfloat16().sum()),
    "the last token of a sequence left in the mask": lambda: sft(mask=TOKEN_MASK),
    "`cp_group` forgotten in a loss of a `Pack`": lambda: gspo(sequence=split_pack().sequence),
    "`tp_group` forgotten": lambda: sft(weight=WEIGHT[: VOCAB // 2]),
    "`vocab_start` forgotten": lambda: sft(weight=WEIGHT[: VOCAB // 2], tp_group=FakeGroup(2, 0)),
    "weights, or NaN, in place of a mask": lambda: grpo(mask=MASK.flatten() * 0.5),
    "Megatron's `[S, B, H]` without `layout`": lambda: sft(HIDDEN.transpose(0, 1)),
    "the policy's own log-probabilities as the old ones": lambda: grpo(old_logprobs=logprobs_of(temperature=0.7)),
    "lengths with padding given as true lengths": lambda: split_pack().from_rows(TOKEN_MASK, shift=1),
    "a switch for off, as -1 for top-k": lambda: logprobs_of(top_k=-1),
    "a name of the original": lambda: dpo(beta=0.1),
}

TEXT = (ROOT / "docs/how-to/migrating.md").read_text()


def table(header: str) -> dict[str, list[str]]:
    """Returns the other cells of a table's rows by the first."""
    found = re.search(rf"^\| {header} \|.*\n\|-.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert found
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    return {first: others for first, *others in rows}


def test_every_mistake_of_the_page_is_made_here() -> None:
    assert list(table("mistake that is refused")) == list(REFUSED)
    assert list(table("mistake that is silent")) == list(SEEN)


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused_with_the_message_of_the_page(mistake: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        REFUSED[mistake]()
    (shown,) = re.findall("`([^`]+)`", table("mistake that is refused")[mistake][0])
    assert str(raised.value).startswith(shown)


def test_the_same_calls_without_mistakes_pass() -> None:
    sft()
    grpo(old_logprobs=old_logprobs(temperature=0.7))
    gspo()
    dpo()
    split_pack().from_rows(TOKEN_MASK.repeat(1, 2), shift=1)


# Checks that see what is silent. Each returns whether it is content.


def close(found: Tensor | float, expected: Tensor | float) -> bool:
    first, second = (x.item() if isinstance(x, Tensor) else x for x in (found, expected))
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)


def decoded(labels: Tensor, mask: Tensor) -> bool:
    """Whether the first label that counts is the first token of the response, in each row."""
    firsts = labels[torch.arange(ROWS), mask.argmax(1)]
    return torch.equal(firsts, IDS[torch.arange(ROWS), TOKEN_MASK.argmax(1)])


def dense_loss(loss: Tensor, cap: float = math.inf) -> bool:
    """Whether the loss is the model's own, from its logits of one batch."""
    logits = (HIDDEN @ WEIGHT.T)[:, :-1]
    logits = logits if cap == math.inf else cap * torch.tanh(logits / cap)
    nll = F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    return close(loss, (nll * TOKEN_MASK[:, 1:].flatten()).sum() / COUNT)


def first_ratio(**policy: Any) -> bool:
    """Whether the ratio of the first step on a batch is 1."""
    return close(grpo(old_logprobs=old_logprobs(**policy))[1]["ratio_mean"], 1)


def first_dpo(reference: Tensor) -> bool:
    """Whether DPO begins at log 2, if the reference is the policy at the start."""
    loss, metrics = dpo(reference_logprobs=reference)
    return close(loss, math.log(2)) and close(metrics["rewards_chosen_mean"], 0)


def summed_counts(counts: list[int], given: list[int]) -> bool:
    """Whether the own counts of all calls of a step add up to the count that each is given."""
    return all(sum(counts) == count for count in given)


def all_have_labels(mask: Tensor) -> bool:
    return not bool((mask.bool() & (LABELS == -100)).any())


def step(order: list[int]) -> bool:
    """Whether a small step on a batch raises the chosen sequences above the rejected ones."""
    places = torch.stack([torch.arange(LENGTH) + LENGTH * row for row in order]).flatten()
    leaf = logprobs_of().detach().requires_grad_()
    reference, mask = old_logprobs()[places], MASK.flatten()[places]
    (gradient,) = torch.autograd.grad(dpo(leaf[places], reference_logprobs=reference, mask=mask)[0], leaf)
    moved = (leaf - gradient).detach() - old_logprobs()
    chosen = torch.arange(ROWS * LENGTH) // LENGTH % 2 == 0
    return bool(moved[chosen & MASK.flatten().bool()].sum() > moved[~chosen & MASK.flatten().bool()].sum())


def without_padding(**options: Any) -> bool:
    """Whether the loss is that of logits without the padded ids."""
    return close(sft(**options), sft(weight=WEIGHT[: VOCAB - 1]))


def losses_agree(make_world: MakeWorld, **group: bool) -> bool:
    """Whether both cp ranks return the loss of one rank."""
    return all(close(loss, one_rank()[0]) for loss, _ in two_ranks(make_world, **group))


def norms_agree(make_world: MakeWorld, factor: float = 1) -> bool:
    """Whether the gradient of a batch has the same norm on one rank and on two."""
    return close(factor * torch.cat([gradient for _, gradient in two_ranks(make_world)]).norm(), one_rank()[1].norm())


def one_rank() -> tuple[float, Tensor]:
    return of_rank(torch.ones(ROWS * LENGTH, dtype=torch.bool))


def of_rank(own: Tensor, group: Any = None) -> tuple[float, Tensor]:
    """Returns the loss of DPO for a rank with some of the tokens, and its gradient."""
    leaf = logprobs_of().detach()[own].requires_grad_()
    where = {name: x[own] for name, x in _pairs().items() if name in ("mask", "sequence")}
    loss, _ = dpo(leaf, reference_logprobs=1.1 * old_logprobs()[own], **where, cp_group=group)
    return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]


def two_ranks(make_world: MakeWorld, forgotten: bool = False) -> list[tuple[float, Tensor]]:
    def body(context: RankContext) -> tuple[float, Tensor]:
        group = None if forgotten else context.mesh.get_group("cp")
        return of_rank(torch.arange(ROWS * LENGTH) % 2 == context.rank, group)

    return make_world("cp=2").run(body)


TWICE = F.pad(LABELS[:, 1:], (0, 1)).clamp(min=0)
Check = Callable[[MakeWorld], bool]

SEEN: dict[str, tuple[Check, *tuple[Check, ...]]] = {
    "labels not shifted, or shifted twice": (
        lambda _: dense_loss(sft()),
        lambda _: dense_loss(sft(labels=IDS)),
        lambda _: dense_loss(sft(labels=TWICE)),
    ),
    "a soft-cap, a bias or a factor of the model's logits left out": (
        lambda _: dense_loss(sft(softcap=2.0), 2.0),
        lambda _: dense_loss(sft(), 2.0),
    ),
    "the mask not shifted as labels are": (
        lambda _: decoded(LABELS, MASK),
        lambda _: decoded(LABELS, TOKEN_MASK),
        lambda _: decoded(LABELS, F.pad(MASK[:, 1:], (0, 1))),
    ),
    "old log-probabilities of another temperature, layout, or dropout": (
        lambda _: first_ratio(temperature=0.7),
        lambda _: first_ratio(),
        lambda _: first_ratio(temperature=0.7, labels=IDS),
    ),
    "reference log-probabilities of another temperature or layout": (
        lambda _: first_dpo(old_logprobs()),
        lambda _: first_dpo(old_logprobs(temperature=0.7)),
        lambda _: first_dpo(old_logprobs().roll(1)),
    ),
    "the count of a microbatch or rank for that of the batch, or each token counted on every cp or tp rank": (
        lambda _: summed_counts([7, 6], [13, 13]),
        lambda _: summed_counts([7, 6], [7, 6]),
        lambda _: summed_counts([7, 6], [26, 26]),
    ),
    "a label of -100 that counts, in a loss of log-probabilities": (
        lambda _: all_have_labels(MASK),
        lambda _: all_have_labels(TOKEN_MASK),
    ),
    "chosen and rejected swapped, or not in turn": (lambda _: step([0, 1, 2, 3]), lambda _: step([1, 0, 3, 2])),
    "`vocab_rows` forgotten, where the vocabulary is padded": (
        lambda _: without_padding(vocab_rows=VOCAB - 1),
        lambda _: without_padding(),
    ),
    "`cp_group` forgotten, without a `Pack`": (losses_agree, lambda world: losses_agree(world, forgotten=True)),
    "losses of `dpo_loss` added up over cp": (
        lambda _: close(dpo()[0], math.log(2)),
        lambda _: close(2 * dpo()[0], math.log(2)),
    ),
    "gradients averaged where they are parts, or multiplied by dp or cp twice": (
        norms_agree,
        lambda world: norms_agree(world, 1 / 2),
        lambda world: norms_agree(world, 2),
    ),
}
"""Checks that are content with a right call, and not with wrong ones."""


@pytest.mark.parametrize("mistake", SEEN)
def test_a_silent_mistake_is_seen_by_the_check_of_the_page(mistake: str, make_world: MakeWorld) -> None:
    right, *wrong = SEEN[mistake]
    assert right(make_world)
    assert not any(check(make_world) for check in wrong)
