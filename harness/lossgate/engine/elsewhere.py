# SPDX-License-Identifier: Apache-2.0
"""Candidates of a file that another process has imported, as data. So this process need not import
it, which takes long if the file imports a framework.
"""

import io
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from types import MappingProxyType, ModuleType
from typing import Any

from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import KernelElsewhere, load_candidates
from lossgate.declaration.modules import StandIn, load_module
from lossgate.losses import SPECS, find_spec
from lossgate.properties import PROPERTIES
from lossgate.specs.spec import Spec


def tell_candidates(location: str) -> bytes | None:
    """Returns the candidates of a file or module as data. None if they are more than data, because
    their spec is the user's own, or a file has registered a property.

    Args:
        location: as for ``load_module``.
    """
    if not all(held_to.check.__module__.startswith("lossgate.") for held_to in PROPERTIES.values()):
        return None
    told = io.BytesIO()
    with suppress(Exception):  # values of a user's own class may raise anything
        file = getattr(load_module(location), "__file__", None)
        _Pickler(told).dump((file, load_candidates(location)))
        return told.getvalue()
    return None


def stand_in(told: bytes, printed: str) -> StandIn | None:
    """Returns what stands in for a location whose candidates another process told of. None if they
    need a class that this process can't import.

    Args:
        told: what ``tell_candidates`` returned.
        printed: what the import printed. It is shown when the location is asked for.
    """
    with suppress(Exception):  # whatever the import of a user's class may raise
        file, candidates = pickle.loads(told)
        module = ModuleType("told")
        vars(module).update({"__file__": file, "told": candidates})
        return cache(partial(_shown, module, printed))
    return None


def _shown(module: ModuleType, printed: str) -> ModuleType:
    sys.stdout.write(printed)
    return module


class _Pickler(pickle.Pickler):
    """Pickles candidates without their kernels, and built-in specs by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, MappingProxyType):
            return _fixed, (dict(obj),)
        if isinstance(obj, Spec):
            if SPECS.get(obj.name) is not obj:
                raise pickle.PicklingError(f"spec {obj.name!r} is no built-in spec")
            return find_spec, (obj.name,)
        if isinstance(obj, Candidate):
            own = {f.name: getattr(obj, f.name) for f in fields(obj)}
            return _candidate, (own | {"kernel": KernelElsewhere(obj.source)},)
        return NotImplemented


def _fixed(entries: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(entries)


def _candidate(fields: dict[str, Any]) -> Candidate:
    return Candidate(**fields)
