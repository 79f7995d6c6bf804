# SPDX-License-Identifier: Apache-2.0
"""Measures how surely the bank of bugs is killed: every bug, verified as a user would, on several
seeds.

    python benchmarks/bank.py --seeds 5 --profile dev --profile ci --out bank.json
    python benchmarks/bank.py --compare before.json after.json
    python benchmarks/bank.py --local-tokens 200   # a kernel that divides by its rank's own tokens
"""

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from time import process_time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kernel_bank.bugs import BUGS, CROSS_ENTROPY_BUGS, cross_entropy_with, ignores
from kernel_bank.cross_entropy import STYLES
from kernel_bank.spec_bugs import bugs_of
from lossgate import Candidate, Layout, candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES
from lossgate.inputs import NllLogits
from lossgate.losses import SPECS

SPLIT = "dp=2,cp=2,tp=2"
ONE_AXIS = {
    "cp gradient x cp": ("cp=2", SPLIT),
    "label at a shard boundary lost": ("tp=2", SPLIT),
    "local denominator": ("dp=2", "cp=2", SPLIT),
    "tp all-reduce missing": ("tp=2", SPLIT),
}
"""The layouts of the bugs that show on some axis only."""


def cells() -> Iterator[tuple[str, Candidate, str, str]]:
    """Yields ``(bug, wrong candidate, dtype, layout)``."""
    for dtype, styles in STYLES.items():
        for style in styles:
            for bug in CROSS_ENTROPY_BUGS:
                for layout in ONE_AXIS.get(bug, ("single", SPLIT)):
                    yield bug, cross_entropy_with(style, bug), dtype, layout
    dense = dense_candidate(SPECS["nll"], "hidden")
    for bug in BUGS.keys() - CROSS_ENTROPY_BUGS.keys():
        for layout in ONE_AXIS.get(bug, ("single", SPLIT)):
            yield bug, BUGS[bug].put_into(dense), "float32", layout
    for spec in SPECS.values():
        head = list(spec.inputs)[-1]
        mistakes = [*bugs_of(spec), *(ignores(o, spec) for o in spec.options if len(set(o.choices)) != 1)]
        for bug in mistakes:
            where = "logits" if "temperature" in bug.name and "logits" in spec.inputs else head
            for layout in ("single", "dp=2,cp=2"):
                yield f"{spec.name}: {bug.name}", bug.put_into(dense_candidate(spec, where)), "float32", layout


def kills(profile: str, seed: int) -> dict[str, str]:
    """Returns the verdict on every cell of the bank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    settings = replace(PROFILES[profile], seed=seed, shrink_calls=0)
    found: dict[str, str] = {}
    for bug, wrong, dtype, layout in cells():
        result = run_cell(Cell(wrong, Layout.parse(layout), dtype), settings)
        found[f"{bug} | {wrong.name.partition(';')[0]} | {dtype} | {layout}"] = str(result.verdict)
    return found


def measure(profiles: list[str], seeds: int, jobs: int) -> dict[str, dict[str, str]]:
    """Returns the verdicts by ``profile seed``."""
    runs = [(profile, seed) for profile in profiles for seed in range(seeds)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        verdicts = pool.map(kills, *zip(*runs, strict=True))
        return {f"{p} {s}": found for (p, s), found in zip(runs, verdicts, strict=True)}


def local_mean(inputs: NllLogits, options: object, mesh: object) -> Tensor:
    """Each rank divides by its own trained tokens."""
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.mask.sum().clamp(min=1)


LOCAL_MEAN = candidate("nll", head="logits", axes=("dp", "cp"))(local_mean)


def local_mean_verdicts(seed: int) -> dict[str, str]:
    """Returns the verdicts on that kernel, at every profile, by cell."""
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for profile, settings in PROFILES.items():
        for dtype in LOCAL_MEAN.dtypes:
            for layout in ("dp=2", "cp=2", "dp=2,cp=2"):
                cell = Cell(LOCAL_MEAN, Layout.parse(layout), dtype)
                result = run_cell(cell, replace(settings, seed=seed, shrink_calls=0))
                found[f"{profile} {dtype} {layout}"] = str(result.verdict)
    return found


def measure_local_mean(seeds: int, jobs: int) -> None:
    """Prints how many seeds see that it is wrong."""
    killed: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for found in pool.map(local_mean_verdicts, range(seeds)):
            killed.update(cell for cell, verdict in found.items() if verdict == Verdict.DISAGREE)
    for cell, count in killed.items():
        print(f"{cell}: DISAGREE with {count} of {seeds} seeds")


def show(named: dict[str, dict[str, dict[str, str]]]) -> None:
    """Prints kills by run, and each cell that some run did not kill."""
    first = next(iter(named.values()))
    print("profile and seed: " + "  ".join(f"{name}" for name in named))
    for run, found in first.items():
        counts = [Counter(results[run].values()) for results in named.values()]
        print(f"{run}: " + "  ".join(f"{c[Verdict.DISAGREE]} of {c.total()} killed" for c in counts))
        for cell in found:
            verdicts = [results[run].get(cell, "-") for results in named.values()]
            if any(verdict != Verdict.DISAGREE for verdict in verdicts):
                print(f"    {cell}: {'  '.join(verdicts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--profile", action="append", choices=list(PROFILES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the verdicts here, as JSON")
    parser.add_argument("--compare", type=Path, nargs=2, help="print two such files side by side, and run nothing")
    parser.add_argument("--local-tokens", type=int, metavar="SEEDS", help="judge the kernel of own tokens alone")
    arguments = parser.parse_args()
    if arguments.local_tokens:
        measure_local_mean(arguments.local_tokens, arguments.jobs)
        return
    if arguments.compare:
        show({file.stem: json.loads(file.read_text()) for file in arguments.compare})
        return
    start = process_time()
    found = measure(arguments.profile or ["dev", "ci"], arguments.seeds, arguments.jobs)
    show({"now": found})
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    print(f"{process_time() - start:.0f} CPU seconds in this process")


if __name__ == "__main__":
    main()
