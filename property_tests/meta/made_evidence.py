# SPDX-License-Identifier: Apache-2.0
"""Evidence of a few numbers, for tests of what reads it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lossgate.engine.cell_record import SCHEMA, CellRecord, Failure, PropertyRecord, with_sums
from lossgate.engine.output_record import OutputRecord, PooledRecord
from lossgate.evidence.records import EndRecord, Record, RunRecord
from lossgate.evidence.sealed import digest_in, digest_of_cells, matrix_of, seal
from lossgate.judge.pooling import FEWEST

STARTED, TIME, FINISHED = "2026-11-20T12:00:00+00:00", "2026-11-20T12:00:30+00:00", "2026-11-20T12:01:00+00:00"
COMMIT = "c" * 40


def output(**changes: Any) -> OutputRecord:
    """Returns the loss of a cell with eight problems, which agrees, with changes. It has numbers of
    three; the others are zero in every correct run.
    """
    record = OutputRecord(
        name="loss",
        metric=False,
        cases=(0, 1, 2),
        without_numbers=(3, 4, 5, 6, 7),
        scale=(1e-8, -2e-8, 0.5e-8),
        limit=(1e-6, 1e-6, 1e-6),
        sd=(1e-7, 1e-7, 1e-7),
        mean=(0.0, 0.0, 0.0),
        noise=(0.5, 1.0, 0.25),
        shares={"noise": (0.25, 0.5, 0.125)},
        unit=2**-24,
        pooled=PooledRecord(problems=3, scale=-1.6666666666666667e-09, limit=2.339172603723298e-06),
        planted={"zero": 1.0},
    )
    return msgspec.structs.replace(record, **changes)


def output_on(problems: int) -> OutputRecord:
    """Returns the loss of a cell with so many problems. It has numbers of three, as ``output``."""
    return output(without_numbers=tuple(range(3, problems)))


def cell(**changes: Any) -> CellRecord:
    """Returns the record of a cell that agrees, with changes. It has eight problems, as few as may
    agree; if only their number is changed, its lists fit that.
    """
    problems = changes.get("problems", FEWEST)
    if problems >= 3 and "outputs" not in changes:
        changes = {"comparisons": problems, "outputs": (output_on(problems),)} | changes
    record = CellRecord(
        schema=SCHEMA,
        run="run-1",
        candidate="nll",
        property="agreement",
        layout="single",
        dtype="float32",
        world="simulated",
        device="cpu",
        spec="nll",
        head="logits",
        source="kernels.py:nll",
        source_digest="a" * 64,
        source_modified=False,
        verdict="AGREE",
        reasons=(),
        problems=FEWEST,
        comparisons=FEWEST,
        needs_adequacy=True,
        outputs=(output(),),
        faults=(),
        coverage={"trained token": 3},
        required=("trained token",),
        killed=2,
        surviving=(),
        equivalent=(),
        mistakes_shown=12,
        worst=(),
        failure=None,
        known_failure=None,
        seconds=1.5,
        time=TIME,
    )
    return msgspec.structs.replace(with_sums(msgspec.structs.replace(record, **changes)), **changes)


def disagreeing(**changes: Any) -> CellRecord:
    """Returns the record of a cell whose loss is 1% too large on one problem."""
    pooled = PooledRecord(problems=1, scale=0.01, limit=1e-6)
    wrong = output(
        cases=(0,),
        without_numbers=(),
        scale=(0.01,),
        limit=(1e-6,),
        sd=(1e-7,),
        mean=(0.0,),
        noise=(9.0,),
        shares={},
        pooled=pooled,
    )
    given: dict[str, Any] = {
        "verdict": "DISAGREE",
        "reasons": ("loss: 1.01 times the reference",),
        "problems": 1,
        "comparisons": 1,
        "coverage": {"trained token": 1},
        "outputs": (wrong,),
        "failure": Failure(
            problem={"spec": "nll"},
            description="1 token",
            findings=("loss: 1.01 times the reference",),
            symptoms=("loss",),
        ),
        "replay": "lossgate replay failure.json",
    }
    return cell(**given | changes)


def breaking(*names: str, **changes: Any) -> CellRecord:
    """Returns the record of a cell that breaks promises, and whose numbers agree."""
    names = names or ("masked-nan",)
    finding = "loss: NaN"
    given: dict[str, Any] = {
        "verdict": "DISAGREE",
        "numbers": "AGREE",
        "reasons": tuple(f"property {name}: {finding}" for name in names),
        "properties": tuple(
            PropertyRecord(name=name, problems=1, margin=None, findings=(finding,), on="1 token") for name in names
        ),
        "failure": Failure(problem={"spec": "nll"}, description="1 token", findings=(finding,), symptoms=("loss",)),
        "replay": "lossgate replay failure.json",
    }
    return cell(**given | changes)


def inconclusive(**changes: Any) -> CellRecord:
    """Returns the record of a cell in which an option mutant survives."""
    reason = "a kernel that computes label_smoothing=0.1 as 0 would have passed every problem"
    given: dict[str, Any] = {
        "verdict": "INCONCLUSIVE",
        "reasons": (reason,),
        "surviving": ("label_smoothing=0.1 as 0",),
    }
    return cell(**given | changes)


def run(cells: Iterable[CellRecord], **changes: Any) -> RunRecord:
    """Returns the record of a run of these cells."""
    keys = tuple(one.key for one in cells)
    record = RunRecord(
        schema=SCHEMA,
        run="run-1",
        started=STARTED,
        commit=COMMIT,
        modified=False,
        host="host",
        versions={"lossgate": "0.1.0", "torch": "2.13.0"},
        settings={"examples": 3, "seed": 0},
        matrix=matrix_of(keys),
        cells=keys,
    )
    return msgspec.structs.replace(record, **changes)


def end(lines: Sequence[bytes], **changes: Any) -> EndRecord:
    """Returns the record of the end of a run, after the lines of its cells."""
    digests = [digest for line in lines if (digest := digest_in(line))]
    record = EndRecord(
        schema=SCHEMA, run="run-1", finished=FINISHED, cells=len(lines), cells_digest=digest_of_cells(digests)
    )
    return msgspec.structs.replace(record, **changes)


def whole_run(cells: Sequence[CellRecord], **changes: Any) -> list[Record]:
    """Returns all records of a run. ``changes`` are those of the record of the run."""
    first = run(cells, **changes)
    named = [msgspec.structs.replace(one, run=first.run) for one in cells]
    return [first, *named, end([seal(one) for one in named], run=first.run)]


def write(file: Path, records: Iterable[Record]) -> Path:
    """Writes records, sealed, to a file, and returns it."""
    file.write_bytes(b"".join(seal(record) + b"\n" for record in records))
    return file
