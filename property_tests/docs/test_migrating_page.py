# SPDX-License-Identifier: Apache-2.0
"""migrating.md: its calls compute what dense losses do on rows, and its tables fit the code.

Each example runs on one rank, and on simulated ranks that hold parts of the same batch.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dense_losses
import fused_losses
from fused_losses import Metrics, Pack
from lossgate.losses.clipped_pg import ClippedPgOptions
from lossgate.losses.grpo import GrpoOptions
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.losses_with_metrics import LOSSES, Batch

from .markdown import ROOT, Block, blocks_of

PAGE = ROOT / "docs/how-to/migrating.md"
TEXT = PAGE.read_text()
MakeWorld = Callable[..., SimulatedWorld]
Names = dict[str, Any]

LINEAR_CE, DPO, PACKING, CLIPPED_PG, TILED, SFT, AREAL_DPO, PROFILER, MEGATRON = (
    "NeMo-RL: linear CE fusion",
    "NeMo-RL: DPO",
    "NeMo-RL: fused sequence packing",
    "NeMo-RL: clipped policy gradient",
    "open-instruct: tiled GRPO",
    "AReaL: SFT with context parallelism",
    "AReaL: DPO",
    "AReaL: memory profiler",
    "Megatron models",
)


def section(heading: str) -> str:
    return next(part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(f"{heading}\n"))


def prose(heading: str) -> str:
    """Returns a section without its examples."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", section(heading), flags=re.MULTILINE | re.DOTALL)


def example(heading: str) -> Block:
    """Returns the only python block of a section."""
    (block,) = (b for b in blocks_of(PAGE) if b.kind == "python" and b.text in section(heading))
    return block


# What originals compute, on whole rows


def rows_of(names: Names, logits: Tensor, starts: Tensor, **options: Any) -> Tensor:
    """Returns next-token log-probabilities ``[B, S - 1]`` of packed logits, 0 beyond sequences."""
    ids = names["input_ids"]
    rows = list[Tensor]()
    for row, (start, end) in enumerate(pairwise(starts.tolist())):
        length = min(end - start, ids.shape[1])
        found = dense_losses.filtered_token_logprobs(logits[start : start + length - 1], ids[row, 1:length], **options)
        rows.append(F.pad(found, (0, ids.shape[1] - length)))
    return torch.stack(rows)


def of_tokens(rows: Tensor) -> dict[str, Tensor]:
    """Returns the sequence of each token of flattened rows."""
    return {"sequence": torch.arange(rows.numel()) // rows.shape[1]}


NEMO: Names = {"epsilon": 1e-8, "positive_nll_normaliser": "local"}
"""What NeMo-RL does, in the words of our options."""


def nll_of_rows(names: Names) -> Names:
    logits = (names["hidden"] @ names["weight"].T).transpose(0, 1)
    labels = names["input_ids"][:, 1:]
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, labels[..., None]).squeeze(-1)
    mask = names["token_mask"][:, 1:] * names["sample_mask"][:, None]
    return {"loss": -(logprobs * mask).sum() / names["global_valid_toks"], "logprobs": logprobs}


def dpo_of_rows(names: Names) -> Names:
    c = rows_of(names, names["hidden"] @ names["weight"].T, names["cu_seqlens_padded"])
    mask, pairs = names["token_mask"][:, 1:], float(names["global_valid_seqs"]) / 2 + 1e-8
    rewards = ((c - names["reference_policy_logprobs"][:, :-1]) * mask).sum(1)
    beta, weight = names["section"]["reference_policy_kl_penalty"], names["section"]["sft_loss_weight"]
    preference = -F.logsigmoid(beta * (rewards[::2] - rewards[1::2])).sum() / pairs
    sft = -((c * mask).sum(1) / mask.sum(1))[::2].sum() / pairs
    metrics = {"preference_loss": preference, "sft_loss": sft, "rewards_chosen_mean": rewards[::2].sum() / pairs}
    return {"loss": preference + weight * sft, "metrics": metrics}


