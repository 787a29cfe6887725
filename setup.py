"""Builds the two native extensions. Everything else about the package stands in pyproject.toml.

zinf._aio  the I/O engine; with liburing where its header is found, else with the thread backend alone (`zinf env` says so)
zinf._ops  the CPU kernels; every instruction set from one plain body, chosen at run time, so no -march flag

No torch headers, no nvcc, nothing is downloaded. Switches: ZINF_NO_LIBURING=1 builds without liburing, ZINF_REQUIRE_LIBURING=1 fails
where it is missing (wheels), ZINF_NO_NATIVE=1 builds nothing (tools/setup does that in a step of its own),
ZINF_SANITIZE=address|thread|undefined builds for a sanitizer, CXX chooses the compiler.
"""

import os
import subprocess
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread"]


def has_liburing() -> bool:
    """Can the compiler that builds us find liburing.h and link liburing?"""
    if os.environ.get("ZINF_NO_LIBURING"):
        return False
    program = b"#include <liburing.h>\nint main() { struct io_uring r; return io_uring_queue_init(1, &r, 0); }\n"
    cxx = os.environ.get("CXX", "g++").split()
    try:
        return subprocess.run([*cxx, "-x", "c++", "-", "-o", os.devnull, "-luring"], input=program, capture_output=True).returncode == 0
    except OSError:
        return False


def extension(name: str, folder: str, **kw) -> Pybind11Extension:
    sources = sorted(glob(f"csrc/{folder}/**/*.cpp", recursive=True))
    headers = sorted(glob(f"csrc/{folder}/**/*.[hi]*", recursive=True)) + sorted(glob("csrc/*.h"))
    sanitize = os.environ.get("ZINF_SANITIZE")
    san = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1", "-g1"] if sanitize else []  # at -O3 the kernels alone take minutes
    flags = dict(cxx_std=20, extra_compile_args=FLAGS + san, extra_link_args=["-pthread", *san])
    return Pybind11Extension(name, sources, depends=headers, include_dirs=["csrc"], **flags, **kw)


native = not os.environ.get("ZINF_NO_NATIVE")
uring = native and has_liburing()
if native and not uring and os.environ.get("ZINF_REQUIRE_LIBURING"):
    raise SystemExit("zinf: ZINF_REQUIRE_LIBURING is set, and liburing.h or liburing was not found (Debian, Ubuntu: apt install liburing-dev)")
if native and not uring:
    print("zinf: liburing not found, building with the thread backend alone (Debian, Ubuntu: apt install liburing-dev)")

ParallelCompile("ZINF_BUILD_JOBS", default=os.cpu_count() or 1).install()
extensions = [
    extension("zinf._aio", "aio", define_macros=[("ZINF_HAVE_LIBURING", "1")] if uring else [], libraries=["uring"] if uring else []),
    extension("zinf._ops", "ops"),
]
setup(ext_modules=extensions if native else [], cmdclass={"build_ext": build_ext})
