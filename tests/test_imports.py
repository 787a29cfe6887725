"""The imports form a line: who may import whom, read from the source. And importing zinf is light.

integrations, hf, cli -> engine -> {streaming, optimizer, checkpoint, schedule} -> shard -> tiers -> aio -> _aio;  ops -> _ops
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zinf

ROOT = Path(zinf.__file__).parent

# Lowest first. A part (a module or package directly below zinf) may import from lower layers and from itself.
LAYERS = [
    {
        "errors",
        "layout",
        "config",
        "measured",
        "discover",
        "trace",
        "schedule",
        "placement",
        "pipeline",
        "rng",
        "buffers",
        "objects",
        "guards",
        "kvcache",
        "precision",
        "scaling",
        "heads",
        "fused",
        "moving",
        "oom",
    },
    {"_aio", "_ops", "owners"},
    {"aio", "ops"},
    {"tiers"},
    {"slabs", "activations", "algorithms"},
    {"chunks"},
    {"shard"},
    {"grads_away"},
    {"grads", "streaming", "compiling", "recompute", "optimizer", "checkpoint", "commit"},
    {"memory", "editing", "averages", "stored"},
    {"residency"},
    {"planner"},
    {"stepping", "report", "reading", "saves", "merging", "recovery"},
    {"health", "progress"},
    {"conductor"},
    {"engine"},
    {"hf", "integrations", "profiler", "data", "loader", "train", "cli", "__main__"},
]
# Beside that, from its own layer:
SIDEWAYS = {
    "layout": {"errors"},
    "owners": {"errors"},
    "config": {"errors", "layout"},
    "measured": {"errors", "layout", "config"},
    "discover": {"errors", "layout"},
    "trace": {"errors", "layout"},
    "pipeline": {"trace"},
    "guards": {"errors"},
    "kvcache": {"errors"},
    "placement": {"errors", "layout"},
    "objects": {"errors"},
    "precision": {"errors"},
    "scaling": {"errors"},
    "fused": {"errors", "heads"},
    "oom": {"config", "errors", "placement"},
    "memory": {"stored"},
    "merging": {"reading"},
    "integrations": {"hf", "profiler"},
    "loader": {"data"},
    "train": {"data", "hf"},
    "cli": {"train", "data", "hf", "integrations"},
    "__main__": {"cli"},
}
NATIVE = {"_aio": "aio", "_ops": "ops"}  # compiled module -> the only part that may import it
WITHOUT_TORCH = {"errors", "layout", "config", "schedule", "trace", "data", "train", "cli", "__main__"}  # where they are imported, not when they run
TRANSFORMERS = {"hf", "integrations", "train", "cli"}  # only there, and only when they run


def layer(part: str) -> int:
    found = [i for i, parts in enumerate(LAYERS) if part in parts]
    assert found, f"zinf/{part} is new: give it a place in LAYERS (and in DESIGN)"
    return found[0]


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(source: str, package: str) -> list[tuple[str, bool]]:
    """(imported module in full, is it imported when the module is) for every import statement but those for type checkers only.

    `package` resolves relative imports.
    """
    tree = ast.parse(source)
    late: set[int] = set()
    never: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            never.update(id(inner) for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            late.update(id(inner) for inner in ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if id(node) in never:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "zinf" else [base]
            found += [(name, id(node) not in late) for name in names]
    return found


def violations(part: str, source: str, package: str = "zinf") -> list[str]:
    """What is wrong with the imports of one file of `part`."""
    wrong = []
    for name, at_once in imports(source, package):
        top, _, rest = name.partition(".")
        if top == "zinf":
            other = rest.split(".")[0]
            if other in ("", "__version__", part):
                continue
            if other in NATIVE:
                if part != NATIVE[other]:
                    wrong.append(f"{part} imports {name}: only {NATIVE[other]} may")
            elif layer(other) >= layer(part) and other not in SIDEWAYS.get(part, ()):
                wrong.append(f"{part} imports {name}: against the direction of imports")
        elif top == "torch" and at_once and part in WITHOUT_TORCH:
            wrong.append(f"{part} imports torch when it is imported")
        elif top in ("transformers", "peft", "accelerate") and (part not in TRANSFORMERS or (at_once and part in WITHOUT_TORCH)):
            wrong.append(f"{part} imports {top}" + (" when it is imported" if part in TRANSFORMERS else ""))
    return wrong


def test_every_arrow_points_down() -> None:
    files = [f for f in sorted(ROOT.rglob("*.py")) if f != ROOT / "__init__.py"]
    assert len(files) > 20
    wrong = []
    for file in files:
        package = ".".join(["zinf", *file.relative_to(ROOT).parent.parts])
        wrong += [f"{file.relative_to(ROOT)}: {text}" for text in violations(part_of(file), file.read_text(), package)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("part", "source", "said"),
    [
        ("layout", "from zinf.tiers import nvme", "layout imports zinf.tiers: against"),
        ("tiers", "def f():\n    from zinf.engine import Engine", "tiers imports zinf.engine: against"),
        ("tiers", "from zinf import engine", "tiers imports zinf.engine: against"),
        ("tiers", "from ..shard import Shard", "tiers imports zinf.shard: against"),
        ("engine", "import zinf.hf.loading", "engine imports zinf.hf.loading: against"),
        ("hf", "from zinf.cli import main", "hf imports zinf.cli: against"),
        ("engine", "from zinf import _aio", "engine imports zinf._aio: only aio may"),
        ("ops", "from zinf import _aio", "ops imports zinf._aio: only aio may"),
        ("schedule", "import torch", "schedule imports torch when"),
        ("engine", "def f():\n    import transformers", "engine imports transformers"),
        ("cli", "from transformers import AutoModel", "cli imports transformers when"),
        ("tiers", "from zinf import layout\nfrom zinf.aio import IoEngine\nimport torch", None),
        ("cli", "def f():\n    import torch, transformers\n    from zinf.train import train", None),
        ("slabs", "if TYPE_CHECKING:\n    from zinf.shard import Shard", None),
        ("slabs", "if TYPE_CHECKING:\n    pass\nelse:\n    from zinf.shard import Shard", "slabs imports zinf.shard: against"),
        ("hf", "from transformers import AutoModel\nfrom zinf.engine import Engine", None),
    ],
)
def test_the_test_sees_what_is_wrong(part: str, source: str, said: str | None) -> None:
    found = violations(part, source, f"zinf.{part}")
    assert (found == []) if said is None else (len(found) == 1 and found[0].startswith(said))


@pytest.mark.parametrize("module", ["zinf", "zinf.cli", "zinf.config", "zinf.layout"])
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}\nprint(sorted({{'torch', 'transformers', 'numpy', 'yaml'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_public_names() -> None:
    assert sorted(zinf._HOMES) == sorted(set(zinf.__all__) - {"__version__"})
    assert set(zinf.__all__) <= set(dir(zinf))
    from zinf.config import Config
    from zinf.errors import ConfigError

    assert zinf.Config is Config and zinf.ConfigError is ConfigError and zinf.layout.PAGE == 4096
    with pytest.raises(AttributeError, match="no attribute 'Enginge'"):
        _ = zinf.Enginge