def clipped_pg_of_rows(names: Names, c: Tensor, data: Names, **options: Any) -> Names:
    flat = {name: x[:, 1:].flatten() for name, x in data.items() if isinstance(x, Tensor) and x.dim() == 2}
    loss, metrics = dense_losses.clipped_pg(
        logprobs=c.flatten(),
        prev_logprobs=flat["prev_logprobs"],
        generation_logprobs=flat["generation_logprobs"],
        reference_logprobs=flat["reference_policy_logprobs"],
        advantages=flat["advantages"],
        mask=flat["token_mask"].bool(),
        sample_mask=data["sample_mask"].bool(),
        valid_tokens=names["global_valid_toks"],
        valid_sequences=names["global_valid_seqs"],
        options=ClippedPgOptions(**NEMO, **names.get("loss_fn", {})),
        **of_tokens(c),
        **options,
    )
    return {"loss": loss, "metrics": metrics}


def packed_of_rows(names: Names) -> Names:
    logits, starts = names["packed_logits"][0], names["cu_seqlens_q_padded"]
    temperature = names["temperature"]
    filtered = rows_of(names, logits, starts, temperature=temperature, top_k=8, top_p=0.9)
    trained = filtered[names["token_mask"][:, 1:].bool()]
    assert 0 < trained.isinf().sum() < len(trained)  # the filter leaves out some labels
    unfiltered = rows_of(names, logits, starts, temperature=temperature).flatten()
    return clipped_pg_of_rows(names, filtered, names, unfiltered_logprobs=unfiltered)


def clipped_pg_of_logprobs(names: Names) -> Names:
    data = names["data"]
    expected = clipped_pg_of_rows(names, names["next_token_logprobs"], data, rewards=data["rewards"])
    return expected | {"logged": {name: float(x) for name, x in expected["metrics"].items()}}


def grpo_of_rows(names: Names) -> Names:
    flat = {name: names[name].flatten() for name in ("old_logprobs", "ref_logprobs", "vllm_logprobs", "advantages")}
    logits, labels = names["lm_head"](names["hidden_states"]).flatten(0, 1), names["selected_token_ids"]
    new = dense_losses.token_logprobs(logits, labels.flatten(), names["temperature"])
    loss, metrics = dense_losses.grpo(
        logprobs=new,
        old_logprobs=flat["old_logprobs"],
        reference_logprobs=flat["ref_logprobs"],
        vllm_logprobs=flat["vllm_logprobs"],
        advantages=flat["advantages"],
        mask=names["response_mask"].flatten(),
        sequences=len(labels),
        valid_tokens=torch.tensor(names["tokens_of_batch"]),
        options=GrpoOptions(loss_scale=names["world_size"] // names["sequence_parallel_size"]),
        **of_tokens(labels),
    )
    return {"loss": loss, "metrics": metrics, "current": new.view_as(labels)}


def sft_of_pack(names: Names) -> Names:
    """AReaL's order of steps: padded logits, then the tokens without padding, ids rolled."""
    starts, old = names["cu_seqlens"].tolist(), names["old_cu_seqlens"].tolist()
    lengths = [end - start for start, end in pairwise(old)]
    kept = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)])
    logits = (names["hidden"] @ names["weight"].T)[kept]
    labels, mask = names["input_ids"].roll(-1), names["loss_mask"].roll(-1)
    logprobs = dense_losses.token_logprobs(logits, labels, names["temperature"])
    low, high = logits.amin(1), logits.amax(1)
    statistics = dense_losses.sft_statistics(
        logprobs=logprobs,
        entropy=dense_losses.token_entropy(logits, names["temperature"]),
        vocab_min=low,
        vocab_max=high,
        mask=mask,
        real=torch.ones_like(mask),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        sequences=len(lengths),
        valid_sequences=torch.tensor(2),
        real_tokens=torch.tensor(len(mask)),
        valid_tokens=mask.sum(),
    )
    loss = -torch.where(mask, logprobs, 0.0).sum() / (names["total_loss_weight"] + 1e-5)
    return {"loss": loss, "logged": {name: float(x) for name, x in statistics.items()}}


