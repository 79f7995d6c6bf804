# SPDX-License-Identifier: Apache-2.0
"""Says which specs of a run are not fit to judge kernels by, where a kernel does not agree."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from lossgate.engine.cell import CellResult
from lossgate.losses import SPECS
from lossgate.spec_check.check import first_failure
from lossgate.specs.spec import Spec


def unfit_specs(results: Iterable[CellResult]) -> Iterator[str]:
    """Yields lines about each spec of a user that fails a check, if a cell of it does not pass."""
    failed = dict.fromkeys(result.cell.candidate.spec for result in results if not result.record.passes)
    for spec in failed:
        if spec in SPECS.values() or (outcome := first_failure(spec)) is None:
            continue
        for finding in outcome.findings[:1]:
            yield f"Spec {spec.name} may be wrong, and not the kernel. {_command(spec)} says: {finding.seen}"
            yield f"  change: {finding.change}"


def _command(spec: Spec) -> str:
    file = Path(getattr(getattr(spec.reference, "__code__", None), "co_filename", ""))
    if not file.is_file():
        return "Its check"
    return f"lossgate spec check {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}"
