# SPDX-License-Identifier: Apache-2.0
"""What each family of known mistakes says, where a wrong sentence or a dead mistake could hide."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from lossgate import Contract, Layout, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import PlacedProblem, sample_problems
from lossgate.counterfactuals.bank import FAMILIES, counterfactuals_of
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.factors import powers_of_options
from lossgate.counterfactuals.families.loss_terms import terms
from lossgate.counterfactuals.families.operations import operations, where_it_overflows
from lossgate.counterfactuals.families.option_values import options_for_others
from lossgate.counterfactuals.families.rounded import rounded
from lossgate.counterfactuals.seams import same
from lossgate.counterfactuals.setting import Setting
from lossgate.counterfactuals.sites import Site, Traced
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.problems.whole_sequences import Tokens
from lossgate.specs.outputs import LOSS, Output, metric_output

ALL = [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


TILES = {"token": (4,), "vocab": (5,)}


def settings(name: str, head: str, layout: str, count: int, tokens: Tokens = "shard", *metrics: str) -> list[Setting]:
    spec, made = SPECS[name], list[Setting]()
    returned = [*map(spec.output, spec.outputs), *map(metric_output, metrics)]
    for problem in sample_problems(dense_candidate(spec, head), Layout.parse(layout), "float32", count, 11):
        made.append(Setting(PlacedProblem(BoundProblem(spec, problem), problem), returned, tokens, TILES))
    return made


def changed(one: Counterfactual, asked: Iterable[Setting]) -> set[Output]:
    """Returns the outputs, of those that are returned, that a mistake changes on some problem."""
    found = set[Output]()
    for setting in asked:
        wrong, right = one.run(setting), setting.bound.reference(setting.returned)
        for output, x in (wrong or {}).items():
            asked_for = output in setting.returned or output.kind == "gradient"
            if asked_for and not torch.allclose(x, right[output], rtol=1e-5, atol=1e-12, equal_nan=True):
                found.add(output)
    return found


@pytest.mark.parametrize(("name", "head"), ALL)
def test_sentences_are_whole_and_tell_mistakes_apart(name: str, head: str) -> None:
    found = counterfactuals_of(SPECS[name], head)
    assert len(found) > 100
    sentences = [one.sentence for one in found.values()]
    assert sorted({s for s in sentences if sentences.count(s) > 1}) == []
    for one in found.values():
        assert re.fullmatch(r"[^{}]*(\{outputs\}[^{}]*)?", one.sentence), one.sentence
        assert not one.sentence.endswith("."), one.sentence
        assert not re.search(r"\w(True|False|None)\b", one.sentence), one.sentence


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_each_family_has_mistakes_of_some_loss(family) -> None:
    assert any(True for name, head in ALL for _ in family(SPECS[name], head))


def test_a_count_of_one_rank_changes_loss_and_gradients() -> None:
    one = counterfactuals_of(SPECS["nll"], "logits")["valid_tokens local over dp"]
    assert {str(o) for o in changed(one, settings("nll", "logits", "dp=2", 40))} == {"loss", "grad of logits"}
    assert changed(one, settings("nll", "logits", "cp=2", 6)) == set()


def test_a_factor_of_the_loss_leaves_metrics_alone() -> None:
    one = counterfactuals_of(SPECS["nll"], "logprobs")["loss times 1 / (2)"]
    asked = settings("nll", "logprobs", "single", 6, "shard", "ppl_max", "n_tokens")
    assert {str(o) for o in changed(one, asked)} == {"loss", "grad of logprobs"}


def test_a_count_may_have_the_sequences_too() -> None:
    one = counterfactuals_of(SPECS["value"], "values")["valid_tokens is more by the number of sequences"]
    for setting in settings("value", "values", "single", 6):
        count, epsilon = float(setting.fields["valid_tokens"]), setting.bound_spec.options.epsilon
        loss, wrong = setting.bound.reference(setting.returned), one.run(setting)
        if count and wrong is not None:
            factor = (count + epsilon) / (count + len(setting.lengths) + epsilon)
            torch.testing.assert_close(wrong[LOSS], factor * loss[LOSS])


@pytest.mark.parametrize("what", ["first chunk left out", "second chunk left out", "third chunk twice"])
def test_early_chunks_may_be_lost_or_doubled(what: str) -> None:
    one = counterfactuals_of(SPECS["nll"], "logits")[what]
    assert {str(o) for o in changed(one, settings("nll", "logits", "single", 12))} == {"loss", "grad of logits"}


@pytest.mark.parametrize(
    "what",
    [
        "the lower bound is left out",
        "the upper bound is left out",
        "the bounds are -10 and 10",
        "its argument is bounded by -10 and 10",
        "what is subtracted is doubled",
        "it is taken for false",
        "equal numbers count otherwise",
        "its size, not its square",
    ],
)
def test_an_operation_may_have_other_bounds(what: str) -> None:
    asked = settings("grpo", "logprobs", "single", 30, "shard", "clipfrac", "kl1", "kl2")
    assert any(changed(one, [setting]) for setting in asked for one in operations(setting) if one.name.endswith(what))


def test_an_option_may_take_the_number_of_another() -> None:
    asked = settings("grpo", "logprobs", "single", 12)
    found = [one for one in options_for_others(asked[0]) if one.name == "clip_lower for clip_higher"]
    assert {str(o) for o in changed(found[0], asked)} == {"loss", "grad of logprobs"}


def test_outputs_may_be_multiplied_by_an_option() -> None:
    asked = settings("grpo", "logprobs", "single", 12)
    found = [one for one in powers_of_options(asked[0]) if one.name == "outputs divided by the square of beta"]
    assert {str(o) for o in changed(found[0], asked)} == {"loss", "logprobs", "grad of logprobs"}


@pytest.mark.parametrize(("number", "expected"), [(0.0, [1.0, 0.0]), (7.0, [1.0, 7.0])])
def test_what_overflows_float32_becomes_a_number(number: float, expected: list[float]) -> None:
    found = torch.tensor([0.0, 89.0], dtype=torch.float64).exp()
    assert where_it_overflows(number, found, ()).tolist() == expected


def test_a_metric_is_changed_alone() -> None:
    name = "ppl_max: the mean of ranks, whole counts"
    one = counterfactuals_of(SPECS["nll"], "logprobs")[name]
    asked = settings("nll", "logprobs", "dp=2", 6, "shard", "ppl_max", "ppl_min")
    assert {str(o) for o in changed(one, asked)} == {"ppl_max"}


def test_all_metrics_may_be_averaged_over_ranks() -> None:
    one = counterfactuals_of(SPECS["value"], "values")["every metric: the mean of ranks, own counts"]
    asked = settings("value", "values", "dp=2", 12, "shard", "values_mean", "values_min", "values_max")
    assert {str(o) for o in changed(one, asked)} == {"values_mean", "values_min", "values_max"}


def test_a_metric_may_be_a_mean_of_micro_batches() -> None:
    one = counterfactuals_of(SPECS["grpo"], "logprobs")["metrics: mean of micro-batches of 2 sequences"]
    assert {str(o) for o in changed(one, settings("grpo", "logprobs", "single", 12, "shard", "kl2"))} == {"kl2"}


@pytest.mark.parametrize("metrics", [("values_mean",), ("values_mean", "returns_mean", "values_min")])
def test_micro_batches_are_not_named_where_each_rank_has_one(metrics: tuple[str, ...]) -> None:
    """The mean over ranks is the plainer name, whether extremes are returned or not."""
    one = counterfactuals_of(SPECS["value"], "values")["metrics: mean of micro-batches of 2 sequences"]
    asked = settings("value", "values", "dp=2", 30, "shard", *metrics)
    held = {s: [len(s.partition.sequences(rank)) for rank in range(2)] for s in asked}
    small = [s for s, numbers in held.items() if min(numbers) > 0 and max(numbers) <= 2]
    large = [s for s, numbers in held.items() if max(numbers) > 2]
    assert small
    assert large

    def says_too_much(s: Setting) -> bool:
        wrong, plainer = one.run(s) or {}, [each.run(s) or {} for each in one.made_of]
        return any(all(o in each and same(wrong[o], each[o]) for o in s.returned) for each in plainer)

    assert all(map(says_too_much, small))
    assert not all(map(says_too_much, large))  # some train nothing


def test_what_is_not_split_is_the_start_of_the_pack() -> None:
    bank = counterfactuals_of(SPECS["grpo"], "logits")
    (setting,) = [s for s in settings("grpo", "logits", "cp=2", 20, "packed") if s.tokens > 20][:1]
    name, shards = "old_logprobs", setting.partition.token_shards.values()  # other numbers at each token
    for how, whole in (("neither shifted nor split", setting.as_given(name)), ("not split", setting.padded(name))):
        taken = bank[f"{name} {how}"].seams.fields(setting.with_padding)[name]
        for held in shards:
            assert torch.equal(taken[held], whole[: len(held)])
    assert not torch.equal(setting.as_given(name), setting.padded(name))
    assert "returns not split" in counterfactuals_of(SPECS["value"], "values")
    assert "returns neither shifted nor split" not in counterfactuals_of(SPECS["value"], "values")


def test_a_mistake_in_one_term_leaves_the_others() -> None:
    asked = settings("z_loss", "logits", "single", 6)
    (found,) = {one.name: one for s in asked for one in terms(s) if one.name == "term z without its gradient"}.values()
    assert {str(o) for o in changed(found, asked)} == {"grad of logits"}
    weighted = counterfactuals_of(SPECS["dpo"], "logprobs")["term of sft_loss_weight: the mask is ignored"]
    with_term = [s for s in settings("dpo", "logprobs", "single", 12) if s.bound_spec.options.sft_loss_weight]
    without = [s for s in settings("dpo", "logprobs", "single", 12) if not s.bound_spec.options.sft_loss_weight]
    assert {str(o) for o in changed(weighted, with_term)} >= {"loss"}
    assert changed(weighted, without) == set()


def test_a_spec_without_terms_has_none() -> None:
    (setting,) = settings("nll", "logits", "single", 1)
    assert [*terms(setting)] == []


def rewritten(one: Counterfactual) -> str:
    """Returns an operation of a reference and how it is done otherwise, without its code."""
    return one.name.rpartition("` ")[2]


def test_operations_are_named_by_their_expression() -> None:
    found = {rewritten(one): one for s in settings("value", "values", "single", 40) for one in operations(s)}
    one = found["clamp: left out in backward"]
    assert "`torch.clamp(values, old_values - options.cliprange, old_values + options.cliprange)`" in one.sentence
    assert "(in value_loss, value.py)" in one.sentence
    assert {str(o) for o in changed(one, settings("value", "values", "single", 40))} == {"grad of values"}


def sites_of(source: str, file: Path) -> list[Site]:
    """Returns the operations of a function ``loss`` of a tensor that a file holds."""
    file.write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), names)
    with Traced() as traced:
        names["loss"](torch.ones(2, requires_grad=True))
    return traced.sites


def test_a_comment_or_another_layout_of_the_lines_names_no_other_operation(tmp_path: Path) -> None:
    plain = "def loss(x):\n    y = x * 2 + x.detach() * 3\n    if (y - 1).any():\n        y = -y\n    return y.sum()\n"
    edited = (
        '"""Says what it is."""\n\n\ndef loss(x):\n    # A reason.\n    y = (\n        x * 2  # twice\n'
        "        + x.detach()\n        * 3\n    )\n\n    if (y - 1).any():\n        y = -y\n    return y.sum()\n"
    )
    (tmp_path / "edited").mkdir()
    found = sites_of(plain, tmp_path / "mine.py")
    assert found == sites_of(edited, tmp_path / "edited/mine.py")
    assert Site("mine.py", "loss", "x * 2 + x.detach() * 3", "add") in found
    assert Site("mine.py", "loss", "y = x * 2 + x.detach() * 3", "mul") in found  # both of the statement
    assert Site("mine.py", "loss", "y - 1", "sub") in found


def test_code_that_can_not_be_read_is_named_by_its_line() -> None:
    names: dict[str, Any] = {}
    exec(compile("def loss(x):\n    return x * 2\n", "<made>", "exec"), names)
    with Traced() as traced:
        names["loss"](torch.ones(2))
    assert traced.sites == [Site("<made>", "loss", "line 2", "mul")]


@pytest.mark.parametrize(
    ("spec", "what", "outputs"),
    [
        ("softcap", "tanh: left out in backward", {"grad of logits"}),
        ("divergence", "logaddexp: the weights of the two are exchanged", {"loss", "grad of logits"}),
        ("divergence", "log_softmax: its result is rounded to bfloat16", {"loss", "grad of logits"}),
        ("divergence", "sub: it is done in bfloat16", {"loss", "grad of logits"}),
    ],
)
def test_operations_on_logits_are_done_otherwise(spec: str, what: str, outputs: set[str]) -> None:
    asked = settings(spec, "logits", "single", 100)
    found = {rewritten(one): one for s in asked for one in operations(s)}
    assert {str(o) for o in changed(found[what], asked)} == outputs


@pytest.mark.parametrize(
    ("spec", "head", "name", "outputs"),
    [
        ("nll", "logits", "softmax rounded to bfloat16 for backward", {"grad of logits"}),
        ("nll", "logits", "softmax less the one-hot rounded to bfloat16 for backward", {"grad of logits"}),
        ("grpo", "logprobs", "advantages rounded to bfloat16", {"loss", "grad of logprobs"}),
        ("grpo", "logprobs", "logprobs rounded to bfloat16", {"logprobs", "loss", "grad of logprobs"}),
    ],
)
def test_what_is_rounded_changes_what_is_computed_from_it(spec: str, head: str, name: str, outputs: set[str]) -> None:
    asked = settings(spec, head, "single", 20)
    found = {one.name: one for setting in asked for one in rounded(setting)}
    assert {str(o) for o in changed(found[name], asked)} == outputs


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "head"), [("clipped_pg", "logprobs"), ("grpo", "logprobs"), ("dpo", "logprobs")])
def test_most_operations_done_otherwise_change_something(name: str, head: str) -> None:
    asked = settings(name, head, "single", 6)
    found = {one.name: one for s in asked for one in operations(s)}
    dead = [one for one in found.values() if not changed(one, asked)]
    assert len(found) > 40
    assert len(dead) < len(found) * 0.6, [one.name for one in dead]


def test_logits_are_read_shard_by_shard() -> None:
    one = counterfactuals_of(SPECS["nll"], "logits")["transposed view of logits read as if contiguous"]
    asked = [s.with_padding for s in settings("nll", "logits", "tp=2", 20) if one.applies(s)]
    assert asked
    for setting in asked:
        given = setting.batch.leaves["logits"]
        read = one.seams.leaves(setting, {"logits": given})["logits"]
        for shard in setting.vocab_shards:
            own, found = (x[:, shard.start : shard.end] for x in (given, read))
            assert torch.equal(found.t().flatten(), own.flatten())


def test_a_plain_mean_is_one_of_a_loss_that_divides_by_tokens() -> None:
    one = counterfactuals_of(SPECS["grpo"], "logits")["term of beta: the plain mean over each rank's tokens"]
    asked = settings("grpo", "logits", "single", 60)
    fixed = [setting for setting in asked if setting.bound_spec.options.loss_denominator != "token"]
    assert fixed
    assert all(one.run(setting) is None for setting in fixed)
    assert any(one.run(setting) is not None for setting in asked)


def test_a_number_is_not_called_the_second_factor() -> None:
    (setting,) = settings("dpo", "logprobs", "single", 1)
    said = {one.sentence for one in operations(setting) if "options.sft_loss_weight *" in one.sentence}
    assert any("the number is left out" in sentence for sentence in said)
    assert not any(" factor " in sentence for sentence in said)
    (of_tensors,) = settings("grpo", "logprobs", "single", 1)
    assert any("the second factor is left out" in one.sentence for one in operations(of_tensors))


def test_padding_counts_only_where_there_is_some() -> None:
    bank = counterfactuals_of(SPECS["nll"], "logits")
    one, without = bank["mask ignored, padding too"], bank["mask ignored"]
    assert [each.name for each in one.made_of] == [without.name]
    asked = settings("nll", "logits", "cp=2", 12) + settings("nll", "logits", "single", 6)
    padded = [s for s in asked if s.partition.tokens > sum(s.lengths)]
    assert 0 < len(padded) < len(asked)
    for setting in asked:
        with_padding, plain = one.run(setting) or {}, without.run(setting) or {}
        alike = all(same(with_padding[o], plain[o]) for o in plain)
        assert alike or setting in padded
    assert any(not same((one.run(s) or {})[o], (without.run(s) or {})[o]) for s in padded for o in one.run(s) or {})


def test_a_pack_may_be_cut_without_its_padding() -> None:
    one = counterfactuals_of(SPECS["nll"], "logits")["cu_seqlens for cu_seqlens_padded, in ids and masks"]
    packed = settings("nll", "logits", "dp=2", 12, "packed")
    padded = [s for s in packed if s.partition.tokens > sum(s.lengths)]
    assert {str(o) for o in changed(one, padded)} >= {"loss", "grad of logits"}
    assert {str(o) for o in changed(one, [s for s in packed if s not in padded])} <= {"logprobs"}  # of no label


def test_parts_of_sequences_may_be_counted() -> None:
    bank = counterfactuals_of(SPECS["nll"], "logits")
    asked = settings("nll", "logits", "cp=2", 8, "shard", "ppl_avg", "ppl_max")
    counted, not_counted = (bank[f"metrics: parts of own tokens{more}"] for more in (", counted", ""))
    assert {str(o) for o in changed(counted, asked)} == {"ppl_avg", "ppl_max"}
    pairs = [(counted.run(s), not_counted.run(s)) for s in asked]
    assert any(a and b and a[metric_output("ppl_avg")] < b[metric_output("ppl_avg")] for a, b in pairs)


def test_what_is_given_whole_may_be_split_in_another_order() -> None:
    one = counterfactuals_of(SPECS["value"], "values")["returns split end to end"]
    assert {str(o) for o in changed(one, settings("value", "values", "cp=2", 8, "packed"))} == {
        "loss",
        "grad of values",
    }
    not_shifted = counterfactuals_of(SPECS["nll"], "logits")["mask not shifted"]
    assert changed(not_shifted, settings("nll", "logits", "single", 8, "rows"))
    assert changed(not_shifted, settings("nll", "logits", "single", 8, "shard")) == set()


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("spec", "head", "layout", "name", "outputs"),
    [
        ("nll", "hidden", "single", "tail of chunks twice", {"loss", "grad of hidden", "grad of weight"}),
        (
            *("nll", "hidden", "single", "transposed view of weight read as if contiguous"),
            {"loss", "grad of hidden", "grad of weight"},
        ),
        ("nll", "hidden", "single", "short last chunk as a full one", {"loss", "grad of hidden", "grad of weight"}),
        ("grpo", "logprobs", "cp=2", "advantages not split", {"loss", "grad of logprobs"}),
        (
            *("dpo", "logprobs", "single", "mask ignored where there is a label, all else 0 there"),
            {"loss", "grad of logprobs"},
        ),
        ("clipped_pg", "logprobs", "single", "token_level_loss as True, all else kept", {"loss", "grad of logprobs"}),
        (
            *("dpo", "logprobs", "dp=2"),
            "valid_sequences rounded down to a multiple of 2 * dp",
            {"loss", "grad of logprobs"},
        ),
        ("nll", "logits", "cp=2", "mask false at the last token of each piece of a sequence", {"loss"}),
        ("nll", "logits", "single", "masked tokens trained on the last row, padding too", {"loss", "grad of logits"}),
        ("nll", "logits", "cp=2", "mask true in pieces without a trained token", {"loss", "grad of logits"}),
        ("grpo", "logprobs", "dp=2", "mean of micro-batches of 2 sequences, by sequences", {"loss"}),
        ("nll", "logits", "dp=2", "the last alone of micro-batches of 2 sequences", {"loss", "grad of logits"}),
        ("grpo", "logprobs", "dp=2", "mean of the means of sequences that train a token", {"loss"}),
        (
            "token_logprobs",
            "logits",
            "dp=2",
            "upstream gradient of logprobs divided by the rank's tokens",
            {"grad of logits"},
        ),
        (
            *("grpo", "logits", "dp=2"),
            "term of beta: the plain mean over each rank's tokens (masked rows of logits are 0)",
            {"loss", "grad of logits"},
        ),
        ("grpo", "logprobs", "single", "logprobs and old_logprobs swapped", {"loss", "grad of logprobs"}),
        ("nll", "hidden", "tp=2", "hidden reduced in every chunk", {"grad of hidden"}),
        ("nll", "logits", "single", "vocabulary tiles: sums not rescaled", {"loss", "grad of logits"}),
        ("nll", "hidden", "single", "all above the sum ignored", {"grad of hidden", "grad of weight"}),
        ("nll", "logits", "tp=2", "labels of other shards clamped", {"loss", "grad of logits"}),
        ("nll", "logits", "tp=2", "labels of other shards clamped, in forward alone", {"loss"}),
        ("nll", "logits", "tp=2", "largest logit not reduced over tp, softmax rebuilt", {"loss", "grad of logits"}),
        ("dpo", "logprobs", "single", "pairs as two halves", {"loss", "grad of logprobs"}),
        ("dpo", "logprobs", "single", "term of sft_loss_weight: of both sequences", {"loss", "grad of logprobs"}),
        ("dpo", "logprobs", "cp=2", "parts of own tokens over cp, averaged", {"loss", "grad of logprobs"}),
        ("nll", "logits", "tp=2", "one-hot on the first row of other shards in backward", {"grad of logits"}),
        ("nll", "logits", "tp=2", "softmax of the label's rank alone in backward", {"grad of logits"}),
        ("nll", "logits", "cp=2", "softmax reduced over cp, too", {"loss", "grad of logits"}),
        ("z_loss", "logits", "single", "logsumexp without the largest logit", {"loss", "grad of logits"}),
        ("preference", "rewards", "single", "pairs as two halves", {"loss", "grad of rewards"}),
        ("dpo", "logprobs", "single", "rejected detached", {"grad of logprobs"}),
        ("dpo", "logprobs", "single", "counts of sequences: all tokens", {"loss", "grad of logprobs"}),
        ("clipped_pg", "logprobs", "cp=2", "sums over sequences reduced in forward alone", {"grad of logprobs"}),
        ("value", "values", "single", "values one token late", {"loss", "grad of values"}),
        ("token_logprobs", "logits", "tp=2", "entropy of each shard in backward", {"grad of logits"}),
        ("nll", "hidden", "tp=2", "padding rows in the softmax", {"loss", "grad of hidden", "grad of weight"}),
        ("nll", "logits", "cp=2", "sum of exponentials reduced over cp, too", {"loss", "grad of logits"}),
        ("clipped_pg", "logits", "single", "filtered labels of log-probability 0, before too", {"loss"}),
        (
            *("clipped_pg", "logprobs", "single"),
            "term of reference_policy_kl_penalty divided by all tokens of each rank",
            {"loss", "grad of logprobs"},
        ),
    ],
)
def test_a_mistake_changes_what_it_says(spec: str, head: str, layout: str, name: str, outputs: set[str]) -> None:
    one = counterfactuals_of(SPECS[spec], head)[name]
    assert {str(o) for o in changed(one, settings(spec, head, layout, 200))} >= outputs
    values_alone = {"loss"} - outputs
    assert not {str(o) for o in changed(one, settings(spec, head, layout, 10))} & values_alone


LEFT_OUT = "leave this factor out; the backward of an all-reduce may bring it in"


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("outputs times the temperature", "divide the gradient of the logits by the temperature, too"),
        ("outputs times 1 / (the temperature)", "divide by the temperature once, not twice"),
        (
            "loss times cp",
            f'{LEFT_OUT}. Or, if the caller takes the mean over cp, declare Contract(loss={{"cp": "avg"}})',
        ),
        ("gradient of the loss times 1 / (dp * cp)", LEFT_OUT),
        ("outputs times tp", LEFT_OUT),
        ("outputs times 2", ""),
    ],
)
def test_a_factor_says_what_to_do(name: str, todo: str) -> None:
    assert counterfactuals_of(SPECS["nll"], "hidden")[name].todo == todo


def test_a_factor_that_the_mean_of_the_caller_takes_back_is_declared_as_such() -> None:
    """As what is to be done about it says."""

    def kernel(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
        ranks = mesh.get_group("cp").size()
        return ranks * -torch.where(inputs.mask, inputs.logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    averaged = Contract(loss={"cp": "avg"}, grads={"logprobs": {"cp": "avg"}})
    for contract, verdict in ((Contract(), Verdict.DISAGREE), (averaged, Verdict.AGREE)):
        declare = candidate("nll", head="logprobs", axes=("cp",), dtypes=("float32",), contract=contract)
        assert run_cell(Cell(declare(kernel), Layout(cp=2), "float32"), Settings(shrink_calls=0)).verdict is verdict