def areal_dpo_of_pack(names: Names) -> Names:
    """AReaL's order of steps: tokens without padding, ids and mask rolled, pairs that are whole."""
    starts, old = names["cu_seqlens"].tolist(), names["old_cu_seqlens"].tolist()
    lengths = [end - start for start, end in pairwise(old)][:-1]
    kept = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)])
    logits = (names["hidden"] @ names["weight"].T)[kept]
    logprobs = dense_losses.token_logprobs(logits, names["input_ids"].roll(-1), names["temperature"])
    mask = names["loss_mask"].roll(-1)
    mask[torch.tensor(lengths).cumsum(0)[torch.tensor(lengths) > 0] - 1] = False
    parts = torch.stack([logprobs - names["ref_logprobs"], torch.ones_like(logprobs)]) * mask
    sums, tokens = torch.stack([part.sum(1) for part in parts.split(lengths, 1)], 1)
    rewards = (sums / tokens.clamp(min=1) if names["loss_type"] == "ipo" else sums).view(-1, 2)
    whole = torch.tensor(lengths).view(-1, 2).ne(0).all(1)
    chosen, rejected = rewards[whole].T
    beta, margin = names["beta"], chosen - rejected
    losses = (margin - 1 / (2 * beta)) ** 2 if names["loss_type"] == "ipo" else -F.logsigmoid(beta * margin)
    logged = {
        "preference_loss": losses.mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "rewards_chosen_mean": chosen.mean(),
        "rewards_rejected_mean": rejected.mean(),
        "num_valid_samples": whole.sum(),
    }
    return {"loss": losses.mean(), "logged": {name: x.item() for name, x in logged.items()}}


def logprobs_of_model(names: Names) -> Names:
    ids = names["input_ids"]
    logprobs = names["model"](ids, names["position_ids"], None).log_softmax(-1)[:, :-1]
    return {"logprobs": logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)}


# What each rank holds of it

Place = Callable[[Names, RankContext], dict[str, tuple[Tensor, Any]]]
"""Changes the names to a rank's own. Returns its leaves, and the part of the whole that each is."""


def vocabulary(names: Names, context: RankContext, start: str, rows: int) -> slice:
    group = context.mesh.get_group("tp")
    own = rows // group.size()
    names["tp_group"], names[start] = group, own * group.rank()
    return slice(names[start], names[start] + own)


def leaves(names: Names, parts: dict[str, Any]) -> dict[str, tuple[Tensor, Any]]:
    for name, part in parts.items():
        names[name] = names[name].detach()[part].clone().requires_grad_()
    return {name: (names[name], part) for name, part in parts.items()}


def pack_of(names: Names, context: RankContext, *starts: Tensor) -> Tensor:
    names["cp_group"] = context.mesh.get_group("cp")
    return Pack.of(*starts, cp_group=names["cp_group"]).index


def place_sequence_parallel(names: Names, context: RankContext) -> dict[str, tuple[Tensor, Any]]:
    own = vocabulary(names, context, "vocab_start_index", 32)
    names["sequence_parallel"] = True
    ranks, rank = context.mesh.get_group("tp").size(), context.mesh.get_group("tp").rank()
    length = len(names["hidden"]) // ranks
    return leaves(names, {"weight": own, "hidden": slice(length * rank, length * (rank + 1))})


def place_dpo(names: Names, context: RankContext) -> dict[str, tuple[Tensor, Any]]:
    own = vocabulary(names, context, "vocab_start_index", 32)
    index = pack_of(names, context, names["cu_seqlens"], names["cu_seqlens_padded"])
    return leaves(names, {"weight": own, "hidden": index})


def place_logits(names: Names, context: RankContext) -> dict[str, tuple[Tensor, Any]]:
    own = vocabulary(names, context, "vocab_start_index", 16)
    index = pack_of(names, context, names["cu_seqlens_q_padded"])
    return leaves(names, {"packed_logits": (slice(None), index[:, None], torch.arange(16)[own])})


def place_sft(names: Names, context: RankContext) -> dict[str, tuple[Tensor, Any]]:
    own = vocabulary(names, context, "vocab_start", 32)
    names["dp_group"] = context.mesh.get_group("dp")
    return leaves(names, {"weight": own, "hidden": pack_of(names, context, names["cu_seqlens"])})


