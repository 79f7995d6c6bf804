# SPDX-License-Identifier: Apache-2.0
"""The judge compares outputs that only some losses have.

They are infinities, sums that cancel, counts, and outputs that some ranks lack.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossgate import ANY, Candidate, Layout, Problem, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.judge.comparison import Comparison
from lossgate.judge.ensemble import run_ensemble
from lossgate.judge.tolerance import Tolerance
from lossgate.losses import SPECS
from lossgate.numerics.noise import Noise
from lossgate.numerics.rounded_arithmetic import RoundedRun
from lossgate.properties import PROPERTIES
from lossgate.specs.outputs import LOGPROBS
from lossgate.worlds import SimulatedWorld

from .judge.checks import rounds_to


def problem(spec: str, **changes: Any) -> Problem:
    plain = {"dtype": "float32", "lengths": (9, 7), "masks": ("all", "all"), "hidden": 1, "vocab": 5, "seed": 7}
    return Problem(**{"spec": spec, "head": "logprobs", **plain, **changes})


def held_to_agreement(kernel: Candidate, example: Problem) -> CaseResult:
    return run_case(Case(kernel, example, SimulatedWorld(example.layout)), PROPERTIES["agreement"])


def noise(example: Problem, members: int) -> dict[str, Tensor]:
    """Returns each output of an ensemble of so many members on a problem, ``[members, *shape]``.

    Gradients are left out.
    """
    spec = SPECS[example.spec]
    dense, bound = dense_candidate(spec, example.head), BoundProblem(spec, example)
    stages = dense.precision[example.dtype].stages(example.dtype, caller_reduces_hidden=False)
    ensemble = run_ensemble(dense.starts_at, bound.batch, bound.bound_spec, RoundedRun(Noise(1), members, stages))
    return {str(output): tensor for output, tensor in ensemble.outputs.items()}


def test_an_infinite_reference_wants_the_same() -> None:
    reference = torch.tensor([-1.0, float("-inf"), -2.0], dtype=torch.float64)
    members = torch.stack([reference, reference]) + torch.tensor([[1e-7, 0.0, -1e-7], [-1e-7, 0.0, 1e-7]])

    def compared(result: Tensor) -> Comparison:
        tolerance = Tolerance(LOGPROBS, reference, members - reference, **rounds_to(2.0**-24))
        return tolerance.compare(result)

    assert compared(reference.clone()).agrees
    for wrong in (-3.0, float("inf"), float("nan")):
        result = reference.clone()
        result[1] = wrong
        assert compared(result).faults[0] == "1 of 3 entries should be infinite, but are not"


def test_what_is_too_large_for_the_dtype_may_be_infinite() -> None:
    """The perplexity of a sequence with log-probabilities of -200 is 7e86."""
    found = held_to_agreement(dense_candidate(SPECS["nll"], "logprobs"), problem("nll", logit_std=400.0))
    assert found.agrees, found.findings


def test_cancelling_sums_are_as_noisy_as_adding_one_by_one_makes_them() -> None:
    """Terms have either sign, so partial sums are larger than the result, and each is rounded."""
    example = problem("clipped_pg", lengths=(200,), masks=("all",))
    fields = BoundProblem(SPECS["clipped_pg"], example).batch.fields
    members = noise(example, 400)["loss"]
    terms = fields["advantages"][fields["mask"]].abs().mean()
    # This is a mean over 199 terms; rounding the terms alone makes 0.03.
    assert 0.2 < float(members.std() / (terms * 2.0**-24)) < 1


def test_what_is_computed_twice_comes_out_the_same_twice() -> None:
    """A count of clipped tokens compares a loss with its clipped twin.

    The two are the same number inside the clip.
    """
    example = problem("value", head="values", options={"cliprange": 0.2}, scenario={})
    assert not noise(example, 16)["vf_clipfrac"].any()


def test_outputs_that_some_ranks_lack_disagree() -> None:
    dense = dense_candidate(SPECS["nll"], "logprobs")

    def lacking(inputs: Any, options: Any, mesh: Any) -> Any:
        outputs = dense.kernel(inputs, options, mesh)
        assert not isinstance(outputs, Tensor)
        return replace(outputs, logprobs=None, metrics={}) if mesh.get_rank() == 0 else outputs

    found = held_to_agreement(replace(dense, kernel=lacking), problem("nll", layout=Layout(dp=2)))
    assert "logprobs: it is missing on rank 0, but other ranks return it" in found.findings
    assert "ppl_avg: it is missing on rank 0, but other ranks return it" in found.findings


def test_a_kernel_may_compute_exp_less_1_in_two_steps() -> None:
    """NeMo-RL computes k3 as exp(d) - 1 - d, which cancels where the policies are near."""
    dense, exact = dense_candidate(SPECS["clipped_pg"], "logprobs"), torch.expm1

    def two_steps(inputs: Any, options: Any, mesh: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "expm1", lambda x: x.exp() - 1)
            return dense.kernel(inputs, options, mesh)

    for seed in range(8):
        example = problem("clipped_pg", lengths=(2,), masks=("all",), seed=seed)
        found = held_to_agreement(replace(dense, kernel=two_steps), example)
        assert found.agrees, found.findings
    assert torch.expm1 is exact


def test_a_logarithm_of_a_weight_that_is_rounded_alike_for_all_numbers_is_no_mistake() -> None:
    """In log space the weights of a mixture are added to log-probabilities of a coarser spacing."""
    given = {"options": {"divergence_type": "jsd", "beta": 0.1}, "scenario": {"teacher": "near"}}
    sizes = {"lengths": (0, 2, 29), "masks": ("all",) * 3, "vocab": 301, "label_boost": 12.0, "seed": 0}
    example = problem("divergence", head="logits", **given, **sizes)

    @candidate("divergence", head="logits", supports={"divergence_type": "jsd", "beta": ANY})
    def jsd(inputs, options, mesh):
        log_q, log_p = (logits.log_softmax(1) for logits in (inputs.logits, inputs.teacher_logits))
        beta = torch.tensor(options.beta)
        log_r = torch.stack([log_q + torch.log1p(-beta), log_p + beta.log()]).logsumexp(0)
        of_teacher, of_student = (F.kl_div(log_r, x, reduction="none", log_target=True) for x in (log_p, log_q))
        losses = (beta * of_teacher + (1 - beta) * of_student).sum(1)
        return losses.where(inputs.mask, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    assert held_to_agreement(jsd, example).agrees
    wrong = replace(jsd, kernel=lambda inputs, options, mesh: jsd.kernel(inputs, options, mesh) * (1 + 1e-4))
    assert not held_to_agreement(wrong, example).agrees
