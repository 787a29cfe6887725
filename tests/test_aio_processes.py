"""The I/O engine where it may not do everything, in processes that fork or just end, and its native part alone under the sanitizers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from io_rig import CXX, NATIVE, PAGE, ROOT, runs, script

from zinf.aio import open_engine
from zinf.aio.faults import storm
from zinf.errors import ConfigError

pytest_plugins = ["io_rig"]


# ---- processes


@pytest.mark.parametrize("name", NATIVE[:1])
def test_memlock_too_small(name):
    """Goes on without registered buffers: one log line, and the report says why."""
    out = script("""
        import ctypes, logging, mmap, os, resource, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import zinf.aio.native
        from zinf.aio import open_engine
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)  # root is exempt
        engine = open_engine("uring")
        memory = mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        print(engine.register(address, 1 << 20, memory), engine.register(address, 1 << 20, memory))
        print(engine.report()["registered_buffers"])
        engine.close()
    """)
    log, results, report = out.strip().splitlines()
    assert "without registered buffers" in log and "RLIMIT_MEMLOCK" in log
    assert results == "False False"
    assert "RLIMIT_MEMLOCK" in report


SECCOMP = """
    import ctypes, struct
    def forbid_io_uring(code):
        # BPF: load the number of the system call; 425 (io_uring_setup) -> errno, everything else is allowed
        program = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 425, 0x06, 0, 0, 0x50000 | code, 0x06, 0, 0, 0x7FFF0000)
        memory = ctypes.create_string_buffer(program)
        header = struct.pack("HxxxxxxP", 4, ctypes.addressof(memory))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
        assert libc.prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()
"""


@pytest.mark.parametrize("name", NATIVE[:1])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_io_uring_forbidden(name, code):
    """auto takes the threads and says why in one line; asking for uring is an error that names seccomp."""
    out = script(
        textwrap.dedent(SECCOMP)
        + textwrap.dedent(f"""
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
        from zinf.aio import open_engine
        from zinf.aio.probe import probe
        from zinf.errors import ConfigError
        forbid_io_uring({code})
        engine = open_engine("auto")
        print(engine.name)
        engine.close()
        try:
            open_engine("uring")
        except ConfigError as error:
            print(error)
        print(probe()["io_uring"])
        """)
    )
    log, name, error, works = out.strip().splitlines()
    assert log.startswith("I/O backend threads (uring: ") and "seccomp" in log
    assert name == "threads"
    assert error.startswith("I/O backend 'uring' cannot run here: ") and "seccomp" in error
    assert works == "False"


def test_without_the_compiled_module():
    out = script("""
        import sys
        sys.modules["zinf._aio"] = None
        from zinf.aio import open_engine
        from zinf.aio.probe import probe
        from zinf.errors import ConfigError
        engine = open_engine("auto")
        print(engine.name)
        engine.close()
        try:
            open_engine("threads")
        except ConfigError as error:
            print(error)
        print(probe()["built"])
    """)
    name, error, built = out.strip().splitlines()
    assert name == "python"
    assert "compiled module is not there" in error
    assert built.startswith("no")


def test_unknown_backend():
    with pytest.raises(ConfigError, match="uring, threads, python"):
        open_engine("aio")


def test_environment_chooses_what_auto_means(monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    monkeypatch.setenv("ZINF_FAULTS_SEED", "11")
    engine = open_engine()
    assert engine.name == "faults:threads" and engine.rules == storm(11)
    engine.close()


USE = """
    import ctypes, mmap, os, sys
    from zinf.aio import open_engine
    from zinf.aio.faults import FaultyEngine, Rule
    from zinf.errors import EngineError
    engine = FaultyEngine(open_engine({backend!r}), [Rule("w", probability=1, delay_ms=300)])
    file = engine.open({path!r}, write=True, create=True)
    memory = mmap.mmap(-1, 4096)
    memory[:] = b"e" * 4096
    op = ("w", file, 0, ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4096)
    tickets = engine.submit([op], owner=memory)
"""


def test_interpreter_exit_without_close(backend, tmp_path):
    """Neither hangs nor loses what is in flight."""
    script(textwrap.dedent(USE.format(backend=backend, path=str(tmp_path / "f"))))
    if backend != "python":  # concurrent.futures closes its pools before anyone is asked
        assert (tmp_path / "f").read_bytes() == b"e" * PAGE


def test_a_forked_child_does_not_hang(backend, tmp_path):
    out = script(
        textwrap.dedent(USE.format(backend=backend, path=str(tmp_path / "f")))
        + textwrap.dedent("""
        child = os.fork()
        if child == 0:
            try:
                engine.submit([op])
            except EngineError as error:
                print(error, flush=True)
            engine.close()
            sys.exit(0)  # atexit, destructors and all
        tickets[0].wait()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.submit([op])[0].wait()
        engine.close()
        """)
    )
    assert "belongs to the process that made it" in out


# ---- the native part by itself


@pytest.mark.skipif(shutil.which(CXX[0]) is None, reason="no compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_native_driver(sanitizer, tmp_path):
    """csrc/tests/aio_test.cpp: what Python cannot reach, under the sanitizers. One translation unit, so that it builds in seconds."""
    sources = [f"aio/{path.name}" for path in sorted((ROOT / "csrc/aio").glob("*.cpp")) if path.name != "bindings.cpp"]
    (tmp_path / "all.cpp").write_text("".join(f'#include "{source}"\n' for source in [*sources, "tests/aio_test.cpp"]))
    header = subprocess.run([*CXX, "-E", "-xc++", "-"], input=b"#include <liburing.h>", capture_output=True)
    uring = ["-DZINF_HAVE_LIBURING=1", "-luring", "-ldl"] if header.returncode == 0 else []
    flags = ["-std=c++20", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-pthread", "-I", str(ROOT / "csrc")]
    build = subprocess.run([*CXX, *flags, "-o", tmp_path / "driver", tmp_path / "all.cpp", *uring], capture_output=True, text=True)
    if "cannot find" in build.stderr:
        pytest.skip(f"no {sanitizer} sanitizer here")
    assert build.returncode == 0, build.stderr
    run = subprocess.run([tmp_path / "driver"], env={**os.environ, "ZINF_TEST_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout == "ok\n", run.stderr


# ---- the bench


def test_bench_at_toy_size(tmp_path):
    """Runs, reports a number for each backend that runs here, and leaves no file."""
    run = subprocess.run([sys.executable, ROOT / "bench/aio.py", "--toy", "--dir", tmp_path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    for backend in ("uring", "threads"):
        for verb in ("read", "write"):
            assert (f"{verb}: zinf {backend}" in summary) == runs(backend)
    assert summary["read: zinf threads"]["gb_s"] > 0
    assert list(tmp_path.iterdir()) == []