@dataclass(frozen=True)
class Example:
    """How an example is checked.

    Attributes:
        expected: computes the names that the example makes, dense and on one rank.
        trained: tensors whose gradients are compared.
        place: cuts a batch for ranks; None if the example is for one rank.
        layout: the ranks.
        loss: whether the losses of cp ranks are parts, or each of them is the whole.
    """

    expected: Callable[[Names], Names]
    trained: Callable[[Names], list[Tensor]]
    place: Place | None = None
    layout: str = "cp=2,tp=2"
    parts: bool = True


EXAMPLES = {
    LINEAR_CE: Example(nll_of_rows, lambda n: [n["hidden"], n["weight"]], place_sequence_parallel, "tp=2"),
    DPO: Example(dpo_of_rows, lambda n: [n["hidden"], n["weight"]], place_dpo, parts=False),
    PACKING: Example(packed_of_rows, lambda n: [n["packed_logits"]], place_logits),
    CLIPPED_PG: Example(clipped_pg_of_logprobs, lambda n: [n["next_token_logprobs"]]),
    TILED: Example(grpo_of_rows, lambda n: [n["hidden_states"], n["lm_head"].weight]),
    SFT: Example(sft_of_pack, lambda n: [n["hidden"], n["weight"]], place_sft),
    AREAL_DPO: Example(areal_dpo_of_pack, lambda n: [n["hidden"], n["weight"]], place_sft, parts=False),
    MEGATRON: Example(logprobs_of_model, lambda n: []),
}
of_examples = pytest.mark.parametrize("heading", EXAMPLES)
of_ranks = pytest.mark.parametrize("heading", [heading for heading, e in EXAMPLES.items() if e.place])


def setup_of(heading: str) -> Names:
    names: Names = {"__name__": "page"}
    exec(compile(example(heading).directives["setup"], str(PAGE), "exec"), names)
    return names


def run(heading: str, names: Names) -> Names:
    exec(compile(example(heading).text, str(PAGE), "exec"), names)
    return names


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def assert_metrics(found: Any, expected: Any) -> None:
    """Compares metrics of the example; the dense loss may have more or fewer of them."""
    common = (found.keys() & expected.keys()) - {"loss"}
    assert len(common) >= 3
    first, second = ({name: _number(x[name]) for name in common} for x in (found, expected))
    assert first == pytest.approx(second, rel=1e-12, abs=1e-14)


def _number(x: Tensor | float) -> float:
    return x.item() if isinstance(x, Tensor) else x


def expected_of(heading: str, names: Names) -> tuple[Names, list[Tensor]]:
    checked = EXAMPLES[heading]
    expected, trained = checked.expected(names), checked.trained(names)
    if not trained:
        return expected, []
    return expected, list(torch.autograd.grad(expected["loss"], trained))


def test_every_example_is_checked() -> None:
    python = [block for block in blocks_of(PAGE) if block.kind == "python"]
    assert len(python) == len(EXAMPLES)
    assert [example(heading) for heading in EXAMPLES] == python


@of_examples
def test_calls_compute_what_the_original_s_rows_do(heading: str) -> None:
    names = run(heading, setup_of(heading))
    expected, gradients = expected_of(heading, names)
    for name in {"loss", "logprobs", "current"} & expected.keys():
        assert_equal(names[name].detach(), expected[name].detach())
    for name in {"metrics", "logged"} & expected.keys():
        assert_metrics(names[name], expected[name])
    for leaf, gradient in zip(EXAMPLES[heading].trained(names), gradients, strict=True):
        assert_equal(leaf.grad, gradient)


