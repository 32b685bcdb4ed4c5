"""A vision tower, an audio tower and an LLM of transformers as one model of transformers.

`import orchmllm` makes its classes known to transformers' AutoConfig, AutoModel,
AutoModelForMultimodalLM, AutoModelForImageTextToText and AutoProcessor: as soon as transformers has
the module that holds the table of one of them, so that `import orchmllm` itself imports neither
torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_AUTO = "transformers.models.auto"
# Module of transformers -> ours, which registers at its end.
_TABLES = {f"{_AUTO}.configuration_auto": "configuration", f"{_AUTO}.modeling_auto": "modeling",
           f"{_AUTO}.processing_auto": "processing"}


class _Registering(MetaPathFinder):
    """Finds the modules of _TABLES as Python does, and registers when they have been executed."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _TABLES else None
        if spec is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _register(name)

            spec.loader.exec_module = executed
        return spec


def _register(name: str) -> None:
    """Nothing where there is no torch, or another version of transformers, which may lack what the
    classes need: whole models are refused there."""
    from orchmllm.models.families import is_known

    transformers = sys.modules["transformers"]
    if is_known(transformers.__version__) and transformers.is_torch_available():
        import_module(f"{__name__}.{_TABLES[name]}")


def register_when_imported() -> None:
    """Called once, by `import orchmllm`."""
    sys.meta_path.insert(0, _Registering())
    for name in _TABLES:
        if name in sys.modules:
            _register(name)
