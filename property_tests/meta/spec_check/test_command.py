# SPDX-License-Identifier: Apache-2.0
"""``lossgate spec check`` as a user meets it."""

from pathlib import Path

import pytest

from property_tests.meta.command_line import Lossgate

SPECS = """
import torch, lossgate

@lossgate.spec("mean_nll")
def mean_nll(values, batch, options):
    return torch.where(batch.mask, -values.logprobs, 0.0).sum() / batch.valid_tokens.clamp(min=1)

@lossgate.spec("squared", heads=("logits",))
def squared(values, batch, options):
    logprobs = torch.where(batch.mask, values.logprobs, 0.0)
    return (logprobs.detach() * logprobs).sum()
"""


@pytest.fixture
def file(folder: Path) -> str:
    (folder / "losses.py").write_text(SPECS)
    return "losses.py"


@pytest.mark.slow
def test_all_of_a_file(file: str, lossgate: Lossgate) -> None:
    done = lossgate("spec", "check", file)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "spec mean_nll"
    assert "spec mean_nll holds" in lines
    assert lines[-1] == "spec squared is not fit to judge kernels by: see 1 FAIL above"
    failed = lines.index("  FAIL  the gradient is the derivative of the loss")
    assert lines[failed + 1].startswith("        the gradient of values.logprobs is 0.5 times what differences")
    assert lines[failed + 2].startswith("        change: detach nothing")
    assert lines[failed + 3].startswith("        on: ")


@pytest.mark.slow
def test_one_of_a_file(file: str, lossgate: Lossgate) -> None:
    done = lossgate("spec", "check", f"{file}:mean_nll")
    assert (done.returncode, done.stderr) == (0, "")
    assert "squared" not in done.stdout


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ((), "spec check: nothing named; expected files with specs, such as my_loss.py, or names of specs"),
        (("nlll",), "unknown spec 'nlll'; did you mean 'nll'?"),
        (("gone.py",), "gone.py: no such file"),
        (("losses.py:mean",), "losses.py: no spec named 'mean'; did you mean 'mean_nll'?"),
        (("kernels.py",), "kernels.py: no spec in it; decorate a reference with @lossgate.spec('its name', ...)"),
    ],
)
def test_what_is_not_there(targets: tuple[str, ...], said: str, file: str, lossgate: Lossgate) -> None:
    done = lossgate("spec", "check", *targets)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {said}")
