"""How a public face finds its names: by module, imported when a name is first asked for.

So importing the package pulls in nothing, modules below a face may import each other freely, and an adapter's library is
needed only by who asks for that adapter.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def _installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ImportError:
        return False


def lazy(
    face: str, modules: Mapping[str, Iterable[str]], adapters: Mapping[str, tuple[str, Iterable[str]]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a face.

    Args:
        face: The face's own module name, for messages.
        modules: Module below ``kv_bounce_planner`` -> the names it gives.
        adapters: The same for modules that import an optional library -> (library, names). They are in ``__all__`` only
            where the library is installed, so that a star import works everywhere.
    """
    found = {name: module for module, names in modules.items() for name in names}
    optional = {name: module for module, (_, names) in adapters.items() for name in names}
    installed = [name for library, names in adapters.values() if _installed(library) for name in names]

    def get(name: str) -> Any:
        module = found.get(name) or optional.get(name)
        if module is None:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"kv_bounce_planner.{module}"), name)

    def names() -> list[str]:
        return sorted({*found, *optional})

    return get, names, sorted({*found, *installed})
