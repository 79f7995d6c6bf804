# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/calibration.py`` counts what it says, goes on where it was stopped, and adds up.

A slice of the calibration itself runs here, in all three dtypes and parallel over the vocabulary.
"""

import json
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import calibration
import pytest
from calibration_counts import RightCounts, WrongCounts, largest_step, median_step
from calibration_pieces import LAYOUTS, Piece, Sizes, all_pieces, run_piece
from calibration_tables import Merged

from kernel_bank.bugs import BUGS
from kernel_bank.known_right import known_right
from lossgate.base.names import DTYPES
from lossgate.declaration.loading import load_candidate
from lossgate.losses import SPECS

ROOT = Path(__file__).parents[3]
FEW = Sizes(problems=4, wrong=2, pairs=1)
ONLY = "preference rewards float16"
PIECES = [piece for piece in all_pieces([0], known_right()) if ONLY in str(piece)]
SMALL = ["--problems", "2", "--wrong-problems", "0", "--pair-problems", "0", "--seeds", "1", "--only", ONLY]


@pytest.mark.parametrize(
    "piece",
    [
        Piece("z_loss", "logits", "float32", "dp=2,cp=2,tp=2", 0),
        Piece("nll", "hidden", "bfloat16", "tp=2", 0),
        Piece("preference", "rewards", "float16", "dp=2", 0),
    ],
    ids=str,
)
def test_a_slice_has_no_false_alarm(piece: Piece) -> None:
    merged = Merged.of([run_piece(piece, FEW, known_right())])
    assert merged.alarms == 0
    assert len(merged.kernels) >= 3
    assert all(counts.comparisons for counts in merged.kernels.values())
    assert all(counts.visible == counts.visible_caught for counts in merged.wrong.values())
    assert any(counts.visible for counts in merged.wrong.values())


def test_pieces_cover_every_spec_head_dtype_and_layout() -> None:
    pieces = all_pieces([0, 1], known_right())
    assert len({*pieces}) == len(pieces)
    for seed in (0, 1):
        covered = {(p.spec, p.head, p.dtype) for p in pieces if p.seed == seed}
        assert covered == {(s.name, head, dtype) for s in SPECS.values() for head in s.inputs for dtype in DTYPES}
    assert {piece.layout for piece in pieces} == {*LAYOUTS}


def test_names_of_kernels_are_their_own() -> None:
    names = [kernel.name for kernel in known_right()]
    assert len({*names}) == len(names)


def test_a_stopped_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "counted.jsonl"
    assert calibration.main(["--out", str(out), "--shard", "1/2", *SMALL]) == 0
    half = out.read_text().splitlines()
    out.write_text("\n".join(half) + '\n{"piece": {"spec": "pref')  # the run was stopped while it wrote
    assert calibration.main(["--out", str(out), *SMALL]) == 0
    whole = out.read_text().splitlines()
    assert whole[: len(half)] == half
    assert len({*whole}) == len(whole) == len(PIECES)
    capsys.readouterr()
    assert calibration.main(["--out", str(out), *SMALL]) == 0
    assert f"of {len(PIECES)}  preference" not in capsys.readouterr().out
    assert out.read_text().splitlines() == whole


@pytest.mark.slow
def test_shards_add_up_to_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("first", "second", "whole")]
    for file, part in zip(files, ("1/2", "2/2", "1/1"), strict=True):
        calibration.main(["--out", str(file), "--shard", part, *SMALL])
    merged, whole = Merged.of(calibration.read(files[:2])), Merged.of(calibration.read(files[2:]))
    assert merged.kernels == whole.kernels
    assert merged.pieces == whole.pieces == len(PIECES)
    assert Merged.of(calibration.read(files)).kernels == whole.kernels  # a piece counts once
    capsys.readouterr()
    assert calibration.main(["--merge", *map(str, files[:2])]) == 0
    shown = capsys.readouterr().out
    assert "0 false alarms in" in shown
    assert "preference" in shown


def test_a_false_alarm_is_counted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = next(kernel for kernel in known_right() if kernel.head == "rewards")
    wrong = replace(BUGS["loss x1.01"].put_into(right), name="taken for right")
    monkeypatch.setattr(calibration, "known_right", lambda: (wrong,))
    arguments = ["--out", str(tmp_path / "counted.jsonl"), *SMALL, "--alarms"]
    assert calibration.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "FALSE ALARM  taken for right" in shown
    assert '"spec":"preference"' in shown.replace(" ", "")


def test_alarms_are_judged_again_and_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = next(kernel for kernel in known_right() if kernel.head == "rewards")
    wrong = replace(BUGS["loss x1.01"].put_into(right), name=right.name)
    out, folder = tmp_path / "counted.jsonl", tmp_path / "failures"
    monkeypatch.setattr(calibration, "known_right", lambda: (wrong,))
    assert calibration.main(["--out", str(out), *SMALL, "--failures", str(folder)]) == 1
    replayed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lossgate replay")]
    assert len(replayed) == len([*folder.iterdir()]) > 0
    monkeypatch.setattr(calibration, "known_right", lambda: (right,))
    assert calibration.main(["--merge", str(out), "--failures", str(folder)]) == 1
    assert capsys.readouterr().out.count("agrees now:") == len(replayed)


def test_kernels_are_loaded_by_their_sources() -> None:
    for kernel in known_right():
        assert load_candidate(kernel.source).kernel is kernel.kernel, kernel.name


def test_candidates_of_a_file_are_judged_in_place_of_the_bank(tmp_path: Path) -> None:
    out = tmp_path / "counted.jsonl"
    given = ["--only", "nll logits float32 single", "--candidates", str(ROOT / "ci/candidates/ours.py")]
    assert calibration.main(["--out", str(out), *SMALL, *given]) == 0
    assert {*json.loads(out.read_text())["right"]} == {"fused_vocab_parallel_cross_entropy", "fused_vocab_parallel_sft"}


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "counted.jsonl"
    calibration.main(["--out", str(out), "--minutes", "0", *SMALL])
    out.write_text(json.dumps({"piece": vars(all_pieces([0], known_right())[0]), "sizes": vars(FEW)}) + "\n")
    with pytest.raises(SystemExit, match=r"pieces of other sizes.*give the same sizes, or another --out"):
        calibration.main(["--out", str(out), *SMALL])


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b"])
def test_a_shard_is_one_of_so_many(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected a number of so many"):
        calibration.shard(text)


def test_counts_are_written_and_read_again() -> None:
    counts = RightCounts(problems=2, comparisons=3, margins={"loss: scale": 0.5}, pools=1, pool_margin=0.1)
    counts.mdes["-3.00"] += 2
    again = RightCounts.of(json.loads(json.dumps(vars(counts))))
    assert again == counts
    of_pool = {"pool_margin": 0.4, "pool_noise_margin": 0.6}
    again.merge(RightCounts(problems=1, margins={"loss: scale": 0.7, "loss: noise": 0.1}, **of_pool))
    assert (again.problems, again.pool_margin, again.largest) == (3, 0.4, ("loss: scale", 0.7))
    assert again.pool_noise_margin == 0.6
    found = WrongCounts(1, 1, 1, 1)
    found.merge(WrongCounts(2, 1, 1, 0))
    assert found == WrongCounts(3, 2, 2, 1)


def test_medians_of_steps() -> None:
    assert median_step({"-3.00": 2, "-6.00": 3, "inf": 1}) == pytest.approx(1e-6)
    assert largest_step(["-3.00", "-6.00"]) == pytest.approx(1e-3)
