"""Every Python that `mechanic run` starts runs this module first. It waits for torch.

This folder is the first one on PYTHONPATH, where `site` looks for a module of this name. Little is
imported here, since the script may not need it. The rest of the work begins when the script has
imported torch's optimizers.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # that of `typing` would need an import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))

# The modules to wait for, and the function of mechanic.run.adopt that is called with each.
_PATCHES = {"torch.optim.optimizer": "patch_torch", "mechanic.torch.attach": "patch_mechanize"}


class _Finder:
    """Asks the other finders, and wraps the loader so that it patches the module once loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: Any = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader)
                    return spec
        return None


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _patch(module)


def _patch(module: ModuleType) -> None:
    try:
        try:
            from mechanic.run import adopt
        except ModuleNotFoundError:  # Mechanic runs from a checkout and is not installed
            sys.path.append(_ROOT)
            try:
                from mechanic.run import adopt
            finally:
                sys.path.remove(_ROOT)
        getattr(adopt, _PATCHES[module.__name__])(module)
    except Exception as error:  # the script must run, even untuned
        _report(error)


def _report(error: Exception) -> None:
    import json

    text = f"no optimizer is tuned in process {os.getpid()}: {error!r}"
    other = getattr(sys.modules.get("mechanic"), "__file__", None)
    if isinstance(error, ModuleNotFoundError) and other is not None:
        text += f". {other} hides the package of that name: rename it"
    sys.stderr.write(f"mechanic run: {text}\n")
    spool = json.loads(os.environ["MECHANIC_RUN"])["spool"]
    if spool is not None:
        with open(os.path.join(spool, f"{os.getpid()}.failed"), "w", encoding="utf-8") as file:
            file.write(text + ".")


def _run_next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "MECHANIC_RUN" in os.environ:
    sys.meta_path.insert(0, _Finder())
_run_next()
