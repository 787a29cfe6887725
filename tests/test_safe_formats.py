"""Nothing that zinf reads can run code: no pickle, no eval, no unsafe YAML, no shell; and what tests and benches load, they load as data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = [*sorted(p for folder in ("zinf", "tests", "bench", "tools", "examples") for p in (ROOT / folder).rglob("*.py")), ROOT / "setup.py"]
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "dbm"}


def dangers(source: str, library: bool) -> Iterator[str]:
    """What in `source` could run code that a file brings. In tests, which may spawn processes and write tensors, only what reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.partition(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        last = call.rpartition(".")[2]
        if call in ("eval", "exec") or (call in ("compile", "__import__") and library):
            yield call
        if call == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if call == "torch.save" and library:
            yield call
        if call.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"):
            yield f"{call}: use yaml.safe_load"
        if given.get("allow_pickle", "False") != "False" or (last in ("read_pickle", "to_pickle")):
            yield f"{call} with pickle"
        if given.get("shell", "False") != "False" or call in ("os.system", "os.popen"):
            yield f"{call} with a shell"
        if library and given.get("trust_remote_code", "False") == "True":
            yield f"{call} with trust_remote_code=True"


def test_no_file_can_run_code() -> None:
    found = {str(path.relative_to(ROOT)): list(dangers(path.read_text(), library=path.is_relative_to(ROOT / "zinf"))) for path in OURS}
    assert len(found) > 100 and {path: what for path, what in found.items() if what} == {}


BAD = """import pickle|from cloudpickle import loads|torch.load(f)|torch.load(f, weights_only=False)|eval(text)|exec(text)|yaml.load(f)|yaml.unsafe_load(f)
numpy.load(f, allow_pickle=True)|subprocess.run(x, shell=True)|os.system(x)|torch.save(x, f)|M.from_pretrained(x, trust_remote_code=True)"""
GOOD = "torch.load(f, weights_only=True)|yaml.safe_load(f)|model.eval()|re.compile(x)|json.load(f)|numpy.load(f)|subprocess.run(x)"


def test_the_test_finds_what_it_looks_for() -> None:
    assert all(list(dangers(line, True)) for line in BAD.replace("\n", "|").split("|"))
    assert not any(list(dangers(line, True)) for line in GOOD.split("|"))
