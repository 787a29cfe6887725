"""What is shipped: the source distribution builds, and a wheel has what a run needs and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
KEPT = ("zinf", "csrc", "docs", "examples", "tests", "tools", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "mkdocs.yml")
KEPT += ("constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")


def built(source: Path, out: Path, what: str) -> Path:
    """The distribution that setuptools makes of `source`, without compiling and without a network."""
    out.mkdir()
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    env = {**os.environ, "ZINF_NO_NATIVE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked. It is made of a copy, so that nothing is left in the working tree."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in KEPT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name) if copy is shutil.copy else copy(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(built(folder, folder / "dist", "sdist")) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    return next((folder / "unpacked").iterdir())


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path in the wheel -> bytes, of a wheel that is built from the source distribution alone."""
    with zipfile.ZipFile(built(sdist, tmp_path_factory.mktemp("wheel") / "dist", "wheel")) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_has_all_that_building_and_testing_need(sdist: Path) -> None:
    for folder, pattern in (("csrc", "*.*"), ("zinf", "*.py*"), ("tests", "*.py"), ("docs", "*.md"), ("examples", "*.*")):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob(pattern) if p.is_file() and "__pycache__" not in p.parts}
        missing = [p for p in ours if not (sdist / p).is_file()]
        assert not missing, missing
    assert not [*sdist.rglob("*.so"), *sdist.rglob("*.o")]


def test_the_wheel_has_what_a_run_reads(wheel: dict[str, bytes]) -> None:
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "zinf").rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so")}
    assert ours <= set(wheel), ours - set(wheel)
    assert {"zinf/py.typed", "zinf/_aio.pyi", "zinf/planner/machines/rtx4090.yaml", "zinf/trace/page.html"} <= set(wheel)
    examples = {name.split("share/zinf/")[1] for name in wheel if "share/zinf/" in name}
    assert {"examples/smollm2.yaml", "examples/bigger_than_ram.yaml", "examples/bigger_than_ram/config.json"} <= examples


def test_and_nothing_else(wheel: dict[str, bytes]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert all(top == "zinf" or top.startswith("zinf-") for top in tops), tops
    assert not [name for name in wheel if name.endswith((".cpp", ".h", ".inl", ".o", ".pyc")) or "/tests/" in name]


def test_its_metadata(wheel: dict[str, bytes]) -> None:
    import zinf

    metadata = next(text for name, text in wheel.items() if name.endswith("METADATA")).decode()
    assert f"\nVersion: {zinf.__version__}\n" in metadata and re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", zinf.__version__)
    for line in (
        "License-Expression: Apache-2.0",
        "Classifier: Typing :: Typed",
        "Requires-Python: >=3.10",
        "Provides-Extra: hf",
        "Description-Content-Type: text/markdown",
    ):
        assert line in metadata, line
    assert "zinf = zinf.cli:main" in next(text for name, text in wheel.items() if name.endswith("entry_points.txt")).decode()


def test_the_changelog_knows_the_version() -> None:
    import zinf

    assert re.search(rf"^## \[{re.escape(zinf.__version__)}\] - ", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_python_m_zinf() -> None:
    done = subprocess.run([sys.executable, "-m", "zinf", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip().startswith("zinf "), done


def test_what_cibuildwheel_is_told_is_there() -> None:
    text = (ROOT / "pyproject.toml").read_text().split("[tool.cibuildwheel]")[1].split("\n[")[0]
    for script in re.findall(r"tools/\w+(?:\.py)?", text):
        assert (ROOT / script).is_file() and (script.endswith(".py") or os.access(ROOT / script, os.X_OK)), script
    assert "ZINF_REQUIRE_LIBURING" in text and "ZINF_REQUIRE_LIBURING" in (ROOT / "setup.py").read_text()
    assert set(yaml.safe_load(f"[{re.search(r'archs = .(.*).$', text, re.M)[1]}]")) == {"x86_64", "aarch64"}
