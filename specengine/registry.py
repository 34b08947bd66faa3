"""One way to plug things in: a name is a module, and the module exports one object.

Owns the lookup of drafters, acceptance rules, attention backends, executors and commands by name. Knows nothing
about what they do.

    DRAFTERS = Registry("specengine.spec.drafters", export="DRAFTER", kind="drafter")
    drafter_class = DRAFTERS.get("ngram")
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from specengine.errors import ConfigError


class Registry:
    """Finds `export` in the module `package.name`, or in an entry point group named after the package."""

    def __init__(self, package: str, *, export: str, kind: str):
        self.package = package
        self.export = export
        self.kind = kind

    def names(self) -> list[str]:
        """Every name that `get` takes, sorted."""
        package = importlib.import_module(self.package)
        modules = {m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base"}
        return sorted(modules | {e.name for e in entry_points(group=self.package)})

    def get(self, name: str) -> Any:
        """The object registered under `name`; raises ConfigError with the known names."""
        if name not in self.names():
            raise ConfigError(f"unknown {self.kind} {name!r}; known are {', '.join(self.names())}")
        for entry in entry_points(group=self.package, name=name):
            return entry.load()
        return getattr(importlib.import_module(f"{self.package}.{name}"), self.export)
