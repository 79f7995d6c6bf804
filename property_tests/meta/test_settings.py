# SPDX-License-Identifier: Apache-2.0
"""Tests of settings: where they are looked for, which wins, and what they may not be."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from cyclopts import App

from lossgate.base.errors import UsageError
from lossgate.base.names import DTYPES, WORLD_NAMES
from lossgate.cli import app
from lossgate.engine.settings import PROFILES, Settings, load_settings
from lossgate.worlds import WORLDS
from property_tests.meta.command_line import Lossgate


def test_a_flag_wins_over_the_profile_over_the_common_table_over_the_built_in_profile(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.lossgate]\nexamples = 2\nrounds = 2\nranks = 2\n"
        "[tool.lossgate.profiles.nightly]\nexamples = 3\nrounds = 3\n"
    )
    found = load_settings("nightly", tmp_path, examples=4, ranks=None)
    assert (found.examples, found.rounds, found.ranks, found.jobs) == (4, 3, 2, PROFILES["nightly"].jobs)
    other = load_settings("ci", tmp_path)
    assert (other.examples, other.rounds, other.ranks) == (2, 2, 2)


def test_pyproject_toml_is_found_from_a_folder_below_it(tmp_path: Path) -> None:
    below = tmp_path / "tests" / "kernels"
    below.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.lossgate]\nexamples = 7\n")
    assert load_settings(start=below).examples == 7
    (below.parent / "pyproject.toml").write_text("[tool.lossgate]\nexamples = 8\n")
    assert load_settings(start=below).examples == 8
    assert load_settings(start=tmp_path).examples == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout": -1.0}, "timeout=-1.0: expected a positive number of seconds, at most 1,000,000"),
        ({"examples": 0}, "examples=0: expected a positive whole number, at most 1,000,000"),
        ({"shrink_calls": -1}, "shrink_calls=-1: expected a number of problems, or 0 for none"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Settings(**changes)
    assert str(error.value) == message


def test_lists_and_whole_seconds_are_what_the_settings_hold() -> None:
    found = Settings(layouts=["single"], timeout=5)  # pyright: ignore[reportArgumentType]
    assert (found.layouts, repr(found.timeout)) == (("single",), "5.0")


def test_names_that_are_read_before_torch_is_loaded_are_those_of_the_worlds() -> None:
    assert tuple(WORLDS) == WORLD_NAMES


NAMES = tuple(Settings().values)
COUNT = "expected a positive whole number, at most 1,000,000"
RANKS = "expected a positive whole number of ranks, at most 64"
SEED = "expected a whole number from 0 to 9223372036854775807"
SECONDS = "expected a positive number of seconds, at most 1,000,000"
LAYOUT = "expected 'single' or sizes of dp, cp, tp such as 'tp=2,cp=2'"
SIZE = "expected tokens, width of the hidden states and vocabulary, such as 4096x1024x32768, with 8 tokens at least"
WORLD = f"expected one of {', '.join(WORLD_NAMES)}"
DTYPE = f"expected one of {', '.join(DTYPES)}"
FLOAT64 = "that is the dtype of the reference, and of no kernel"
LISTS = {
    "layouts": "expected a list of layouts, such as ['single', 'tp=2,cp=2']",
    "dtypes": "expected a list of dtypes, such as ['float32', 'bfloat16']",
    "sizes": "expected a list of sizes, such as ['4096x1024x32768']",
    "properties": "expected a list of names of properties, such as ['agreement', 'frozen-inputs']",
}
TABLE = "expected a table of settings, such as { examples = 30 }"
OWN, CI = "[tool.lossgate] ", "[tool.lossgate.profiles.ci] "

SETTINGS: list[tuple[str, str]] = [
    ("examples = 0", f"examples=0: {COUNT}"),
    ("examples = -3", f"examples=-3: {COUNT}"),
    ("examples = 1.5", f"examples=1.5: {COUNT}"),
    ("examples = true", f"examples=True: {COUNT}"),
    ("examples = 'many'", f"examples='many': {COUNT}"),
    ("examples = nan", f"examples=nan: {COUNT}"),
    ("examples = []", f"examples=[]: {COUNT}"),
    ("examples = {}", f"examples={{}}: {COUNT}"),
    ("examples = 99999999999999999999", f"examples=99999999999999999999: {COUNT}"),
    (f"examples = 0x{'f' * 6000}", f"examples=a number of thousands of digits: {COUNT}"),
    (f"examples = '{'x' * 500}'", f"examples='{'x' * 29}...{'x' * 29}': {COUNT}"),
    ("examples = 2026-01-31", f"examples=datetime.date(2026, 1, 31): {COUNT}"),
    ("rounds = 0", f"rounds=0: {COUNT}"),
    ("ranks = 0", f"ranks=0: {RANKS}"),
    ("ranks = 65", f"ranks=65: {RANKS}"),
    ("property_ranks = 0", f"property_ranks=0: {RANKS}"),
    ("numbers_only = 'yes'", "numbers_only='yes': expected true or false, without quotes"),
    ("numbers_only = 1", "numbers_only=1: expected true or false, without quotes"),
    ("matrix = 'ful'", "matrix='ful': did you mean 'full'? (expected one of least, covering, full)"),
    ("matrix = 8", "matrix=8: expected one of least, covering, full"),
    ("property_problems = 'all'", f"property_problems='all': {COUNT}"),
    ("shrink_calls = -1", "shrink_calls=-1: expected a number of problems, or 0 for none"),
    ("shrink_calls = false", "shrink_calls=False: expected a number of problems, or 0 for none"),
    ("jobs = -1", "jobs=-1: expected a number of processes, or 0 for one on each core"),
    ("jobs = 'all'", "jobs='all': expected a number of processes, or 0 for one on each core"),
    ("seed = -1", f"seed=-1: {SEED}"),
    ("seed = 9223372036854775808", f"seed=9223372036854775808: {SEED}"),
    ("seed = 1.0", f"seed=1.0: {SEED}"),
    ("timeout = -1", f"timeout=-1: {SECONDS}"),
    ("timeout = 0", f"timeout=0: {SECONDS}"),
    ("timeout = nan", f"timeout=nan: {SECONDS}"),
    ("timeout = inf", f"timeout=inf: {SECONDS}"),
    ("timeout = 1e300", f"timeout=1e+300: {SECONDS}"),
    ("timeout = 'x'", f"timeout='x': {SECONDS}"),
    ("timeout = true", f"timeout=True: {SECONDS}"),
    *((f"{name} = 'single'", f"{name}='single': {expected}") for name, expected in LISTS.items()),
    *((f"{name} = [1]", f"{name}=[1]: {expected}") for name, expected in LISTS.items()),
    ("layouts = ['']", f"layouts=['']: layout '': can't read ''; {LAYOUT}"),
    ("layouts = ['single', 'tp=x']", f"layouts=['single', 'tp=x']: layout 'tp=x': can't read 'tp=x'; {LAYOUT}"),
    ("layouts = ['tp=²']", f"layouts=['tp=²']: layout 'tp=²': can't read 'tp=²'; {LAYOUT}"),
    ("layouts = ['tp=0']", "layouts=['tp=0']: layout: tp=0 is not a positive whole number"),
    (
        "layouts = ['dp=8,tp=9']",
        "layouts=['dp=8,tp=9']: layout dp=8,tp=9 has 72 ranks; at most 64 can be simulated: choose",
    ),
    ("dtypes = ['int8']", f"dtypes=['int8']: unknown dtype 'int8'; {DTYPE}"),
    ("dtypes = ['float64']", f"dtypes=['float64']: unknown dtype 'float64'; {FLOAT64} ({DTYPE})"),
    ("dtypes = ['float8']", f"dtypes=['float8']: unknown dtype 'float8'; {DTYPE}"),
    ("dtypes = ['float']", f"dtypes=['float']: unknown dtype 'float'; did you mean 'float32'? ({DTYPE})"),
    ("dtypes = ['FP16']", f"dtypes=['FP16']: unknown dtype 'FP16'; did you mean 'float16'? ({DTYPE})"),
    ("dtypes = ['float23']", f"dtypes=['float23']: unknown dtype 'float23'; did you mean 'float32'? ({DTYPE})"),
    ("sizes = ['4096x1024']", f"sizes=['4096x1024']: size '4096x1024': {SIZE}"),
    ("sizes = ['7x1x1']", f"sizes=['7x1x1']: size '7x1x1': {SIZE}"),
    (f"sizes = ['{'9' * 20}x1x1']", f"sizes=['{'9' * 20}x1x1']: size '{'9' * 20}x1x1': {SIZE}"),
    ("world = 'gluo'", f"world='gluo': did you mean 'gloo'? ({WORLD})"),
    ("world = 3", f"world=3: {WORLD}"),
    ("device = 'cuda:0'", "device='cuda:0': did you mean 'cuda'? (expected one of cpu, cuda)"),
    ("device = []", "device=[]: expected one of cpu, cuda"),
    ("example = 3", f"unknown key 'example'; did you mean 'examples'? (expected one of {', '.join(NAMES)})"),
    ("'' = 3", f"unknown key ''; expected one of {', '.join(NAMES)}"),
]
"""What stands in a table of settings, and what is said of it."""

FILES: list[tuple[bytes, str]] = [
    *((f"[tool.lossgate]\n{line}".encode(), f"{OWN}{said}") for line, said in SETTINGS),
    (b"tool = 5", f"tool=5: {TABLE}"),
    (b"[tool]\nlossgate = 5", f"[tool] lossgate=5: {TABLE}"),
    (b"[[tool.lossgate]]\nexamples = 3", f"[tool] lossgate=[{{'examples': 3}}]: {TABLE}"),
    (b"[tool.lossgate]\nprofiles = 3", f"{OWN}profiles=3: {TABLE}"),
    (b"[tool.lossgate.profiles]\nci = 3", f"[tool.lossgate.profiles] ci=3: {TABLE}"),
    (b"[tool.lossgate.profiles.ci]\nexamples = 0", f"{CI}examples=0: {COUNT}"),
    (b"[tool.lossgate.profiles.ci.examples]\nmost = 3", f"{CI}examples={{'most': 3}}: {COUNT}"),
    (b"[tool.lossgate", "Expected ']' at the end of a table declaration (at end of document)"),
    (b"x = " + b"9" * 5000, "Exceeds the limit (4300 digits) for integer string conversion"),
    (b"x = " + b"[" * 5000, "its values are nested too deeply"),
    (b"[tool.lossgate]\n# \xff", "byte 18 is no UTF-8; save the file in UTF-8"),
    (b"\xff\xfe[\x00", "byte 0 is no UTF-8; save the file in UTF-8"),
]


@pytest.mark.parametrize(("content", "said"), FILES, ids=lambda value: str(value)[:60])
def test_a_bad_setting_is_one_line(folder: Path, lossgate: Lossgate, content: bytes, said: str) -> None:
    """It names the file, the table, the setting, its value, and what was expected. The profile that
    runs need not be the one that is wrong.
    """
    file = folder / "pyproject.toml"
    file.write_bytes(content)
    done = lossgate("verify", "kernels.py:right")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lossgate: {file}: {said}")
    assert done.stderr.count("\n") == 1


LATE: list[tuple[str, str, str]] = [
    ("", "properties = ['nope']", "properties: unknown property 'nope'; expected one of agreement, "),
    (".profiles.few", "properties = ['nope']", "properties: unknown property 'nope'; expected one of agreement, "),
    ("", "world = 'torchrun'", "world: world 'torchrun'"),
    ("", "device = 'cuda'", "device: device 'cuda': torch sees no CUDA device; "),
]
"""What is wrong with a setting, and is found once torch or the kernels are loaded."""


@pytest.mark.parametrize(("table", "line", "said"), LATE)
def test_what_is_found_wrong_late_names_its_place_too(
    folder: Path, lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch, table: str, line: str, said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = folder / "pyproject.toml"
    file.write_text("[tool.lossgate.profiles.few]\nexamples = 8\n[tool.lossgate]\nexamples = 9\n")
    file.write_text(file.read_text().replace(f"[tool.lossgate{table}]", f"[tool.lossgate{table}]\n{line}"))
    done = lossgate("verify", "kernels.py:right", "--profile=few", "--layout=single", "--dtype=float32")
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {file}: [tool.lossgate{table}] {said}")
    assert done.stderr.count("\n") == 1
    flag = {"properties": "--property=nope", "world": "--world=torchrun", "device": "--device=cuda"}[line.split()[0]]
    done = lossgate("verify", "kernels.py:right", "--profile=few", "--layout=single", "--dtype=float32", flag)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {said.partition(': ')[2]}")


def test_settings_that_leave_nothing_to_verify_are_named(folder: Path, lossgate: Lossgate) -> None:
    file = folder / "pyproject.toml"
    file.write_text("[tool.lossgate]\nlayouts = ['tp=2']\n")
    done = lossgate("verify", "kernels.py:right")
    assert done.returncode == 2
    assert f". Change {file}: [tool.lossgate] layouts or --dtype, or leave the candidate out" in done.stderr
    done = lossgate("verify", "kernels.py:right", "--layout=tp=4")
    assert ". Change --layout or --dtype, or leave the candidate out" in done.stderr


def test_where_settings_are_given_is_no_setting() -> None:
    """Evidence has the settings, and no paths of a machine."""
    assert set(Settings(places={"seed": "here"}).values) == set(NAMES)


def test_every_setting_is_in_the_table() -> None:
    named = {match[0] for line, _ in SETTINGS if (match := re.match(r"\w+", line))}
    assert named >= set(NAMES)


def test_a_folder_in_place_of_the_file_is_one_line(folder: Path, lossgate: Lossgate) -> None:
    file = folder / "pyproject.toml"
    file.mkdir()
    done = lossgate("verify", "kernels.py:right")
    assert (done.returncode, done.stderr) == (2, f"lossgate: can't read {file}: Is a directory\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--timeout nan", f"timeout=nan: {SECONDS}"),
        ("--timeout inf", f"timeout=inf: {SECONDS}"),
        ("--timeout 0", f"timeout=0.0: {SECONDS}"),
        ("--timeout=-1", f"timeout=-1.0: {SECONDS}"),
        ("--timeout 1e300", f"timeout=1e+300: {SECONDS}"),
        ("--timeout x", "--timeout 'x': expected a number"),
        ("--seed=-1", f"seed=-1: {SEED}"),
        (f"--seed {2**63}", f"seed={2**63}: {SEED}"),
        ("--seed x", "--seed 'x': expected a whole number"),
        ("--seed 1e400", "--seed '1e400': expected a whole number"),
        ("--examples 0", f"examples=0: {COUNT}"),
        ("--examples x", "--examples 'x': expected a whole number"),
        ("--ranks 0", f"ranks=0: {RANKS}"),
        ("--ranks 65", f"ranks=65: {RANKS}"),
        ("--jobs=-1", "jobs=-1: expected a number of processes, or 0 for one on each core"),
        ("--layout tp=²", f"layouts=('tp=²',): layout 'tp=²': can't read 'tp=²'; {LAYOUT}"),
        ("--layout tp=1,tp=2", f"layouts=('tp=1,tp=2',): layout 'tp=1,tp=2': can't read 'tp=2'; {LAYOUT}"),
        (
            f"--layout tp={'9' * 5000}",
            f"layouts=('tp={'9' * 25}...{'9' * 27}',): layout 'tp={'9' * 26}...{'9' * 29}': can't read 'tp=",
        ),
        ("--layout", 'Command "verify" parameter --layout requires an argument.'),
        ("--dtype FLOAT32", f"dtypes=('FLOAT32',): unknown dtype 'FLOAT32'; {DTYPE}"),
        ("--size 4096", f"sizes=('4096',): size '4096': {SIZE}"),
        ("--size ²x1x1", f"sizes=('²x1x1',): size '²x1x1': {SIZE}"),
        ("--world x", f"world='x': {WORLD}"),
        ("--world=", f"world='': {WORLD}"),
        ("--device gpu", "device='gpu': did you mean 'cpu'?"),
        ("--profile=", "unknown profile ''; expected one of dev, quick, ci, nightly, release"),
        ("--property int64-ids", "unknown property 'int64-ids'; expected one of agreement, "),
        ("--dtype float64", f"dtypes=('float64',): unknown dtype 'float64'; {FLOAT64} ({DTYPE})"),
        ("--property nope", "unknown property 'nope'; "),
        ("--shard 3/2", "shard '3/2': expected a part and the number of parts, such as 3/8, from 1/8 to 8/8"),
        ("--failures kernels.py", "--failures kernels.py: that is a file; choose another folder with --failures"),
    ],
)
def test_a_bad_flag_is_one_line(lossgate: Lossgate, flags: str, said: str) -> None:
    done = lossgate("verify", "kernels.py:right", *flags.split(" "))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lossgate: {said}")
    assert done.stderr.count("\n") == 1


def _numbers(commands: App, *before: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yields each option of each command that takes a number, and what is expected of it."""
    for name in commands:
        if name.startswith("-"):
            continue
        command = commands[name]
        if command.default_command is None:
            yield from _numbers(command, *before, name)
            continue
        for argument in command.assemble_argument_collection():
            for kind, expected in ((int, "a whole number"), (float, "a number")):
                if argument.hint is kind or kind in get_args(argument.hint):
                    yield (*before, name), argument.name, expected


