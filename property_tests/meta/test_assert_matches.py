# SPDX-License-Identifier: Apache-2.0
"""``lossgate.assert_matches``: plain functions of tensors in an ordinary test file."""

import json
import os
import re
import rlcompleter
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lossgate
from lossgate.base.errors import UsageError
from lossgate.engine.settings import Settings, names_of
from lossgate.plain_functions.plain_function import as_candidate
from lossgate.plain_functions.presets import PRESETS

TRL = """
import torch
import torch.nn.functional as F
import lossgate

def selective_log_softmax(logits, index):
    chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, -1) for row in logits])

def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1):
    delta = (chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps)
    return -F.logsigmoid(beta * delta).mean(), delta.detach()

def dpo_wrong(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1):
    delta = (chosen_logps - ref_chosen_logps) + (rejected_logps - ref_rejected_logps)
    return -F.logsigmoid(beta * delta).mean(), delta.detach()

def test_logprobs():
    lossgate.assert_matches(selective_log_softmax, "token_logprobs", "trl.selective_log_softmax")

def test_right():
    lossgate.assert_matches(dpo_loss, "dpo", "trl.dpo_loss")

def test_wrong_sign():
    lossgate.assert_matches(dpo_wrong, "dpo", "trl.dpo_loss")
"""
VERL = """
import torch
import lossgate

def losses_of(old_log_prob, log_prob, advantages, worse, cliprange_low, cliprange_high, clip_ratio_c):
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = worse(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.min(losses, -advantages * clip_ratio_c), losses)

def policy_loss(old_log_prob, log_prob, advantages, response_mask, cliprange_low=0.2, cliprange_high=0.2,
                clip_ratio_c=3.0):
    losses = losses_of(old_log_prob, log_prob, advantages, torch.maximum, cliprange_low, cliprange_high, clip_ratio_c)
    return (losses * response_mask).sum() / (response_mask.sum() + 1e-8), {"actor/pg_clipfrac": 0.0}

def padded(old_log_prob, log_prob, advantages, response_mask, clip_ratio_c=3.0):
    losses = losses_of(old_log_prob, log_prob, advantages, torch.maximum, 0.2, 0.2, clip_ratio_c)
    return (losses * response_mask).mean()

def wrong_side(old_log_prob, log_prob, advantages, response_mask, clip_ratio_c=3.0):
    losses = losses_of(old_log_prob, log_prob, advantages, torch.minimum, 0.2, 0.2, clip_ratio_c)
    return (losses * response_mask).sum() / response_mask.sum()

def test_right():
    lossgate.assert_matches(policy_loss, "clipped_pg", "verl.policy_loss")

def test_padded():
    lossgate.assert_matches(padded, "clipped_pg", "verl.policy_loss")

def test_wrong_side():
    lossgate.assert_matches(wrong_side, "clipped_pg", "verl.policy_loss")
"""
LIGER = """
import torch
import lossgate

class GradientInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index, counts_ignored):
        kept = (target != ignore_index)[:, None]
        weight = kept / (len(target) if counts_ignored else kept.sum().clamp(min=1))
        label = target[:, None].where(kept, 0)
        loss = -(logits.log_softmax(-1).gather(1, label) * weight).sum()
        logits.copy_(logits.softmax(-1)).scatter_add_(1, label, -torch.ones_like(weight)).mul_(weight)
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        return ctx.saved_tensors[0] * upstream, None, None, None

def cross_entropy(input, target, ignore_index=-100):
    return GradientInPlace.apply(input, target, ignore_index, False)

def ignored_counted(input, target, ignore_index=-100):
    return GradientInPlace.apply(input, target, ignore_index, True)

def test_right():
    lossgate.assert_matches(cross_entropy, "nll", "liger.cross_entropy")

def test_ignored_counted():
    lossgate.assert_matches(ignored_counted, "nll", "liger.cross_entropy")

def mean_of_rows(logits, labels, mask):
    return (torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none") * mask).mean()

def test_mean_of_rows():
    parameters = {"logits": "logits", "labels": "labels", "mask": "mask"}
    lossgate.assert_matches(mean_of_rows, "nll", parameters, rows=True)
"""
SECONDS = """
import json, pytest, time

@pytest.fixture(autouse=True)
def _seconds(request):
    start = time.process_time()
    yield
    with open("seconds.jsonl", "a") as file:
        print(json.dumps([request.node.name, time.process_time() - start]), file=file)
"""
CAUSES = {
    "liger": (
        LIGER,
        {
            "test_ignored_counted": "in place of valid_tokens the kernel takes the number of all tokens",
            "test_mean_of_rows": "the mean is over all entries of rows, padding included, and not over valid_tokens",
        },
    ),
    "trl": (TRL, {"test_wrong_sign": "where the reference computes `rewards[0::2] - rewards[1::2]`"}),
    "verl": (
        VERL,
        {
            "test_padded": "the mean is over all entries of rows, padding included, and not over valid_tokens",
            "test_wrong_side": "where the reference computes `torch.maximum(-advantages * ratio, -advantages * clam",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", CAUSES)
def test_the_last_line_of_pytest_has_the_cause(framework: str, tmp_path: Path) -> None:
    text, causes = CAUSES[framework]
    (tmp_path / "test_losses.py").write_text(text)
    (tmp_path / "conftest.py").write_text(SECONDS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_losses.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    failed = dict(re.findall(r"^FAILED test_losses.py::(\w+) - AssertionError: (.*)$", done.stdout, re.MULTILINE))
    assert failed.keys() == causes.keys(), done.stdout
    assert [test for test, cause in causes.items() if not failed[test].startswith(cause)] == [], failed
    seconds = dict(map(json.loads, (tmp_path / "seconds.jsonl").read_text().splitlines()))
    print(framework, seconds)
    assert max(seconds.values()) < 10


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def twice(logits: Tensor, target: Tensor) -> Tensor:
    return 2 * F.cross_entropy(logits, target)


def of_positions(logits: Tensor, target: Tensor, /, scale: float) -> Tensor:
    return scale * F.cross_entropy(logits, target)


class Head(nn.Module):
    def forward(self, hidden: Tensor, lm_head: Tensor, labels: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {"other": tokens, "loss": F.cross_entropy(hidden @ lm_head.T, labels, reduction="sum") / tokens}


def causal(logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = -100, **more: Any) -> Tensor:
    labels = F.pad(labels, (0, 1), value=ignore_index)[:, 1:].flatten()
    total = F.cross_entropy(logits.view(-1, vocab_size).float(), labels, ignore_index=ignore_index, reduction="sum")
    return total / more["num_items_in_batch"]


GIVEN = {"logits": "logits", "target": "labels"}
OF_HEAD = {"hidden": "hidden", "lm_head": "weight", "labels": "labels", "tokens": "valid_tokens"}
OF_CAUSAL = {"logits": "logits", "labels": "unshifted_labels", "vocab_size": "vocab_size"}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("fn", "inputs", "more"),
    [
        (cross_entropy, GIVEN, {}),
        (F.cross_entropy, "torch.cross_entropy", {"layouts": ["single", "dp=2"]}),
        (of_positions, {**GIVEN, "scale": 1.0}, {}),
        (partial(of_positions, scale=1.0), GIVEN, {"options": {"temperature": 1.0}}),
        (Head(), OF_HEAD, {}),
        (causal, {**OF_CAUSAL, "num_items_in_batch": "valid_tokens"}, {"rows": True}),
    ],
)
def test_ways_to_say_what_parameters_are(fn: Any, inputs: Any, more: Any) -> None:
    lossgate.assert_matches(fn, "nll", inputs, **more)


def test_the_message_is_in_words_of_the_function() -> None:
    with pytest.raises(AssertionError) as error:
        lossgate.assert_matches(twice, "nll", GIVEN)
    first, *lines = str(error.value).splitlines()
    assert re.match(r"loss: got \S+, want \S+; .* \(DISAGREE\)$", first)  # tests in this process look for no cause
    assert lines[0] == "DISAGREE  twice  float32  single"
    (example,) = (line for line in lines if "DrawnProblem.from_json" in line)
    problem = eval(example.partition(": ")[2], {"lossgate": lossgate})
    assert problem.inputs().logits.shape == (problem.problem.tokens, problem.problem.vocab)


@pytest.mark.slow
def test_verify_takes_the_same() -> None:
    found = lossgate.verify(cross_entropy, "nll", GIVEN, ranks=2)
    assert [str(result.cell.layout) for result in found.results] == ["single", "dp=2"]
    assert found.agrees
    assert not lossgate.verify(twice, "nll", GIVEN, layouts="single", dtypes=torch.float32).agrees


def test_too_little_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.engine.search.choose", lambda placed, *_: placed[:1])
    monkeypatch.setattr("lossgate.engine.search.Search.asks_mistakes", False)
    monkeypatch.setattr(
        "lossgate.reports.verified.load_settings", lambda **_: Settings(examples=1, rounds=1, layouts=("single",))
    )
    with pytest.raises(AssertionError, match=r"^.*raise --examples to \d+.* \(INCONCLUSIVE\)\n"):
        lossgate.assert_matches(cross_entropy, "nll", GIVEN)


def test_every_preset_names_what_its_spec_has() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/own-tests.md").read_text()
    for name, preset in PRESETS.items():
        assert f'`"{name}"`' in page
        assert {*preset.needs} <= {*preset.names.values()}, name
        own = [next(one for one, thing in preset.names.items() if thing == needed) for needed in preset.needs]

        def takes(**given: Any) -> None: ...

        mapping = {one: preset.names[one] for one in own}
        as_candidate("", takes, preset.spec, mapping, rows=preset.rows)


M = lossgate.assert_matches


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: M(cross_entropy, "nl", GIVEN), "unknown spec 'nl'; did you mean 'nll'?"),
        (
            lambda: M(cross_entropy, "nll", {**GIVEN, "logit": "mask"}),
            "has no parameter 'logit'; did you mean 'logits'?",
        ),
        (lambda: M(cross_entropy, "nll", {**GIVEN, "target": "label"}), "matches(inputs['target']='label'): the batch"),
        (lambda: M(cross_entropy, "nll", {**GIVEN, "target": "label"}), "did you mean 'labels'? (expected one of lab"),
        (lambda: M(cross_entropy, "grpo", {**GIVEN, "target": "prev_logprobs"}), "here it is 'old_logprobs'"),
        (lambda: M(cross_entropy, "nll", {"logits": "logits"}), "nothing is given to parameter 'target'; name the th"),
        (lambda: M(cross_entropy, "nll", {**GIVEN, "logits": "hidden"}), "no parameter is given 'weight', which has"),
        (
            lambda: M(cross_entropy, "nll", {**GIVEN, "logits": "mask"}),
            "names no input that has a gradient; spec 'nll'",
        ),
        (lambda: M(cross_entropy, "nll", {"logits": "hidden", "target": "logits"}), "names the inputs of several head"),
        (lambda: M(cross_entropy, "nll", {**GIVEN, "target": "unshifted_labels"}), "in rows alone; write rows=True"),
        (lambda: M(cross_entropy, "nll", {}), "expected what each parameter is, such as {'logits': 'logits', 'target'"),
        (
            lambda: M(cross_entropy, "nll", "verl.polcy_loss"),
            "did you mean 'verl.policy_loss'? (expected one of torch.",
        ),
        (lambda: M(cross_entropy, "nll", "verl.policy_loss"), "that preset is of spec 'clipped_pg', not of 'nll'"),
        (lambda: M(cross_entropy, "dpo", "trl.dpo_loss"), "a parameter named chosen_logps or policy_chosen_logps, and"),
        (lambda: M(torch.relu, "nll", {"x": "logits"}), "it has no signature; wrap it in a function of named paramete"),
        (lambda: M(3, "nll", GIVEN), "assert_matches(fn=3): expected a function of tensors"),
        (lambda: M(cross_entropy, "nll", GIVEN, options={"temprature": 1.0}), "assert_matches(options['temprature']=1"),
        (lambda: M(cross_entropy, "nll", GIVEN, dtypes="fp16"), "assert_matches(dtypes=('fp16',)): unknown dtype 'fp1"),
        (lambda: M(cross_entropy, "nll", GIVEN, layouts="singel"), "can't read 'singel'; expected 'single'"),
        (lambda: M(cross_entropy, "nll", GIVEN, properties="agrement"), "did you mean 'agreement'?"),
        (lambda: lossgate.verify(cross_entropy), "what its parameters are: lossgate.verify(fn, 'nll', {'logits'"),
    ],
)
def test_slips_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert message in str(error.value)


BF16 = {torch.bfloat16: lossgate.Precision(logits=torch.bfloat16)}


@lossgate.candidate("nll", head="logits", dtypes=(torch.bfloat16,), precision=BF16)
def declared(inputs: Any, options: Any, mesh: Any) -> Tensor:
    return inputs.logits.sum()


def test_a_candidate_is_no_plain_function() -> None:
    with pytest.raises(UsageError, match=r"it is a candidate already; write lossgate.verify\(it\).check\(\)"):
        lossgate.assert_matches(declared, "nll", GIVEN)
    with pytest.raises(UsageError, match=r"verify\(rows=True\): that is said of a plain function alone; remove it"):
        lossgate.verify(declared, rows=True)


def test_dtypes_of_torch_and_single_layouts_are_names() -> None:
    assert (declared.dtypes, declared.precision["bfloat16"].logits) == (("bfloat16",), "bfloat16")
    assert names_of("verify(", "dtypes", torch.bfloat16) == names_of("verify(", "dtypes", "bfloat16") == ("bfloat16",)
    assert names_of("verify(", "dtypes", [torch.float16, "float32"]) == ("float16", "float32")
    assert names_of("verify(", "layouts", "tp=2,cp=2") == ("tp=2,cp=2",)
    lossgate.suite(declared, layouts="single", dtypes=torch.bfloat16)


def test_a_world_that_is_not_known_is_refused_where_it_is_written() -> None:
    with pytest.raises(UsageError, match=r"suite\(world='simulatd'\): did you mean 'simulated'\?"):
        lossgate.suite(declared, world="simulatd")


def test_completion_shows_the_public_names() -> None:
    complete, found = rlcompleter.Completer({"lossgate": lossgate}).complete, list[str]()
    while (name := complete("lossgate.", len(found))) is not None:
        found.append(name.rstrip("()").removeprefix("lossgate."))
    assert {*lossgate.__all__} <= {*found}
