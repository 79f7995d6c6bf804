# SPDX-License-Identifier: Apache-2.0
"""Measures how long a gate takes for many lines of evidence, and how much memory.

    python benchmarks/gate.py [--cells 100000 --problems 12 --outputs 5]

The peer is what any gate must do, in one process: read the file, hash it, and parse its JSON. Each
row runs in a process of its own. Its memory is that of its largest process.
"""

import argparse
import json
import resource
import subprocess
import sys
from contextlib import redirect_stdout
from hashlib import sha256
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter

from rich.console import Console
from rich.table import Table

from lossgate.engine.cell_record import SCHEMA, CellRecord, Verdict, with_sums
from lossgate.engine.output_record import OutputRecord, PooledNoiseRecord, PooledRecord
from lossgate.evidence.records import EndRecord, RunRecord
from lossgate.evidence.sealed import digest_in, digest_of_cells, matrix_of, seal
from lossgate.judge.pooling import pool_noise, pool_scales, smallest_bias

NOW = "2026-01-01T00:00:00+00:00"
STATISTICS = ("noise", "worst", "token", "vocab row", "vocab tile", "sequence")
POLICY = """
schema = 1
[evidence]
max_age = "1 day"
[[require]]
candidates = ["kernel_*"]
layouts = ["single", "tp=2", "cp=2", "dp=2", "cp=2,tp=2"]
dtypes = ["float32", "bfloat16"]
"""
LAYOUTS = ("single", "tp=2", "cp=2", "dp=2", "cp=2,tp=2")


def output(number: int, problems: int, random: Random) -> OutputRecord:
    """Draws the numbers of an output that agrees."""
    unit = 2.0**-24

    def draw(size: float) -> tuple[float, ...]:
        return tuple(float(f"{random.uniform(-size, size):.5g}") for _ in range(problems))

    scale, limit, sd, mean = draw(1e-8), (1e-6,) * problems, tuple(map(abs, draw(1e-7))), draw(1e-9)
    pooled = pool_scales(scale, sd, mean, limit, [smallest_bias(unit, 1)], [problems])
    noise = tuple(float(f"{random.random():.5g}") for _ in range(problems))
    of_noise = pool_noise(noise)
    return OutputRecord(
        name=f"output {number}",
        metric=False,
        cases=tuple(range(problems)),
        scale=scale,
        limit=limit,
        sd=sd,
        mean=mean,
        noise=noise,
        shares={name: tuple(float(f"{random.random():.3g}") for _ in range(problems)) for name in STATISTICS},
        unit=unit,
        pooled=PooledRecord(
            problems=problems,
            scale=float(pooled.scale[0]),
            limit=float(pooled.limit[0]),
            noise=of_noise and PooledNoiseRecord(**vars(of_noise)),
        ),
    )


def cells(count: int, problems: int, outputs: int) -> list[CellRecord]:
    """Makes cells with numbers of their own, five layouts and two dtypes for each candidate."""
    random = Random(0)
    drawn = [tuple(output(n, problems, random) for n in range(outputs)) for _ in range(50)]
    made: list[CellRecord] = []
    for number in range(count):
        record = CellRecord(
            schema=SCHEMA,
            run="run",
            candidate=f"kernel_{number // 10}",
            property="agreement",
            layout=LAYOUTS[number % 5],
            dtype=("float32", "bfloat16")[number // 5 % 2],
            world="simulated",
            device="cpu",
            spec="nll",
            head="hidden",
            source=f"kernels.py:kernel_{number // 10}",
            source_digest="0" * 64,
            source_modified=False,
            verdict=Verdict.AGREE,
            reasons=(),
            problems=problems,
            comparisons=problems * outputs,
            needs_adequacy=True,
            outputs=drawn[number % len(drawn)],
            faults=(),
            coverage={"trained token": problems, "masked token": problems, "label on the first row": problems},
            required=("trained token", "masked token", "label on the first row"),
            killed=12,
            surviving=(),
            equivalent=(),
            worst=(),
            failure=None,
            known_failure=None,
            seconds=1.0 + number,
            time=NOW,
        )
        made.append(with_sums(record))
    return made


def write(folder: Path, count: int, problems: int, outputs: int) -> Path:
    """Writes the evidence of a run, and a policy beside it."""
    (folder / "gate.toml").write_text(POLICY)
    records = cells(count, problems, outputs)
    keys = tuple(record.key for record in records)
    run = RunRecord(
        schema=SCHEMA,
        run="run",
        started=NOW,
        commit="0" * 40,
        modified=False,
        host="host",
        versions={"lossgate": "1", "torch": "2"},
        settings={},
        matrix=matrix_of(keys),
        cells=keys,
    )
    file = folder / "out.jsonl"
    digests: list[str] = []
    with file.open("wb") as stream:
        stream.write(seal(run) + b"\n")
        for record in records:
            line = seal(record)
            digests.append(digest_in(line) or "")
            stream.write(line + b"\n")
        end = EndRecord(schema=SCHEMA, run="run", finished=NOW, cells=count, cells_digest=digest_of_cells(digests))
        stream.write(seal(end) + b"\n")
    return file


def read_alone(file: Path) -> int:
    """Does what no gate can do without."""
    with file.open("rb") as stream:
        for line in stream:
            sha256(line).digest()
            json.loads(line)
    return 0


def gate(file: Path) -> int:
    """Runs the command, as a user does."""
    from lossgate.cli import gate

    with redirect_stdout(StringIO()):
        return gate(file, policy=file.with_name("gate.toml"), now=NOW)


ROWS = {"read, hash, json.loads": read_alone, "lossgate gate": gate}


def measure(row: str, file: Path) -> None:
    """Runs one row; prints its exit code, seconds, processor seconds and MiB."""
    start = perf_counter()
    code = ROWS[row](file)
    seconds = perf_counter() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor, peak = sum(one.ru_utime + one.ru_stime for one in used), max(one.ru_maxrss for one in used) / 1024
    print(json.dumps([int(code), seconds, processor, peak]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=100_000)
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--outputs", type=int, default=5)
    parser.add_argument("--row", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        measure(given.row[0], Path(given.row[1]))
        return
    with TemporaryDirectory() as folder:
        file = write(Path(folder), given.cells, given.problems, given.outputs)
        table = Table("row", "exit code", "seconds", "ratio", "processor s", "peak MiB", title=f"{given.cells} cells")
        first = 0.0
        for row in ROWS:
            done = subprocess.run(
                [sys.executable, __file__, "--row", row, str(file)], stdout=subprocess.PIPE, text=True, check=True
            )
            code, seconds, processor, peak = json.loads(done.stdout.splitlines()[-1])
            first = first or seconds
            table.add_row(row, str(code), f"{seconds:.1f}", f"{seconds / first:.2f}", f"{processor:.1f}", f"{peak:.0f}")
        Console().print(table)
        Console().print(f"{file.stat().st_size / 2**20:.0f} MiB of evidence")


if __name__ == "__main__":
    main()