@of_ranks
def test_calls_on_ranks_compute_the_same(heading: str, make_world: MakeWorld) -> None:
    """The example itself runs on every rank, with the rank's part of the batch and its groups."""
    checked, whole = EXAMPLES[heading], setup_of(heading)
    expected, gradients = expected_of(heading, whole)

    def body(context: RankContext) -> tuple[Tensor, Any, list[tuple[str, Tensor, Any]]]:
        names = dict(whole)
        assert checked.place
        own = checked.place(names, context)
        run(heading, names)
        logged = names.get("logged") or names.get("metrics")
        if isinstance(logged, Metrics):
            logged = logged.reduce(names["cp_group"]).floats()
        return names["loss"].detach(), logged, [(name, leaf.grad, part) for name, (leaf, part) in own.items()]  # type: ignore[misc]

    results = make_world(checked.layout).run(body)
    losses = torch.stack([loss for loss, _, _ in results[:: 2 if "tp" in checked.layout else 1]])  # of tp rank 0
    assert_equal(losses.sum() if checked.parts else losses[0], expected["loss"].detach())
    for _, logged, _ in results:
        for name in {"metrics", "logged"} & expected.keys():
            assert_metrics(logged, expected[name])
    found = {name: torch.zeros_like(whole[name]) for name in (name for name, _, _ in results[0][2])}
    for _, _, own in results:
        for name, gradient, part in own:
            found[name][part] += gradient if not _is_shared(name, heading) else gradient / 2
    by_name = {id(leaf): gradient for leaf, gradient in zip(checked.trained(whole), gradients, strict=True)}
    for name, gradient in found.items():
        assert_equal(gradient, by_name[id(whole[name])])


def _is_shared(name: str, heading: str) -> bool:
    """Whether both tp ranks hold the whole gradient, as without sequence parallelism."""
    return name == "hidden" and heading != LINEAR_CE


def changed(monkeypatch: pytest.MonkeyPatch, heading: str, old: str, new: str) -> None:
    block = example(heading)
    assert block.text.count(old) == 1
    other = Block(block.kind, block.text.replace(old, new), block.line, block.directives)
    monkeypatch.setitem(globals(), "example", lambda _: other)


@pytest.mark.parametrize(
    ("heading", "shown", "same"),
    [
        (DPO, "reference_policy_logprobs, shift=0)", "reference_policy_logprobs.roll(1, 1), shift=1)"),
        (SFT, "loss_mask, shift=1)", "loss_mask.roll(-1), shift=0)"),
        (SFT, "pack.labels(input_ids)", "pack.labels(input_ids[None])"),
        (
            PACKING,
            "packed_logits,  # [1, T / cp, V / tp]\n",
            "packed_logits.transpose(0, 1), layout='sbh', labels=\\\n",
        ),
        (PACKING, "cu_seqlens_q, cu_seqlens_q_padded, ", "cu_seqlens_q, "),
    ],
)
def test_other_layouts_that_the_page_names(
    heading: str, shown: str, same: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, heading, shown, same)
    test_calls_compute_what_the_original_s_rows_do(heading)


