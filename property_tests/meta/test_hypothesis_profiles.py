# SPDX-License-Identifier: Apache-2.0
"""Tests of the profiles of hypothesis, and of the examples that CI and developers share."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from property_tests.hypothesis_profiles import ARTIFACT, PROFILE, SHARED, load_profile

Environment = Callable[..., None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, no variable set, and no network. Later tests get their profile again."""
    for name in (PROFILE, SHARED, "CI", "GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(GitHubArtifactDatabase, "_get_bytes", lambda *_: pytest.fail("this needs the network"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    monkeypatch.undo()
    load_profile()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Environment:
    def load(**environment: str) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        load_profile()

    return load


@pytest.mark.parametrize(
    ("environment", "random", "kept"),
    [
        ({}, True, True),
        ({"CI": "true"}, False, False),
        ({PROFILE: "dev", "CI": "true"}, True, True),
        ({PROFILE: "ci"}, False, False),
        ({PROFILE: "nightly", "CI": "true"}, True, True),
    ],
)
def test_the_environment_chooses_a_profile(
    load: Environment, home: Path, environment: dict[str, str], random: bool, kept: bool
) -> None:
    load(**environment)
    assert settings().derandomize is not random
    assert settings().database == (DirectoryBasedExampleDatabase(home / ".hypothesis/examples") if kept else None)


def test_a_night_draws_more_examples(load: Environment) -> None:
    load()
    usual = settings().max_examples
    load(HYPOTHESIS_PROFILE="nightly")
    assert settings().max_examples >= 10 * usual


@pytest.mark.parametrize(
    ("name", "value"), [(PROFILE, "nigthly"), (SHARED, "owner"), (SHARED, "owner/"), (SHARED, "a/b/c")]
)
def test_what_is_not_there_is_refused(load: Environment, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: expected"):
        load(**{name: value})


def fails_on(number: int, tried: list[int]) -> Callable[[], None]:
    """Returns a test that fails on one number in a million, and notes what it tries."""

    @given(st.integers(0, 10**6))
    def test(drawn: int) -> None:
        tried.append(drawn)
        assert drawn != number

    return test


def test_a_failure_of_a_night_is_the_first_example_of_a_developer(
    load: Environment, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(HYPOTHESIS_PROFILE="nightly")
    tried: list[int] = []
    with pytest.raises(AssertionError):
        fails_on(0, tried)()
    artifact = home / "artifact.zip"
    with ZipFile(artifact, "w") as file:
        for path in sorted((home / ".hypothesis/examples").rglob("*")):
            file.write(path, path.relative_to(home / ".hypothesis/examples"))

    developer = home / "developer"
    developer.mkdir()
    monkeypatch.chdir(developer)
    answers = [b'{"artifacts": [{"name": "%s", "created_at": "1", "archive_download_url": "u"}]}' % ARTIFACT.encode()]
    answers.append(artifact.read_bytes())
    monkeypatch.setattr(GitHubArtifactDatabase, "_get_bytes", lambda *_: answers.pop(0))
    load(HYPOTHESIS_PROFILE="dev", HYPOTHESIS_SHARED_EXAMPLES="owner/repository")
    assert answers == []
    kept = developer / ".hypothesis"
    shared = GitHubArtifactDatabase("owner", "repository", ARTIFACT, path=kept / "github-artifacts/owner/repository")
    local = DirectoryBasedExampleDatabase(kept / "examples")
    assert settings().database == MultiplexedDatabase(local, ReadOnlyDatabase(shared))
    tried.clear()
    with pytest.raises(AssertionError):
        settings(phases=[Phase.reuse])(fails_on(0, tried))()
    assert set(tried) == {0}


def test_without_an_artifact_one_line_is_printed_and_tests_go_on(
    load: Environment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GitHubArtifactDatabase, "_get_bytes", lambda *_: b'{"artifacts": []}')
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(HYPOTHESIS_SHARED_EXAMPLES="owner/repository")
        settings(max_examples=1)(fails_on(-1, []))()
    printed = capsys.readouterr().err
    assert printed.startswith("hypothesis: examples of owner/repository: Couldn't acquire")
    assert printed.count("\n") == 1
