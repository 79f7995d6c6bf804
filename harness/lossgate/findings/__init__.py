# SPDX-License-Identifier: Apache-2.0
"""What lossgate found in public losses: each finding with a script that shows it without lossgate.

    lossgate findings
    lossgate findings liger-stride

A script's docstring says in its first line what is wrong, and then which file and line of the
library does it, and why. A script prints what it sees, and exits with 1 if the defect is there and
with 0 if it is not.
"""

import ast
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lossgate.adapters import LIBRARIES, Library
from lossgate.base.spelling import look_up

_SCRIPTS = Path(__file__).parent / "scripts"
_SECONDS = 300
"""The time that a script has. Triton's interpreter takes most of it."""


class Severity(StrEnum):
    """What comes of a finding in training."""

    WRONG = "wrong number"
    """A loss, gradient or metric is wrong, and nothing says so."""
    NAN = "NaN"
    """A loss or gradient is NaN or infinite, where it is defined."""
    CRASH = "crash"
    """A call raises an error, or ranks wait for each other."""
    PRECISION = "low precision"
    """A number is rounded to a coarser format than its dtype, and nothing says so."""
    METRIC = "wrong metric"
    """A metric is wrong. The loss and its gradients are right."""
    CONVENTION = "convention"
    """The library promises nothing else, and callers must know."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a public loss does, and that its callers would not expect."""

    name: str
    """Such as "liger-stride". It stays the same."""
    library: str
    """The name of its adapter; see ``lossgate.adapters``."""
    severity: Severity
    shown_by: str
    """The property that shows it."""
    entry_points: tuple[str, ...]
    """The adapters that show it; none if no adapter makes the call, or theirs declare it as a
    convention, so that it is not asked."""
    versions: tuple[str, ...]
    """The versions that have it, as far as they were tried."""
    upstream: str = ""
    """The upstream issue or pull request that is about it; "" if we know of none."""
    mended_in: str = ""
    """The first version without it; "" if there is none that we know of."""
    axes: tuple[str, ...] = ()
    """It shows only on layouts that split one of these axes; empty if on any layout."""
    needs_stand_ins: bool = False
    """Whether the library imports on the way what no loss needs, such as ray. Then stand-ins take
    its place, as for the adapter."""

    @property
    def of(self) -> Library:
        """The library."""
        return LIBRARIES[self.library]

    @property
    def script(self) -> Path:
        """A script that shows it without lossgate."""
        return _SCRIPTS / f"{self.name}.py"

    @property
    def sentence(self) -> str:
        """What is wrong, in a sentence."""
        return " ".join(self._paragraphs[0].split())

    @property
    def cause(self) -> str:
        """The line of the library that does it, or how it begins, with its file, such as
        "torch/nn/functional.py:12". The number is that of the installed version; there is none if
        the line is not found, or the library is a checkout.
        """
        file, line = self._paragraphs[1].removeprefix("Cause: ").split("\n    ")
        return f"{file}{self._number(file, line)}: {line}"

    @property
    def why(self) -> str:
        """Why that line does it, in a sentence."""
        return " ".join(self._paragraphs[2].split())

    @property
    def _paragraphs(self) -> list[str]:
        return (ast.get_docstring(ast.parse(self.code)) or "").split("\n\n")

    def _number(self, file: str, line: str) -> str:
        found = self.of.find(file) if self.of.is_release else None
        lines = found.read_text(encoding="utf-8").splitlines() if found else []
        return next((f":{number}" for number, text in enumerate(lines, 1) if text.strip().startswith(line)), "")

    @property
    def code(self) -> str:
        """The text of the script, without its licence."""
        return self.script.read_text(encoding="utf-8").partition("\n")[2]

    def run(self) -> "Seen":
        """Runs the script with this Python.

        Raises:
            UsageError: if the library is not installed, or too old.
        """
        self.of.check()
        first = f"import lossgate.adapters.{self.library}; " if self.needs_stand_ins else ""
        command = f"import runpy; {first}runpy.run_path({str(self.script)!r}, run_name='__main__')"
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", command],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Seen(None, f"it did not end in {_SECONDS} seconds")
        if done.returncode == 1 and "Traceback" not in done.stderr:
            return Seen(True, done.stdout.strip())
        if done.returncode == 0:
            return Seen(False, done.stdout.strip())
        return Seen(None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


@dataclass(frozen=True)
class Seen:
    """What came of running a script."""

    there: bool | None
    """Whether the defect is there; None if the script could not tell."""
    output: str
    """What the script printed, or why it could not tell."""

    @property
    def in_words(self) -> str:
        if self.there is None:
            return "the script could not tell"
        return "it is there" if self.there else "it is not there"


def _found(
    name: str,
    severity: Severity,
    shown_by: str,
    entry_points: str = "",
    *,
    versions: tuple[str, ...] = (),
    upstream: str = "",
    axes: tuple[str, ...] = (),
    needs_stand_ins: bool = False,
) -> Finding:
    """Returns a finding whose name begins with that of its library. By default the versions are
    those with which the adapter was tried.
    """
    library = name.partition("-")[0].replace("cce", "cut_cross_entropy")
    return Finding(
        name=name,
        library=library,
        severity=severity,
        shown_by=shown_by,
        entry_points=tuple(f"{library}.{entry}" for entry in entry_points.split()),
        versions=versions or LIBRARIES[library].known,
        upstream=upstream,
        axes=axes,
        needs_stand_ins=needs_stand_ins,
    )


_WRONG, _NAN, _CRASH, _PRECISION, _METRIC, _CONVENTION = Severity
_LIGER_LOGITS = "cross_entropy cross_entropy_mean smoothed_cross_entropy cross_entropy_with_z_loss"
_LIGER_LINEAR = (
    "fused_linear_cross_entropy fused_linear_cross_entropy_mean fused_linear_smoothed fused_linear_with_z_loss"
)
_KL = "forward_kl reverse_kl chunked_forward_kl"
_SINCE_2_13 = ("2.13.0", "2.14.1")
_LIGER = "https://github.com/linkedin/Liger-Kernel/"
_VERL = "https://github.com/verl-project/verl/pull/"
_MEGATRON = "https://github.com/NVIDIA/Megatron-LM/pull/"

FINDINGS = {
    finding.name: finding
    for finding in (
        _found(
            "torch-mean-of-nothing",
            _CONVENTION,
            "nothing-trained",
            "cross_entropy_mean",
            upstream="https://github.com/pytorch/pytorch/issues/70348",
        ),
        _found("torch-chunked-loss", _PRECISION, "agreement", versions=_SINCE_2_13),
        _found("torch-chunked-gradients", _PRECISION, "agreement", versions=_SINCE_2_13),
        _found("torch-empty-shard", _CRASH, "agreement"),
        _found("torch-confident-label", _PRECISION, "agreement"),
        _found("liger-stride", _WRONG, "strided-inputs", _LIGER_LOGITS, upstream=f"{_LIGER}pull/1251"),
        _found("liger-frozen-hidden", _WRONG, "frozen-inputs", _LIGER_LINEAR),
        _found("liger-second-backward", _CONVENTION, "second-backward"),
        _found(
            "liger-linear-second-backward",
            _WRONG,
            "second-backward",
            f"{_LIGER_LINEAR} fused_linear_jsd fused_linear_kl",
        ),
        _found("liger-jsd-stride", _WRONG, "strided-inputs", "fused_linear_jsd fused_linear_kl"),
        _found("liger-few-tokens", _WRONG, "agreement", "chunked_dapo chunked_cispo", axes=("dp",)),
        _found("liger-collective-per-chunk", _CRASH, "agreement"),
        _found("liger-writes-logits", _CONVENTION, "inputs-kept", upstream=f"{_LIGER}issues/343"),
        _found("liger-dpo-nothing-chosen", _NAN, "agreement", "chunked_dpo"),
        _found("deepspeed-upstream", _WRONG, "agreement", "tiled_sum tiled_mean"),
        _found("deepspeed-empty-tile", _CONVENTION, "agreement", "tiled_mean"),
        _found("megatron-fused-bfloat16", _PRECISION, "agreement", "fused_vocab_parallel_cross_entropy"),
        _found(
            "megatron-smoothing-underflow",
            _NAN,
            "agreement",
            "smoothed_cross_entropy",
            upstream=f"{_MEGATRON}7466",
        ),
        _found(
            "megatron-smoothing-tp",
            _WRONG,
            "agreement",
            "smoothed_cross_entropy",
            upstream="https://github.com/NVIDIA/Megatron-LM/issues/737",
            axes=("tp",),
        ),
        _found(
            "megatron-writes-logits",
            _CONVENTION,
            "inputs-kept",
            "vocab_parallel_cross_entropy",
            upstream=f"{_MEGATRON}1594",
        ),
        _found("verl-no-rows", _CONVENTION, "microbatches", needs_stand_ins=True),
        _found("verl-nothing-trained", _CONVENTION, "nothing-trained", "vanilla", needs_stand_ins=True),
        _found(
            "verl-masked-nan",
            _CONVENTION,
            "masked-nan",
            "vanilla_of_sequences",
            upstream=f"{_VERL}6349",
            needs_stand_ins=True,
        ),
        _found(
            "verl-icepop-rejects-all",
            _CRASH,
            "agreement",
            "icepop",
            upstream=f"{_VERL}7559",
            needs_stand_ins=True,
        ),
        _found("openrlhf-nothing-trained", _CONVENTION, "nothing-trained", "ppo", needs_stand_ins=True),
        _found(
            "openrlhf-masked-nan",
            _CONVENTION,
            "masked-nan",
            "ppo",
            upstream="https://github.com/OpenRLHF/OpenRLHF/pull/1240",
            needs_stand_ins=True,
        ),
        _found("transformers-nothing-trained", _CONVENTION, "nothing-trained", "causal_lm"),
        _found(
            "torchtune-nothing-trained",
            _CONVENTION,
            "nothing-trained",
            "chunked_cross_entropy",
            upstream="https://github.com/meta-pytorch/torchtune/issues/2341",
            needs_stand_ins=True,
        ),
        _found("torchtune-kl-nothing-trained", _CRASH, "nothing-trained", _KL, needs_stand_ins=True),
        _found(
            "nemo_rl-gspo-metric",
            _METRIC,
            "agreement",
            "clipped_pg_with_metrics",
            upstream="https://github.com/NVIDIA-NeMo/RL/pull/3753",
            needs_stand_ins=True,
        ),
        _found("nemo_rl-packed-no-graph", _CRASH, "agreement", "packed_nll", needs_stand_ins=True),
        _found("nemo_rl-kl-overflow", _NAN, "agreement", "clipped_pg", needs_stand_ins=True),
        _found("areal-nothing-trained", _CONVENTION, "nothing-trained", "critic", needs_stand_ins=True),
        _found("cce-nothing-trained", _CONVENTION, "nothing-trained", "torch_compile_mean"),
    )
}
"""By their names."""


def find(name: str) -> Finding:
    """Returns a finding by its name.

    Raises:
        UsageError: if there is none of this name; it gives the nearest.
    """
    return look_up("finding", name, FINDINGS)


def show(finding: Finding, seen: Seen) -> str:
    """Returns what is wrong, what was seen here, how to judge it, and the script, for people."""
    known = f"{finding.severity}; found in {finding.of.package} {', '.join(finding.versions)}"
    lines = [
        f"{finding.name}: {finding.sentence}",
        f"  {known}; mended in {finding.mended_in}" if finding.mended_in else f"  {known}",
        f"  here, with {finding.of.package} {finding.of.installed}: {seen.in_words}",
        *(f"    {line}" for line in seen.output.splitlines()),
        f"  the cause: {finding.cause}",
        f"    {finding.why}",
    ]
    if finding.upstream:
        lines.append(f"  upstream: {finding.upstream}")
    if finding.entry_points:
        target = f"lossgate.adapters.{finding.library}:{finding.entry_points[0]}"
        lines.append(f"  to judge it: lossgate verify {target}, property {finding.shown_by}")
    return "\n".join([*lines, "", *(f"    {line}".rstrip() for line in finding.code.splitlines())])
