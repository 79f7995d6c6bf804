# SPDX-License-Identifier: Apache-2.0
"""Counts how often the judge rejects a right kernel, or the difference of two, and which known bugs
it catches: every right kernel of the bank, in every dtype, on several layouts.

    python benchmarks/calibration.py --out a.jsonl                  every piece; it takes hours
    python benchmarks/calibration.py --out a.jsonl --shard 1/2      half of them; run 2/2 elsewhere
    python benchmarks/calibration.py --out a.jsonl --minutes 10     what can be done in that time
    python benchmarks/calibration.py --out a.jsonl --candidates ci/candidates/ours.py
                                                                    kernels of a file, not the bank
    python benchmarks/calibration.py --merge a.jsonl b.jsonl        one table of what was counted
    python benchmarks/calibration.py --merge a.jsonl --failures alarms
                                                                    judge each alarm again

The same command again goes on where it was stopped: a piece that stands in the file is done. The
problems are random; their seeds stand in the file. The exit code is 1 if there was a false alarm.
"""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from calibration_alarms import judged_again
from calibration_pieces import Piece, Sizes, all_pieces, run_piece
from calibration_tables import Merged, show

from kernel_bank.known_right import known_right
from lossgate import Candidate
from lossgate.declaration.loading import load_candidates


def read(files: list[Path]) -> list[dict[str, Any]]:
    """Returns the finished pieces of files, without a line that a stopped run left unfinished."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def run(pieces: list[Piece], kernels: Sequence[Candidate], sizes: Sizes, out: Path, seconds: float) -> None:
    """Runs the pieces that a file does not hold, and appends them to it."""
    found = read([out])
    if others := {json.dumps(one["sizes"]) for one in found} - {json.dumps(vars(sizes))}:
        sys.exit(f"{out} holds pieces of other sizes, {others.pop()}; give the same sizes, or another --out")
    done, start = {Piece(**one["piece"]) for one in found}, perf_counter()
    text = out.read_text() if out.exists() else ""
    if text and not text.endswith("\n"):
        out.write_text(text[: text.rfind("\n") + 1])
    for number, piece in enumerate(pieces, 1):
        if piece in done:
            continue
        if perf_counter() - start > seconds:
            break
        record = run_piece(piece, sizes, kernels)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        alarms = sum(len(counts["alarms"]) for counts in (*record["right"].values(), record["pairs"]))
        comparisons = sum(counts["comparisons"] for counts in record["right"].values())
        print(f"{number} of {len(pieces)}  {piece}: {comparisons} comparisons, {alarms} alarms, {record['seconds']} s")


def shard(text: str) -> tuple[int, int]:
    """Reads ``1/4``, the first of four shards."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of so many, such as 1/4 to 4/4")
    return int(match[1]), int(match[2])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append finished pieces to this file, a JSON object on each line")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing; show what files hold")
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="the I-th of N parts of the pieces")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of problems each piece is run with")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=Sizes.problems, help="for each kernel of a piece")
    parser.add_argument("--wrong-problems", type=int, default=Sizes.wrong, help="for each bug of a piece")
    parser.add_argument("--pair-problems", type=int, default=Sizes.pairs, help="for each two kernels of a piece")
    parser.add_argument("--only", default="", metavar="TEXT", help="pieces whose name holds this text alone")
    parser.add_argument("--candidates", metavar="FILE", help="judge those of this file, not the bank's kernels")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no piece after so long")
    parser.add_argument("--alarms", action="store_true", help="show the problem of each alarm")
    parser.add_argument("--failures", type=Path, metavar="FOLDER", help="judge each alarm again, and freeze it here")
    given = parser.parse_args(arguments)
    if bool(given.out) == bool(given.merge):
        parser.error("give --out to run pieces, or --merge to show what files hold")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kernels = load_candidates(given.candidates) if given.candidates else known_right()
    if given.out:
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        pieces = [piece for piece in all_pieces(seeds, kernels) if given.only in str(piece)]
        index, count = given.shard
        sizes = Sizes(given.problems, given.wrong_problems, given.pair_problems)
        run(pieces[index - 1 :: count], kernels, sizes, given.out, 60 * given.minutes)
    merged = Merged.of(read(given.merge or [given.out]))
    show(merged, alarms=given.alarms)
    if given.failures:
        print(*judged_again(merged, kernels, given.failures), sep="\n")
    return 1 if merged.alarms else 0


if __name__ == "__main__":
    sys.exit(main())
