# SPDX-License-Identifier: Apache-2.0
"""Finds candidates and specs in files and modules."""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.modules import kept_in, load_module, made_in
from lossgate.losses import SPECS, find_spec, known_names
from lossgate.specs.spec import Spec

_AT_IMPORT = "outside of functions and of if __name__ == '__main__', which an import does not run"


def load_candidates(target: str, *, here: bool = False) -> list[Candidate]:
    """Loads candidates, in the order of their definition.

    Args:
        target: ``file.py`` or ``package.module`` for all, ``file.py:name`` or
            ``package.module:name`` for one.
        here: whether this process must import them, and another may not tell of them.

    Raises:
        UsageError: if there is no such file, module or candidate, or it cannot be imported.
    """
    location, name = _split(target)
    found = _candidates_in(location, here=here)
    if not found:
        way_out = f"decorate a kernel with @lossgate.candidate(...), {_AT_IMPORT}"
        raise UsageError(f"{location}: no candidate in it; {way_out}")
    if name and name not in found:
        raise UsageError(f"{location}: no candidate named {name!r}; {nearest(name, found)}")
    return [found[name]] if name else list(found.values())


def load_all_candidates(targets: Sequence[str]) -> list[Candidate]:
    """Loads the candidates of several targets, as ``load_candidates`` does, each of them once.

    Raises:
        UsageError: also if the verdicts of two candidates could not be told apart, because they
            have the same name, and different specs with the same name.
    """
    once: dict[tuple[str, str], Candidate] = {}
    for target in targets:
        for candidate in load_candidates(target):
            once.setdefault(_place(candidate), candidate)
    found = list(once.values())
    known: dict[tuple[str, str], Candidate] = {}
    for candidate in found:
        other = known.setdefault((candidate.name, candidate.spec.name), candidate)
        if not _is_same(other.spec, candidate.spec):
            raise UsageError(
                f"{other.source} and {candidate.source} have the same name, and their specs differ but are both named "
                f"{candidate.spec.name!r}; rename a candidate or a spec, or verify them in separate runs"
            )
    return found


def _place(candidate: Candidate) -> tuple[str, str]:
    """Returns the file and the name of a candidate. They are the same if it was loaded by a
    module's name or by another path.
    """
    location, _, name = candidate.source.rpartition(":")
    file = getattr(load_module(location, here=False), "__file__", None)
    return str(Path(file).resolve()) if file else location, name


def _check_specs(location: str, specs: Sequence[Spec]) -> None:
    """Refuses two losses with the same name, because readers of verdicts can't tell them apart."""
    known: dict[str, Any] = {}
    for spec in specs:
        if known.setdefault(spec.name, spec.function) is not spec.function:
            raise UsageError(f"{location}: its candidates have two specs that are both named {spec.name!r}; rename one")


def load_specs(target: str) -> list[Spec]:
    """Loads the specs that a file or module makes, in the order of their definition.

    Specs that it imports from lossgate are not among them.

    Args:
        target: ``file.py`` or ``package.module`` for all, ``file.py:name`` or
            ``package.module:name`` for one.

    Raises:
        UsageError: if there is no such file, module or spec, or it cannot be imported.
    """
    location, name = _split(target)
    found = _specs_in(location)
    if not found:
        raise UsageError(f"{location}: no spec in it; decorate a reference with @lossgate.spec('its name', ...)")
    if name and name not in found:
        raise UsageError(f"{location}: no spec named {name!r}; {nearest(name, found)}")
    return [found[name]] if name else list(found.values())


def load_declared(target: str) -> tuple[list[Candidate], list[Spec]]:
    """Loads both candidates and specs, as ``load_candidates`` and ``load_specs`` do.

    Raises:
        UsageError: if there is neither.
    """
    location, name = _split(target)
    candidates, specs = _candidates_in(location, here=True), _specs_in(location)
    if name and name not in candidates and name not in specs:
        raise UsageError(
            f"{location}: no candidate or spec named {name!r}; {nearest(name, dict.fromkeys((*candidates, *specs)))}"
        )
    if not candidates and not specs:
        way_out = "decorate a kernel with @lossgate.candidate(...), or a reference with @lossgate.spec(...)"
        raise UsageError(f"{location}: no candidate or spec in it; {way_out}, {_AT_IMPORT}")
    return (
        [candidate for key, candidate in candidates.items() if name in ("", key)],
        [spec for key, spec in specs.items() if name in ("", key)],
    )


def _split(target: str) -> tuple[str, str]:
    """Returns the file or module of a target, and the name in it; "" for all names."""
    location, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if not location.strip() or (colon and not name):
        raise UsageError(f"{target!r} names nothing; expected FILE.py, FILE.py:NAME, a module, or MODULE:NAME")
    return location, name


def _candidates_in(location: str, *, here: bool) -> dict[str, Candidate]:
    module = load_module(location, here=here)
    kept = [value for value in kept_in(module) if isinstance(value, Candidate)]
    made = made_in(module)
    unchanged = [one.what for one in made if not _is_changed(one.what, kept)]
    found: dict[str, Candidate] = {}
    for candidate in (*unchanged, *kept):
        if found.setdefault(candidate.name, candidate) is not candidate:
            lines = dict.fromkeys(str(one.line) for one in made if one.what.name == candidate.name)
            where = f" (line {' and line '.join(lines)})" if lines else ""
            raise UsageError(
                f"{location}: two candidates are named {candidate.name!r}{where}; "
                "tell them apart with candidate(name=...)"
            )
    _check_specs(location, [candidate.spec for candidate in found.values()])
    return {name: replace(candidate, source=f"{location}:{name}") for name, candidate in found.items()}


