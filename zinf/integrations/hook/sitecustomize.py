"""What Python imports at its start under `zinf run`: once transformers.trainer is there, its classes train on zinf. See zinf/integrations/trainers.py.

Until then nothing of zinf is imported: this runs in every Python that the command starts. Then a sitecustomize that this one hides is run.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class _Finder:
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "transformers.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            from zinf.integrations import trainers

            trainers.install(module.Trainer, os.environ.get("ZINF_CONFIG"))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _hidden() -> None:
    rest = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("ZINF_RUN"):
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
_hidden()
