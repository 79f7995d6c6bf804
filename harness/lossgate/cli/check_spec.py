# SPDX-License-Identifier: Apache-2.0
"""``lossgate spec check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App

from lossgate.cli.app import Exit, app, load_for

if TYPE_CHECKING:
    from rich.console import Console

    from lossgate.spec_check.subject import Outcome

_spec = App(name="spec", help="Judge the references of specs.", version_flags=[])
app.command(_spec)


@_spec.command
def check(*targets: str) -> int:
    """Judge whether references are fit to judge kernels by. Each failure says what to change.

    Args:
        targets: Files (file.py), modules (package.module), one spec of either (file.py:name), or
            names of specs, such as nll.
    """
    load_for(targets)
    from lossgate.base.errors import UsageError
    from lossgate.declaration.loading import find_specs
    from lossgate.reports.console import make_console
    from lossgate.spec_check.check import check_spec

    if not targets:
        raise UsageError("spec check: nothing named; expected files with specs, such as my_loss.py, or names of specs")
    specs = [spec for target in targets for spec in find_specs(target)]
    console, code = make_console(), Exit.AGREE
    for spec in specs:
        console.print(f"spec {spec.name}", markup=False)
        failed = 0
        for outcome in check_spec(spec):
            _show(outcome, console)
            if not outcome.passed:
                failed += 1
        if failed:
            code = Exit.DISAGREE
            console.print(f"spec {spec.name} is not fit to judge kernels by: see {failed} FAIL above", markup=False)
        else:
            console.print(f"spec {spec.name} holds", markup=False)
    return code


def _show(outcome: Outcome, console: Console) -> None:
    from rich.markup import escape

    from lossgate.reports.describe import print_detail

    mark = "[green]ok  [/]" if outcome.passed else "[bold red]FAIL[/]"
    print_detail(console, f"  {mark}  {escape(outcome.check.asks)}")
    for finding in outcome.findings:
        print_detail(console, f"        {escape(finding.seen)}")
        print_detail(console, f"        change: {escape(finding.change)}")
        if finding.problem:
            print_detail(console, f"        on: {escape(finding.problem)}")