NUMBERS = [*_numbers(app)]


def test_the_options_that_take_numbers_are_found() -> None:
    assert {(*command, name) for command, name, _ in NUMBERS} >= {("verify", "--jobs"), ("replay", "--timeout")}


@pytest.mark.parametrize(("command", "name", "expected"), NUMBERS)
def test_an_option_takes_only_a_number_of_its_kind(
    lossgate: Lossgate, command: tuple[str, ...], name: str, expected: str
) -> None:
    """By itself the library of the command line rounds 1.5 to 2."""
    bad = ["x", "", "1,5", *(["1.5", "2.0", "1e3", "nan"] if expected == "a whole number" else [])]
    for value in bad:
        done = lossgate(*command, "kernels.py:right", f"{name}={value}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"lossgate: {name} {value!r}: expected {expected}\n"


@pytest.mark.parametrize(("written", "number"), [("12", 12), ("0x10", 16), ("+7", 7), ("007", 7)])
def test_how_whole_numbers_may_be_written(
    lossgate: Lossgate, monkeypatch: pytest.MonkeyPatch, written: str, number: int
) -> None:
    given = list[int]()
    monkeypatch.setattr(
        "lossgate.engine.settings.load_settings", lambda profile, seed, **_: given.append(seed) or Settings(jobs=1)
    )
    lossgate("audit", "no_such_file.py", f"--seed={written}")
    assert given == [number]
