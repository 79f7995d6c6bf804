# SPDX-License-Identifier: Apache-2.0
"""The built-in losses, one file each. To add a loss, add its file here.

Other packages register their losses by an entry point:

    [project.entry-points."lossgate.specs"]
    focal = "my_package.losses:focal"
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from types import MappingProxyType

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.specs.spec import Spec

ENTRY_POINTS = "lossgate.specs"


def _own() -> Iterator[Spec]:
    for file in iter_modules(__path__):
        if not file.ispkg:
            module = import_module(f"{__name__}.{file.name}")
            yield from (value for value in vars(module).values() if isinstance(value, Spec))


SPECS: Mapping[str, Spec] = MappingProxyType({spec.name: spec for spec in _own()})
"""The built-in specs by name."""


def find_spec(name: str) -> Spec:
    """Returns the spec of a name, which is built in or of an installed package.

    Raises:
        UsageError: if no spec has this name, with the nearest spelling; or if its package can't be
            imported.
    """
    if name in SPECS:
        return SPECS[name]
    installed = _installed()
    if name in installed:
        return _only(installed[name])
    known = [*SPECS, *installed]
    raise UsageError(
        f"unknown spec {name!r}; {nearest(name, known, _summarised(name))}; for a loss of your own, give what "
        "@lossgate.spec(...) returned, or FILE or FILE:NAME on the command line"
    )


def _summarised(name: str) -> str:
    """Returns a hint to the specs whose summary has a name as a word; "" if there are none. PPO,
    for example, is no slip for DPO, but a setting of clipped_pg.
    """
    if not name:
        return ""
    word = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
    found = [spec.name for spec in SPECS.values() if word.search(spec.summary)]
    return f"see {' and '.join(found)}: lossgate list {' '.join(found)}" if found else ""


def check_own_name(spec: Spec) -> None:
    """Refuses a spec that evidence and failure files would confuse with a built-in spec.

    Raises:
        UsageError: if a different spec with the same name is built in.
    """
    known = SPECS.get(spec.name, spec)
    if known is not spec and _place_of(known) != _place_of(spec):
        raise UsageError(f"spec {spec.name!r} has the same name as a built-in spec of lossgate; rename it")


def _place_of(spec: Spec) -> object:
    """Returns the place of a spec's function in its file. It is equal for the two specs that a file
    makes if it is loaded twice.
    """
    code = getattr(spec.function, "__code__", None)
    return spec.function if code is None else (code.co_filename, code.co_firstlineno)


def known_names() -> tuple[str, ...]:
    """Returns the names of all specs, built in or of installed packages. It imports no package."""
    return tuple(dict.fromkeys((*SPECS, *_installed())))


def all_specs() -> dict[str, Spec | UsageError]:
    """Returns every spec by name, built in or of installed packages.

    If a spec can't be loaded, or has the name of another, the error stands in its place.
    """
    found: dict[str, Spec | UsageError] = dict(SPECS)
    for name, points in _installed().items():
        try:
            if name in SPECS:
                raise UsageError(f"{_named(points[0])} has the same name as a built-in spec of lossgate; rename it")
            found[name] = _only(points)
        except UsageError as error:
            found[name if name not in SPECS else f"{name} (of a package)"] = error
    return found


@cache
def _installed() -> Mapping[str, Sequence[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, []).append(point)
    return found


def _named(point: EntryPoint) -> str:
    return f"entry point {point.name!r} ({point.value}) of group {ENTRY_POINTS!r}"


def _only(points: Sequence[EntryPoint]) -> Spec:
    if len(points) > 1:
        raise UsageError(f"{_named(points[0])} has the same name as {points[1].value}; rename one")
    return _loaded(points[0])


@cache
def _loaded(point: EntryPoint) -> Spec:
    where = _named(point)
    try:
        spec = point.load()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where} can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(spec, Spec):
        raise UsageError(f"{where} is a {type(spec).__name__}; expected what @lossgate.spec(...) returns")
    if spec.name != point.name:
        raise UsageError(f"{where} is the spec {spec.name!r}; give the entry point the same name")
    return spec
