# SPDX-License-Identifier: Apache-2.0
"""docs/reference/kernels.md agrees with the code: how the metrics of each loss make the whole.

Its blocks with losses that no spec has compute what dense ones do.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fused_losses import Pack
from property_tests.kernels.losses_with_metrics import LOSSES, Batch

from .markdown import ROOT, blocks_of


def stated(loss: str) -> dict[str, str]:
    """Returns each metric of a loss and its reduction, from the table of the page."""
    table = re.search(
        r"\| loss \| parts make.*\n\|-.*\n((?:\|.*\n)+)", (ROOT / "docs/reference/kernels.md").read_text()
    )
    assert table
    found, current = dict[str, str](), ""
    for row in table[1].splitlines():
        name, reduction, metrics = (cell.strip() for cell in row.strip("|").split("|"))
        current = name.strip("`") or current
        if current == loss:
            found |= dict.fromkeys(re.findall(r"`(\w+)`", metrics), reduction.replace("`", ""))
    return found


@pytest.mark.parametrize("loss", dict.fromkeys(name.partition(",")[0] for name in LOSSES))
def test_metrics_and_how_they_make_the_whole(loss: str) -> None:
    """Options leave some metrics out."""
    of_code = dict[str, str]()
    for name, metrics_of in LOSSES.items():
        if name.partition(",")[0] == loss:
            of_code |= metrics_of(Batch.whole(), None).reductions
    assert stated(loss) == of_code


# Blocks whose losses are in no spec


def setup_of(part: str) -> tuple[str, dict[str, Any]]:
    """Returns the only block of the page that has this text, and the names that its setup makes."""
    (block,) = (b for b in blocks_of(ROOT / "docs/reference/kernels.md") if b.kind == "python" and part in b.text)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.directives["setup"], "kernels.md", "exec"), names)
    return block.text, names


def run(part: str, **changed: object) -> dict[str, Any]:
    """Runs the block with other names than its setup makes."""
    text, names = setup_of(part)
    names |= changed
    exec(compile(text, "kernels.md", "exec"), names)
    return names


def assert_gradients(loss: Tensor, found: dict[str, Any], *leaves: Tensor) -> None:
    """Compares loss and gradients with a dense loss of the same leaves."""
    torch.testing.assert_close(found["loss"], loss)
    for leaf, expected in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(leaf.grad, expected)


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)


def test_echo_is_beside_the_policy_loss() -> None:
    n = run("echo = ")
    logprobs = -nll(n["lm_head"](n["hidden"]), n["labels"])
    ratio, a = (logprobs - n["old_logprobs"]).exp(), n["advantages"]
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.272))[n["acted"]].sum() / 5
    echo = -torch.stack([x[where].mean() for x, where in zip(logprobs, n["observed"], strict=True)]).mean()
    assert_gradients(policy + 0.05 * echo, n, n["hidden"], n["lm_head"].weight)
    torch.testing.assert_close(n["metrics"]["echo"], echo)


def test_multi_token_prediction_stays_in_its_sequences() -> None:
    n = run("shift=1 + depth")
    ids, mask, total = n["input_ids"], n["token_mask"], torch.zeros(())
    for depth, hidden in enumerate(n["depths"], 1):
        ahead = 1 + depth
        logits = n["lm_head"](torch.stack([hidden[:5], F.pad(hidden[8:11], (0, 0, 0, 2))]))
        losses = nll(logits[:, :-ahead], ids[:, ahead:])[mask[:, ahead:]]
        assert len(losses) == n["valid_tokens"][depth - 1]
        total = total + 0.05 * losses.mean()
    assert_gradients(total, n, n["depths"], n["lm_head"].weight)


@pytest.mark.parametrize("tile", [4, 256])
def test_a_draft_model_learns_the_probabilities_of_the_policy(tile: int) -> None:
    n = run("draft_head(", tile=tile)
    with torch.no_grad():
        logits = n["lm_head"](n["hidden"])[:, torch.arange(12) + n["d2t"]]
    target, total = logits.softmax(-1).roll(-1, 0), 0
    for start, row in zip((0, 8), n["token_mask"], strict=True):
        for position in row[1:].nonzero().flatten().tolist():
            at = start + position
            total = total - (target[at] * n["draft_head"](n["draft_hidden"][at]).log_softmax(-1)).sum() / 5
    assert_gradients(torch.as_tensor(total), n, n["draft_hidden"], n["draft_head"].weight)
    assert n["lm_head"].weight.grad is None


@pytest.mark.parametrize(
    ("part", "own"), [("shift=1 + depth", ("depths",)), ("draft_head(", ("hidden", "draft_hidden"))]
)
def test_these_losses_add_up_over_cp(make_world: Callable[[str], Any], part: str, own: tuple[str, ...]) -> None:
    text, names = setup_of(part)
    whole, trained = run(part), own[-1]

    def body(context: Any) -> tuple[Tensor, Tensor, Tensor]:
        group = context.mesh.get_group("cp")
        index = Pack.of(names["cu_seqlens"], names["cu_seqlens_padded"], cp_group=group).index
        mine = {name: names[name].detach()[..., index, :].requires_grad_() for name in own}
        found = {**names, **mine, "cp_group": group}
        exec(compile(text, "kernels.md", "exec"), found)
        return found["loss"].detach(), mine[trained].grad, index

    results = make_world("cp=2").run(body)
    torch.testing.assert_close(sum(loss for loss, _, _ in results), whole["loss"].detach())
    for _, gradient, index in results:
        torch.testing.assert_close(gradient, whole[trained].grad[..., index, :])