def _is_changed(made: Candidate, kept: Sequence[Candidate]) -> bool:
    """Returns whether a module keeps a changed copy of a candidate, made by ``replace(made, ...)``.

    A copy still shares mappings with the candidate, and every declaration makes its own mappings.
    """
    mappings = ("precision", "supports", "tiles", "exempt")
    for one in kept:
        may_be_copy = one is not made and one.kernel is made.kernel
        if may_be_copy and any(getattr(one, name) is getattr(made, name) for name in mappings):
            return True
    return False


def _specs_in(location: str) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for value in vars(load_module(location)).values():
        if isinstance(value, Spec) and found.setdefault(value.name, value) is not value:
            raise UsageError(f"{location}: two specs are named {value.name!r}; rename one")
    return {name: spec for name, spec in found.items() if SPECS.get(name) is not spec or _is_made_in(spec, location)}


def _is_made_in(spec: Spec, location: str) -> bool:
    """Returns whether a module defines a built-in spec, and does not import it."""
    return getattr(spec.function, "__module__", "") == location


def is_name_of_a_spec(target: str) -> bool:
    """Returns whether a target can only be the name of a spec, not a file or module."""
    if target in known_names():
        return True
    # Python may not look in this folder. It is a module all the same: the error tells how to find
    # it.
    is_here = Path(target).is_dir() or Path(f"{target}.py").is_file()
    return target.isidentifier() and not is_here and importlib.util.find_spec(target) is None


def find_specs(target: str) -> list[Spec]:
    """Returns the specs of a file or module, as ``load_specs`` does; or the spec of a name.

    Raises:
        UsageError: if there is none.
    """
    return [find_spec(target)] if is_name_of_a_spec(target) else load_specs(target)


def load_candidate(source: str) -> Candidate:
    """Loads the candidate of a source. It is the same object each time. Unpickling calls this."""
    return _load_candidate(*absolute_source(source).rsplit(":", 1))


def absolute_source(source: str) -> str:
    """Returns the source in a form that does not depend on the working folder of a process."""
    location, _, name = source.rpartition(":")
    return f"{Path(location).resolve() if location.endswith('.py') else location}:{name}"


def check_source(candidate: Candidate) -> None:
    """Refuses a candidate if other processes can't load it, or would load a different one.

    Raises:
        UsageError: if the candidate's source does not hold it.
    """
    if isinstance(candidate.kernel, KernelElsewhere):  # another process has found it in its source
        return
    location = candidate.source.rpartition(":")[0]
    if not _is_loadable(location):
        raise UsageError(
            f"candidate {candidate.name!r} was made in {location}, such as a notebook or standard input. Other "
            "processes can't load it from there; save it in a .py file, with its spec if you wrote that, "
            "or run in world 'simulated' with one job"
        )
    loaded = load_candidate(candidate.source)
    way_out = "define the candidate at the top of a module, or run in world 'simulated' with one job"
    if loaded.name != candidate.name:
        raise UsageError(f"{candidate.source} holds {loaded.name!r}, not {candidate.name!r}; {way_out}")
    declared = [f.name for f in fields(Candidate) if f.name not in ("kernel", "spec", "source")]
    changed = [name for name in declared if getattr(candidate, name) != getattr(loaded, name)]
    if _code(candidate.kernel) != _code(loaded.kernel):
        changed.append("kernel")
    if not _is_same(candidate.spec, loaded.spec):
        changed.append("spec")
    if changed:
        raise UsageError(
            f"candidate {candidate.name!r} differs in its {changed[0]} from the one in {candidate.source}; {way_out}"
        )


def has_source(candidate: Candidate) -> bool:
    """Returns whether other processes can load a candidate."""
    try:
        check_source(candidate)
    except UsageError:
        return False
    return True


def _is_loadable(location: str) -> bool:
    """Returns whether a location is a file or the name of a module."""
    if location.endswith(".py"):
        return Path(location).is_file()
    return all(part.isidentifier() for part in location.split("."))


def _is_same(spec: Spec, loaded: Spec) -> bool:
    """Returns whether two specs are the same, even if their source was loaded twice."""
    if spec is loaded:
        return True
    same = spec.name == loaded.name and spec.options == loaded.options and spec.uses == loaded.uses
    return same and _code(spec.function) == _code(loaded.function)


def _code(function: Any) -> Any:
    """Returns what identifies a function: its code. Two loads of one source give equal code. For a
    callable without code it is the type.
    """
    return getattr(function, "__code__", type(function))


@cache
def _load_candidate(location: str, name: str) -> Candidate:
    (candidate,) = load_candidates(f"{location}:{name}", here=True)
    return candidate


@dataclass(frozen=True)
class KernelElsewhere:
    """The kernel of a candidate whose file another process has imported. It is loaded if this
    process calls it.
    """

    source: str

    def __call__(self, *given: Any) -> Any:
        return load_candidate(self.source).kernel(*given)
