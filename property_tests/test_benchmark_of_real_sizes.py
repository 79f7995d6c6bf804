# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/real_size.py`` sees all processes of the judge, and what fewer runs change."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import real_size
from real_size import FEW, RUNS, judge, memory_of

HOLDS = "import sys; held = b'1' * (300 << 20); print('holds', flush=True); sys.stdin.read()"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS!r}])"


def test_the_memory_of_a_process_that_another_started_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        assert 300 / 1024 < memory_of(process.pid) < 400 / 1024


def test_a_process_that_ended_has_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert memory_of(process.pid) == 0


@pytest.mark.slow
def test_a_kernel_that_was_not_judged_is_no_measurement(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(RuntimeError, match=r"ended with 2:\n(.|\n)*no candidate"):
        judge(str(tmp_path / "empty.py"), real_size.SMALL)


@pytest.mark.slow
def test_the_command_prints_each_number_from_all_runs_and_from_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_size.py", "--size=small"])
    monkeypatch.setenv("COLUMNS", "160")
    real_size.main()
    printed = capsys.readouterr().out
    assert "single at T=264, H=16, V=4,100, as shares of the limits: loss " in printed
    assert re.search(r"^\d+ s: \d+% of 300 s, and \d+ times one run of the kernel, which took \S+ s$", printed, re.M)
    assert re.search(r"^0\.\d+ GiB at the peak: \d+% of 6 GiB$", printed, re.M)
    rows = re.findall(r"^│ (.+?) +│ (.+?) +│ +(\S+) │ +(\S+) │ +(\S+) │ +(\S+) │$", printed, re.M)
    found = {(output, number): [float(one) for one in few] for output, number, _, *few in rows}
    assert {len(few) for few in found.values()} == {RUNS // FEW}
    assert {output for output, _ in found} == {"loss", "grad of hidden", "grad of weight"}
    assert {number for output, number in found if output == "grad of weight"} == {
        *(f"limit of {name}" for name in ("scale", "noise", "worst", "vocab row", "vocab tile")),
        "least error found",
        "worst / limit",
    }
    of_noise = [ratio for (_, number), few in found.items() if number == "limit of noise" for ratio in few]
    assert len(of_noise) == 6
    assert all(0.9 < ratio < 1.1 for ratio in of_noise), "few runs say how noisy a gradient of many entries is"
    assert all(ratio > 3 for ratio in found["loss", "least error found"]), "and not how noisy a single number is"
