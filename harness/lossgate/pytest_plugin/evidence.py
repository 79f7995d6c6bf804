# SPDX-License-Identifier: Apache-2.0
"""Evidence of pytest items.

A line is made in the process that runs the item, and written in the process that gets its report.
Under pytest-xdist these are a worker and the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lossgate.engine.cell import Cell, CellResult
    from lossgate.engine.cell_record import CellRecord
    from lossgate.evidence.records import CellKey
    from lossgate.evidence.writer import EvidenceWriter

_LINE = "lossgate_evidence"
_RUN = "lossgate_run"
_PLANNED = "lossgate_planned"


def collected(items: Sequence[pytest.Item]) -> list[Cell]:
    """Returns the cells of the items that will run."""
    specs = (getattr(item, "callspec", None) for item in items)
    return [spec.params["lossgate_cell"] for spec in specs if spec is not None and "lossgate_cell" in spec.params]


class Evidence:
    """Collects the evidence of items in every process of a session.

    Args:
        config: the configuration of the session.
        file: where evidence is written; None to write none.
    """

    def __init__(self, config: pytest.Config, file: Path | None) -> None:
        # Only workers of pytest-xdist have these.
        self._input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._run: str = self._input[_RUN] if self._input is not None else token_hex(8)
        self._path = file
        self._writer: EvidenceWriter | None = None
        self._cells: list[CellRecord] = []
        self._let_pass: list[CellRecord] = []
        """The cells that passed although they break promises, because only numbers count."""
        self._planned: list[CellKey] | None = None
        self._error = ""

    def tell(self, result: CellResult, replay: str | None, record_property: Callable[[str, object], None]) -> None:
        """Attaches the result of a cell to the report of its item."""
        from lossgate.evidence.sealed import seal
        from lossgate.evidence.writer import written

        record_property(_LINE, seal(written(result.record, self._run, replay)).decode())

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_RUN] = self._run

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Writes the record of the run before any item runs, so that a file that cannot be written
        is reported at once.
        """
        if self._path is None or self._input is not None:
            return
        from lossgate.evidence.writer import AppendedLines, EvidenceError, EvidenceWriter

        try:
            self._writer = EvidenceWriter(AppendedLines(self._path, "--lossgate-evidence"), self._run)
            self._writer.start({"profile": session.config.getoption("--lossgate-profile")})
        except EvidenceError as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        cells = collected(session.items)
        if not cells:
            return
        from msgspec.structs import astuple

        from lossgate.engine.recorded import key_of

        self._planned = [key_of(cell) for cell in cells]
        if self._output is not None:
            self._output[_PLANNED] = [list(astuple(key)) for key in self._planned]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        from lossgate.evidence.records import CellKey

        planned = getattr(node, "workeroutput", {}).get(_PLANNED)
        if planned is not None:
            self._planned = [CellKey(*key) for key in planned]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or self._input is not None:  # the controller gets the reports of workers, too
            return
        for name, value in report.user_properties:
            if name == _LINE:
                line = str(value).encode()
                self._cells.append(cell := _for_summary(line))
                self._let_pass += [cell] * (report.passed and not cell.passes)
                self._write(lambda writer, line=line: writer.cell(line))

    def _write(self, write: Callable[[EvidenceWriter], None]) -> None:
        if self._writer is None or self._error:
            return
        from lossgate.evidence.writer import EvidenceError

        try:
            write(self._writer)
        except EvidenceError as error:
            self._error = str(error)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Any:
        outcome = yield  # meanwhile pytest-xdist waits for its workers
        self._write(lambda writer: writer.end(planned=self._planned))
        if self._error and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        return outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._cells:
            from lossgate.reports.shown_verdict import broken_in_words
            from lossgate.reports.verdict_table import summary

            for cell in self._let_pass:
                terminalreporter.write_line(f"lossgate: {cell.key}: {cell.outcome}: {broken_in_words([cell])}")
            counts = summary(self._cells, numbers_only=bool(self._let_pass))
            comparisons = sum(cell.comparisons for cell in self._cells)
            terminalreporter.write_line(f"lossgate: {counts}; {comparisons} comparisons")
        if self._error:
            terminalreporter.write_line(f"lossgate: {self._error}; this run leaves no evidence that a gate accepts")
        elif self._writer is not None and self._cells:
            terminalreporter.write_line(f"lossgate: evidence added to {self._path}")


def _for_summary(line: bytes) -> CellRecord:
    """Returns the record of a line without most of its numbers."""
    import msgspec

    from lossgate.engine.cell_record import CellRecord

    return msgspec.structs.replace(msgspec.json.decode(line, type=CellRecord), outputs=(), coverage={}, worst=())
