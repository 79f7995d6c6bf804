# SPDX-License-Identifier: Apache-2.0
"""``lossgate.verify`` and ``lossgate.example``: the same from Python, in a notebook, say."""

import re
from typing import Any

import pytest
import torch

import lossgate
from lossgate.base.errors import UsageError
from lossgate.losses import SPECS

EVERY = [(name, head) for name, spec in SPECS.items() for head in spec.inputs]


def kernel(factor: float) -> lossgate.Candidate:
    """A candidate that no other process can load, as in a notebook."""

    @lossgate.candidate("nll", head="logprobs", axes=("cp",), dtypes=("float32",), name="in_a_notebook")
    def nll(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
        total = torch.where(inputs.mask, inputs.logprobs, 0.0).sum()
        return -factor * total / inputs.valid_tokens.clamp(min=1)

    return nll


def test_a_right_kernel_agrees() -> None:
    found = lossgate.verify(kernel(1.0), layouts=["single", "cp=2"])
    assert found.agrees
    assert found.verdict == "AGREE"
    assert [str(result.cell.layout) for result in found.results] == ["single", "cp=2"]
    found.check()


def test_a_kernel_that_raises_everywhere_is_given_up() -> None:
    @lossgate.candidate("nll", head="logprobs", axes=("cp",), dtypes=("float32",))
    def raises(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
        raise ValueError(f"{len(inputs.labels)} tokens are not mine")

    found = lossgate.verify(raises, layouts=["single", "cp=2", "cp=3", "cp=4"])
    assert [str(result.cell.layout) for result in found.results] == ["single", "cp=2"]
    assert "raises: 2 more cells not tried, since all before ended alike: rank 0 raised ValueError" in repr(found)


def test_the_full_matrix_can_be_asked_for() -> None:
    @lossgate.candidate("nll", head="logprobs", axes=("cp",), dtypes=("float32",))
    def raises(inputs: Any, options: Any, mesh: Any) -> torch.Tensor:
        raise ValueError("no")

    assert "raises: 2 more cells not tried" in repr(lossgate.verify(raises, ranks=8))
    assert "raises: 6 more cells not tried" in repr(lossgate.verify(raises, ranks=8, matrix="full"))


def test_a_wrong_kernel_is_shown_with_its_reasons() -> None:
    found = lossgate.verify(kernel(2.0), layouts=["single"])
    assert not found.agrees
    text = repr(found)
    assert re.search(r"  loss: got \S+, want \S+; absolute difference \S+, relative difference 1$", text, re.MULTILINE)
    assert "Verdicts" in text
    assert "replay" not in text  # there is no file to replay
    with pytest.raises(AssertionError, match=r"loss: got .*, relative difference 1"):
        found.check()


def test_a_notebook_shows_the_table() -> None:
    html = lossgate.verify(kernel(2.0), layouts=["single"])._repr_html_()
    assert html.startswith("<pre>")
    assert "Verdicts" in html
    assert 'font-weight: bold">DISAGREE' in html


def test_what_is_no_candidate_is_a_line() -> None:
    with pytest.raises(UsageError, match=r"verify\(\): no candidate; expected one or more"):
        lossgate.verify()
    with pytest.raises(UsageError, match=r"expected a candidate; decorate the kernel with @lossgate.candidate"):
        lossgate.verify(torch.sum)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="unknown profile"):
        lossgate.verify(kernel(1.0), profile="dve")


@pytest.mark.parametrize(("spec", "head"), EVERY)
def test_there_is_an_example_of_every_spec_and_head(spec: str, head: str) -> None:
    found = lossgate.example(spec, head=head)
    assert found.problem.lengths[:2] == (5, 3)
    first = SPECS[spec].outputs[0]
    assert torch.isfinite(found.reference()[first]).all()
    assert isinstance(found.inputs(), SPECS[spec].inputs[head])


def test_an_example_is_what_a_kernel_gets() -> None:
    found = lossgate.example(kernel(1.0), vocab=7, lengths=[4])
    again = lossgate.example("nll", head="logprobs", vocab=7, lengths=[4])
    assert torch.equal(found.inputs().logprobs, again.inputs().logprobs)
    exact = found.inputs(dtype=torch.float64)
    loss = kernel(1.0).kernel(exact, found.options, None)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(loss, found.reference()["loss"])
    own = kernel(1.0)
    lossgate.example(own).check(own)
    wrong = kernel(2.0)
    with pytest.raises(AssertionError, match=r"loss: got .*, relative difference 1"):
        lossgate.example(wrong).check(wrong)


def test_an_example_can_be_split_and_have_options() -> None:
    found = lossgate.example("nll", layout="tp=2", vocab=6, options={"reduction": "sum", "bias": True})
    assert found.inputs(rank=1).weight.shape == (3, 4)
    assert found.inputs().bias is not None
    assert found.options.reduction == "sum"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"of": "nlll"}, "unknown spec 'nlll'; did you mean 'nll'?"),
        ({"of": "nll", "head": "hiden"}, "example(head='hiden'): spec 'nll' has no such head; did you mean 'hidden'?"),
        ({"of": "nll", "layout": "tp=x"}, "layout"),
        ({"of": "nll", "layout": "tp=12"}, "layout"),
        ({"of": "nll", "options": {"reducton": "sum"}}, "reducton"),
        ({"of": "dpo", "lengths": [3]}, "problem: group_size=2 does not divide 1 sequences"),
    ],
)
def test_an_example_that_cannot_be_made_is_a_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        lossgate.example(**arguments)
    assert message in str(error.value)
