# SPDX-License-Identifier: Apache-2.0
"""The reference with its seams open gives what the reference gives, and each seam can be wrong."""

from dataclasses import fields, replace

import pytest
import torch

from lossgate import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import PlacedProblem, sample_problems
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import mistake
from lossgate.counterfactuals.seams import RIGHT, Seams, run, scaled_gradient, spelled_out, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS

OPENED = replace(RIGHT, temper=lambda s, z: z / s.temperature, project=lambda s, leaves: s.head.logits(leaves))
"""Replaces stages by themselves, so that all stages between logits and loss are spelled out."""


def settings(name: str, head: str, layout: str = "single", count: int = 4) -> list[Setting]:
    """Returns problems of a spec, with all outputs that it has."""
    spec, made = SPECS[name], list[Setting]()
    for problem in sample_problems(dense_candidate(spec, head), Layout.parse(layout), "float32", count, 3):
        returned = [spec.output(output) for output in spec.outputs]
        made.append(Setting(PlacedProblem(BoundProblem(spec, problem), problem), returned))
    return made


@pytest.mark.parametrize(("name", "head"), [(name, head) for name, spec in SPECS.items() for head in spec.inputs])
def test_without_a_mistake_it_is_the_reference(name: str, head: str) -> None:
    for setting in settings(name, head):
        reference = setting.bound.reference(setting.returned)
        for seams in (RIGHT, OPENED) if spelled_out(setting) else (RIGHT,):
            found = run(setting, seams)
            for output, right in reference.items():
                assert torch.allclose(found[output], right, rtol=1e-7, atol=1e-10, equal_nan=True), (output, seams)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("nll", "hidden"), ("grpo", "logprobs"), ("dpo", "logits")])
def test_forward_alone_gives_the_values_of_each_mistake(name: str, head: str) -> None:
    asked = 0
    for one in counterfactuals_of(SPECS[name], head).values():
        for setting in settings(name, head, "cp=2", 1):
            values, whole = one.run_forward(setting), one.run(setting)
            if values is not None:
                assert whole is not None, one.name
                assert values.keys() == {o for o in whole if o.kind != "gradient"}
                assert all(torch.equal(x.nan_to_num(), whole[o].nan_to_num()) for o, x in values.items()), one.name
                asked += 1
    assert asked > 100


@pytest.mark.parametrize("field", fields(Seams), ids=lambda field: field.name)
def test_each_seam_changes_what_comes_out(field) -> None:
    wrong = {
        "fields": lambda s: {"mask": ~s.fields["mask"]},
        "options": lambda s: s.spec.bind({**s.bound_spec.values, "epsilon": 0.5, "softcap": 2.0}),
        "leaves": lambda s, leaves: {**leaves, "hidden": 2 * leaves["hidden"]},
        "project": lambda s, leaves: 2 * s.head.logits(leaves),
        "cap": lambda s, z: 2 * z,
        "temper": lambda s, z: z / s.temperature**2 / 2,
        "logsumexp": lambda s, z: z.amax(-1),
        "picked": lambda s, z: z[:, 0],
        "mean": lambda s, z: z[:, 0],
        "entropy": lambda s, tempered, logprobs: logprobs[:, 0],
        "values": lambda s, values: values.replace(logprobs=values.logprobs - 1),
        "parts": lambda s: [(2.0, {})],
        "loss": lambda bound, values, fields: (2 * bound.loss(values, fields)[0], {}),
        "upstream": lambda s, name, gradient: 2 * gradient,
        "outputs": lambda s, outputs: {o: 2 * x for o, x in outputs.items()},
    }[field.name]
    spec = {"entropy": "token_logprobs", "mean": "label_smoothing"}.get(field.name, "nll")
    for setting in settings(spec, "hidden", count=8):
        right, found = run(setting), run(setting, Seams(**{field.name: wrong}))
        if any(not torch.allclose(found[o], right[o], rtol=1e-3, atol=0.0) for o in right if o in found):
            return
    pytest.fail(f"no problem shows that {field.name} is wrong")


def test_a_value_may_have_the_gradient_of_another() -> None:
    x = torch.tensor([1.0, -torch.inf], requires_grad=True)
    value = with_gradient_of(3 * x, 5 * x)
    assert value.tolist() == [3.0, -torch.inf]
    assert torch.autograd.grad(value[0], x)[0].tolist() == [5.0, 0.0]
    assert torch.autograd.grad(scaled_gradient(x, -2.0)[0], x)[0].tolist() == [-2.0, 0.0]


def test_a_mistake_that_the_reference_refuses_says_nothing() -> None:
    def refuses(setting):
        raise ValueError("a weight above 1")

    (setting,) = settings("nll", "logits", count=1)
    assert mistake("a name", "a sentence", options=refuses).run(setting) is None
    assert mistake("a name", "a sentence", lambda s: False, fields=lambda s: {}).run(setting) is None


def test_stages_between_logits_and_loss_are_opened_only_where_there_are_logits() -> None:
    one = mistake("a name", "a sentence", "softmax", temper=lambda s, z: z)
    assert [one.run(setting) for setting in settings("nll", "logprobs", count=1)] == [None]
