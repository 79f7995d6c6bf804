# SPDX-License-Identifier: Apache-2.0
"""The losses that lossgate knows, one file each. A new one is a new file here, and nothing else.

Other packages bring theirs by an entry point:

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
    for module in iter_modules(__path__):
        if not module.ispkg:
            yield from (v for v in vars(import_module(f"{__name__}.{module.name}")).values() if isinstance(v, Spec))


SPECS: Mapping[str, Spec] = MappingProxyType({spec.name: spec for spec in _own()})
"""Those of lossgate itself."""


def find_spec(name: str) -> Spec:
    """Returns the spec of a name, of lossgate or of an installed package.

    Raises:
        UsageError: if there is none, with the nearest spelling; or its package can't be imported.
    """
    if name in SPECS:
        return SPECS[name]
    installed = _installed()
    if name in installed:
        return _only(installed[name])
    known = [*SPECS, *installed]
    raise UsageError(
        f"unknown spec {name!r}; {nearest(name, known, _summarised(name))}; or give what "
        "@lossgate.spec(...) returned, and on the command line FILE or FILE:NAME"
    )


def _summarised(name: str) -> str:
    """Returns which specs have a loss of a name in their summary, in words: PPO is no slip for DPO,
    but a case of clipped_pg.
    """
    asked = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
    found = [spec.name for spec in SPECS.values() if name and asked.search(spec.summary)]
    return f"see {' and '.join(found)}: lossgate list {' '.join(found)}" if found else ""


def check_own_name(spec: Spec) -> None:
    """Refuses a spec that evidence and failure files would take for one of lossgate.

    Raises:
        UsageError: if it is another spec with the name of one of lossgate.
    """
    known = SPECS.get(spec.name, spec)
    if known is not spec and _place_of(known) != _place_of(spec):
        raise UsageError(f"spec {spec.name!r} has the name of a spec of lossgate, and is another one; rename it")


def _place_of(spec: Spec) -> object:
    """Returns where a spec's function stands. A file that is loaded twice makes a spec twice."""
    code = getattr(spec.function, "__code__", None)
    return spec.function if code is None else (code.co_filename, code.co_firstlineno)


def known_names() -> tuple[str, ...]:
    """Returns the names of the specs of lossgate and of installed packages, and loads none."""
    return tuple(dict.fromkeys((*SPECS, *_installed())))


def all_specs() -> dict[str, Spec | UsageError]:
    """Returns every spec of lossgate and of installed packages, by name.

    In place of a spec that can't be loaded, or has the name of another, it is what is wrong.
    """
    found: dict[str, Spec | UsageError] = dict(SPECS)
    for name, points in _installed().items():
        try:
            if name in SPECS:
                raise UsageError(f"{_named(points[0])} has the name of a spec of lossgate; rename it")
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
        raise UsageError(f"{where} is the spec {spec.name!r}; name the entry point so, too")
    return spec
