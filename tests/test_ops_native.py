"""The native half of zinf.ops alone, under the sanitizers: csrc/tests/ops_test.cpp. (That of zinf.aio: test_aio_processes.py.)"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from io_rig import CXX, ROOT

OPS = ROOT / "csrc" / "ops"
FLAGS = ["-std=c++20", "-O0", "-g1", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-pthread", "-I", str(ROOT / "csrc")]

pytestmark = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason="no compiler")


def built(folder: Path, sources: list[Path], *flags: str) -> Path:
    def compile(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        done = subprocess.run([*CXX, *FLAGS, *flags, "-c", "-o", target, source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile, sources))
    done = subprocess.run([*CXX, *flags, "-pthread", "-o", folder / "driver", *objects], capture_output=True, text=True)
    if "cannot find" in done.stderr:
        pytest.skip("no such sanitizer here")
    assert done.returncode == 0, done.stderr
    return folder / "driver"


def run(driver: Path) -> subprocess.CompletedProcess:
    return subprocess.run([driver], env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}, capture_output=True, text=True, timeout=200)


def test_the_pool_has_no_races(tmp_path: Path) -> None:
    done = run(built(tmp_path, [ROOT / "csrc/tests/ops_test.cpp", OPS / "pool.cpp"], "-fsanitize=thread", "-DPOOL_ONLY"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_kernels_stay_within_their_arrays(tmp_path: Path) -> None:
    """Arrays of exactly their size, sizes around every vector width, each instruction set; and nothing leaks."""
    sources = [path for path in OPS.rglob("*.cpp") if path.name != "bindings.cpp"]
    done = run(built(tmp_path, [ROOT / "csrc/tests/ops_test.cpp", *sources], "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize(
    ("flag", "body", "said"),
    [
        ("address", "volatile auto p = new int[8]; p = nullptr;", "detected memory leaks"),
        ("address", "auto p = new int[8]; volatile int n = 8; p[n] = 1;", "heap-buffer-overflow"),
        ("undefined", "volatile int n = 2147483647; n = n + 1;", "signed integer overflow"),
        ("thread", "int n = 0; std::thread t([&] { ++n; }); ++n; t.join();", "data race"),
    ],
)
def test_the_sanitizers_see_what_they_look_for(tmp_path: Path, flag: str, body: str, said: str) -> None:
    (tmp_path / "bad.cpp").write_text(f"#include <thread>\nint main() {{ {body} }}\n")
    done = run(built(tmp_path, [tmp_path / "bad.cpp"], "-w", f"-fsanitize={flag}", "-fno-sanitize-recover=undefined"))
    assert done.returncode != 0 and said in done.stderr
