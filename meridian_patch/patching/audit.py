"""Finds globals that still hold an original after its sites were rebound. Rewrites nothing."""

import sys
from collections.abc import Iterable
from types import ModuleType

from meridian_patch.patching.report import StaleBinding
from meridian_patch.patching.spec import Site

OWN_PACKAGE = __name__.partition(".")[0]


def stale_bindings(original: type, sites: Iterable[Site]) -> tuple[StaleBinding, ...]:
    """Globals of loaded modules, outside the sites and this package, that hold the original."""
    subclasses: list[type] = original.__subclasses__()
    deriving = {cls.__module__ for cls in subclasses}
    declared = {(site.module, site.attribute) for site in sites}
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == OWN_PACKAGE:
            continue
        for attribute, value in list(vars(module).items()):
            if value is original and (name, attribute) not in declared:
                found.append(StaleBinding(name, attribute, is_base=name in deriving))
    return tuple(found)
