# SPDX-License-Identifier: Apache-2.0
"""Profiles of hypothesis for tests with ``hypothesis.given``, and the examples that they share.

The environment variable ``HYPOTHESIS_PROFILE`` chooses one:

- ``dev``, the default: random examples. Failing ones are kept in ``.hypothesis/examples``. With
  ``HYPOTHESIS_SHARED_EXAMPLES=OWNER/REPOSITORY`` those of the nightly runs of that repository on
  GitHub are tried too; ``GITHUB_TOKEN`` must allow to read its artefacts.
- ``ci``, the default where ``CI`` is set: the same examples in each run, none kept.
- ``nightly``: many random examples. Failing ones are kept, for CI to upload.

Nothing is fetched unless it is asked for. The engine of lossgate has no part in this: it draws its
decks without a database, so that the same seed gives the same problems everywhere.
"""

import os
import sys
import warnings
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)
from hypothesis.errors import HypothesisWarning

PROFILE, SHARED = "HYPOTHESIS_PROFILE", "HYPOTHESIS_SHARED_EXAMPLES"
ARTIFACT = "hypothesis-example-db"
"""What the nightly workflow calls its artefact."""


def load_profile() -> None:
    """Registers the profiles, and loads the one that the environment asks for.

    Raises:
        ValueError: if the environment asks for what is not there.
    """
    folder = Path.cwd() / ".hypothesis"  # tests may go to other folders
    local = DirectoryBasedExampleDatabase(folder / "examples")
    # hypothesis has other defaults where CI is set: no random examples
    random = settings(settings.get_profile("default"), derandomize=False, database=local)
    settings.register_profile("dev", random, database=_with_shared(local, folder))
    settings.register_profile("ci", settings.get_profile("ci"))
    settings.register_profile(
        "nightly",
        random,
        max_examples=2000,  # where a test does not set its own number
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    name = os.environ.get(PROFILE) or ("ci" if "CI" in os.environ else "dev")
    if name not in ("dev", "ci", "nightly"):
        raise ValueError(f"{PROFILE}={name}: expected dev, ci or nightly")
    settings.load_profile(name)


def _with_shared(local: ExampleDatabase, folder: Path) -> ExampleDatabase:
    repository = os.environ.get(SHARED)
    if not repository:
        return local
    owner, slash, name = repository.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ValueError(f"{SHARED}={repository}: expected OWNER/REPOSITORY")
    shared = GitHubArtifactDatabase(owner, name, ARTIFACT, path=folder / "github-artifacts" / owner / name)
    _fetch(shared, repository)
    return MultiplexedDatabase(local, ReadOnlyDatabase(shared))


def _fetch(shared: GitHubArtifactDatabase, repository: str) -> None:
    """Fetches the artefact, so that no test warns that it can't be fetched.

    It is kept for a day in ``.hypothesis``, so that workers of pytest-xdist find it there.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HypothesisWarning)
        list(shared.fetch(b""))
    for warning in caught:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            print(f"hypothesis: examples of {repository}: {warning.message}", file=sys.stderr)