def test_areal_s_ipo(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = setup_of
    monkeypatch.setitem(globals(), "setup_of", lambda heading: plain(heading) | {"loss_type": "ipo"})
    test_calls_compute_what_the_original_s_rows_do(AREAL_DPO)


def test_a_head_that_is_a_weight_needs_no_tiles() -> None:
    names = run(TILED, setup_of(TILED))
    given = {name: names[name].flatten() for name in ("old_logprobs", "vllm_logprobs", "advantages")}
    given |= {"reference_logprobs": names["ref_logprobs"].flatten(), "mask": names["response_mask"].flatten()}
    logprobs = fused_losses.linear_logprobs(
        names["hidden_states"], names["lm_head"].weight, names["selected_token_ids"], temperature=names["temperature"]
    ).logprobs.flatten()
    rho, scale = fused_losses.RhoCorrection(), names["world_size"] // names["sequence_parallel_size"]
    loss, metrics = fused_losses.grpo_loss(
        logprobs, **given, rho=rho, valid_tokens=names["tokens_of_batch"], loss_scale=scale
    )
    assert_equal(loss, names["loss"])
    assert_metrics(metrics, names["metrics"])


@pytest.mark.parametrize(
    ("heading", "right", "wrong"),
    [
        (LINEAR_CE, "[:, 1:], (0, 1), value=-100)", ", (0, 0), value=-100)"),
        (LINEAR_CE, "    mask=mask,\n", ""),
        (DPO, "logprobs, shift=0)", "logprobs, shift=1)"),
        (DPO, "token_mask, shift=1)", "token_mask, shift=0)"),
        (DPO, "    epsilon=1e-8,\n", ""),
        (PACKING, "    unfiltered_logprobs=tokens.unfiltered_logprobs,\n", ""),
        (PACKING, "advantages, shift=1)", "advantages, shift=0)"),
        (PACKING, "    temperature=temperature,\n", ""),
        (CLIPPED_PG, '"epsilon": 1e-8, ', ""),
        (CLIPPED_PG, '"local"', '"global"'),
        (TILED, "    loss_scale=world_size // sequence_parallel_size,\n", ""),
        (TILED, "    rho=RhoCorrection(),  # clamps at 2, as open-instruct does by default\n", ""),
        (SFT, "    epsilon=1e-5,\n", ""),
        (SFT, "loss_mask, shift=1)", "loss_mask, shift=0)"),
        (AREAL_DPO, "loss_mask, shift=1)", "loss_mask, shift=0)"),
        (AREAL_DPO, "ref_logprobs, shift=0)", "ref_logprobs, shift=1)"),
        (AREAL_DPO, "pairs.repeat_interleave(2)", "torch.ones(6)"),
        (AREAL_DPO, "2 * total_loss_weight", "total_loss_weight"),
        (MEGATRON, '    layout="sbh",\n', ""),
    ],
)
def test_calls_that_differ_are_seen(heading: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above fail on calls as someone who migrates may write them."""
    changed(monkeypatch, heading, right, wrong)
    with pytest.raises((AssertionError, ValueError)):
        test_calls_compute_what_the_original_s_rows_do(heading)


def test_hooks_of_the_output_layer_run() -> None:
    """Megatron's ``overlap_param_gather`` waits for the weight in one."""
    names = setup_of(MEGATRON)
    model, calls = names["model"], list[str]()
    fused_losses.backbone_and_lm_head(model, check=True)
    model.output_layer.register_forward_pre_hook(lambda *_: calls.append("hook"))
    run(MEGATRON, names)
    assert calls == ["hook"]


# The tables

TABLES: dict[str, list[Callable[..., Any]]] = {
    LINEAR_CE: [fused_losses.linear_cross_entropy, fused_losses.linear_logprobs],
    DPO: [fused_losses.dpo_loss],
    PACKING: [Pack.of, fused_losses.vocab_parallel_logprobs],
    CLIPPED_PG: [fused_losses.ClippedPGConfig, fused_losses.clipped_pg_loss],
    TILED: [
        fused_losses.tiled_grpo_loss,
        fused_losses.grpo_loss,
        fused_losses.RhoCorrection,
        fused_losses.tiled_token_logprobs,
    ],
    SFT: [fused_losses.linear_sft_loss],
    AREAL_DPO: [fused_losses.dpo_loss],
    PROFILER: [fused_losses.MemorySnapshots],
    MEGATRON: [fused_losses.backbone_and_lm_head],
}
"""The functions of each section, all of whose arguments it names."""

ELSEWHERE = {"torch.no_grad()", "rho_weights(...).rho[mask]", "beta=0"}
"""Code in the column "here" that is no name of ours, or is checked by hand."""


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters
    return {name: p for name, p in found.items() if p.kind not in kinds and name != "self"}


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(text: str, first: str) -> Iterator[dict[str, str]]:
    """Rows of the tables whose header starts so, by column."""
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *others = (
            [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
        )
        if header[0].endswith(first):
            for row in others:
                yield dict(zip(header, row, strict=True))


def public(dotted: str) -> Any:
    """Returns what a name such as ``Pack.of`` means, or a variable such as ``pack.of``."""
    head, _, rest = dotted.partition(".")
    found = getattr(fused_losses, {"pack": "Pack"}.get(head, head))
    return getattr(found, rest) if rest else found


def unknown(span: str, functions: list[Callable[..., Any]]) -> str | None:
    """Returns what is wrong with a piece of code in the column "here"; None for nothing."""
    known = {name for function in functions for name in parameters(function)}
    if span in known or span in ELSEWHERE:
        return None
    if span[0] == "[":
        return None  # a shape
    tree = ast.parse(span.replace("=)", "=...)") if "(" in span else re.sub("=.*", "", span), mode="eval").body
    if isinstance(tree, ast.Call):
        wrong = [k.arg for k in tree.keywords if k.arg not in parameters(public(ast.unparse(tree.func)))]
        return f"{span} has no {wrong}" if wrong else None
    if isinstance(tree, ast.Name | ast.Attribute):
        name = ast.unparse(tree)
        try:
            return None if name in known or public(name) is not None else span
        except AttributeError:
            return f"{span} is unknown"
    return f"{span} is no name"


@pytest.mark.parametrize("heading", TABLES)
def test_names_of_ours_exist(heading: str) -> None:
    fields = {"pack.real", "pack.sequence", "pack.sequences"}
    spans = [span for row in rows(prose(heading), "there") if "default" in row for span in code(row["here"])]
    spans += [span for row in rows(prose(heading), "there") for span in re.findall(r"`(pack\.\w+\(.*?\))`", str(row))]
    assert [wrong for span in spans if span not in fields and (wrong := unknown(span, TABLES[heading]))] == []


def test_shared_tables_name_functions_that_exist() -> None:
    intro = TEXT.partition("## NeMo-RL: linear")[0]
    spans = [span for row in rows(intro, "there") for span in code(row["here"])]
    allowed = [fused_losses.grpo_loss, fused_losses.linear_sft_loss]
    assert len(spans) > 8
    assert [wrong for span in spans if (wrong := unknown(span, allowed))] == []


@pytest.mark.parametrize("heading", TABLES)
def test_every_argument_is_named(heading: str) -> None:
    named = {re.sub(r"[=(].*", "", span) for span in code(prose(heading))}
    named |= {keyword for span in code(prose(heading)) for keyword in re.findall(r"(\w+)=", span)}
    if heading == PACKING:
        named |= {"cu_seqlens"}
    missing = {name for function in TABLES[heading] for name in parameters(function) if name not in named}
    assert missing == set()


@pytest.mark.parametrize("heading", TABLES)
def test_defaults(heading: str) -> None:
    """A row with a default names one argument. A row without one has a required argument."""
    for row in rows(prose(heading), "there"):
        names = [span for span in code(row["here"]) if span.isidentifier()]
        found = {
            repr(p.default)
            for function in TABLES[heading]
            for name, p in parameters(function).items()
            if names == [name]
        }
        if found and "default" in row:
            stated = code(row["default"])
            empty = repr(inspect.Parameter.empty)
            assert (repr(ast.literal_eval(stated[0])) if stated else empty) in found, row


@pytest.mark.parametrize(
    ("heading", "loss"),
    [
        (DPO, "dpo_loss"),
        (AREAL_DPO, "dpo_loss"),
        (CLIPPED_PG, "clipped_pg_loss"),
        (TILED, "grpo_loss"),
        (SFT, "linear_sft_loss"),
    ],
)
def test_metrics_and_how_they_add_up(heading: str, loss: str) -> None:
    stated = dict[str, str]()
    for column in ("metric there", "result or metric there", "statistic there"):
        for row in rows(prose(heading), column):
            if column not in row:
                continue
            same = row["here"].startswith("the same name")
            names = code(row[column] if same else row["here"])
            reduction = row["of microbatches and ranks"].partition(";")[0].replace("`", "")
            stated |= {name.removeprefix("val/"): reduction for name in names if "(" not in name}
    of_code = dict[str, str]()
    for name, metrics_of in LOSSES.items():
        if name.partition(",")[0] == loss:
            of_code |= metrics_of(Batch.whole(), None).reductions
    assert stated == of_code


def test_defaults_of_the_profiler() -> None:
    """AReaL's are 0 and 1, and 100000."""
    snapshots = fused_losses.MemorySnapshots()
    assert (list(snapshots.profile_steps), snapshots.max_entries) == ([0, 1], 100000)


def test_tables_that_are_wrong_are_seen() -> None:
    functions = [fused_losses.dpo_loss]
    assert unknown("beta", functions) == "beta is unknown"
    assert unknown("Pack.of(tail=1)", functions) is None
    assert unknown("Pack.of(tails=1)", functions) == "Pack.of(tails=1) has no ['tails']"
    assert unknown("loss_type", functions) is None
    assert unknown('loss_kind="ipo"', functions) == 'loss_kind="ipo" is unknown'


def test_the_page_is_linked() -> None:
    assert "migrating.md" in (ROOT / "README.md").read_text()
    assert "migrating.md" in (ROOT / "docs/reference/kernels.md").read_text()
