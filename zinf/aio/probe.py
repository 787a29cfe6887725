"""What of io_uring this machine has, asked of the kernel itself: for `zinf env`, and for the error of a backend that cannot run.

Raw system calls through cffi in ABI mode (liburing's helpers are inline functions, which a dlopen cannot reach), so this works where
zinf._aio was never built.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

_CDEF = """
long syscall(long number, ...);
int close(int fd);
struct sq { uint32_t head, tail, mask, entries, flags, dropped, array, resv1; uint64_t resv2; };
struct cq { uint32_t head, tail, mask, entries, overflow, cqes, flags, resv1; uint64_t resv2; };
struct params { uint32_t sq_entries, cq_entries, flags, cpu, idle, features, wq_fd, resv[3]; struct sq sq; struct cq cq; };
struct op { uint8_t op, resv; uint16_t flags; uint32_t resv2; };
struct probe { uint8_t last_op, ops_len; uint16_t resv; uint32_t resv2[3]; struct op ops[256]; };
struct range { void *base; size_t length; };
const char *gnu_get_libc_version(void);
"""

# The same numbers on every architecture since they were added in Linux 5.1.
_SETUP, _REGISTER = 425, 427
_REGISTER_BUFFERS, _REGISTER_PROBE = 0, 8
_SUPPORTED = 1  # flag of an opcode

_FEATURES = (
    "SINGLE_MMAP NODROP SUBMIT_STABLE RW_CUR_POS CUR_PERSONALITY FAST_POLL POLL_32BITS "
    "SQPOLL_NONFIXED EXT_ARG NATIVE_WORKERS RSRC_TAGS CQE_SKIP LINKED_FILE REG_REG_RING"
).split()
# DEFER_TASKRUN only comes with SINGLE_ISSUER
_FLAGS = {"CQSIZE": 1 << 3, "COOP_TASKRUN": 1 << 8, "SINGLE_ISSUER": 1 << 12, "DEFER_TASKRUN": 1 << 12 | 1 << 13}
_OPCODES = {"READ_FIXED": 4, "WRITE_FIXED": 5, "FSYNC": 3, "READ": 22, "WRITE": 23}  # what the engine uses


def probe() -> dict[str, Any]:
    """kernel; liburing (version of the library found, or None) and built (is zinf._aio there, with liburing?); io_uring (does it work), why (not);
    features, setup_flags and opcodes that the kernel has; registered_buffers (does it pin 16 MiB, or why not); memlock (bytes, -1: no limit);
    sysctl (kernel.io_uring_disabled) and seccomp (mode of this process), None where there is none. Never raises."""
    found: dict[str, Any] = {
        "kernel": platform.release(),
        "liburing": _liburing(),
        "built": _built(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "sysctl": _number("/proc/sys/kernel/io_uring_disabled", r"(\d+)"),
        "seccomp": _number("/proc/self/status", r"Seccomp:\s*(\d+)"),
        "io_uring": False,
        "why": "",
    }
    try:
        import cffi

        ffi = cffi.FFI()
        ffi.cdef(_CDEF)
        libc = ffi.dlopen(None)
        _ask_kernel(ffi, libc, found)
    except (ImportError, OSError, AttributeError) as error:
        found["why"] = f"cannot ask: {error}"
    return found


def explain(code: int, *, sysctl: int | None, seccomp: int | None) -> str:
    """Why io_uring_setup gave this errno."""
    text = os.strerror(code)
    if code == errno.EPERM and sysctl:
        return f"{text}: sysctl kernel.io_uring_disabled is {sysctl}"
    if code in (errno.EPERM, errno.ENOSYS, errno.EACCES) and seccomp:
        return f"{text}: forbidden by seccomp (containers do that; docker: --security-opt seccomp=unconfined)"
    if code == errno.ENOSYS:
        return f"{text}: this kernel has no io_uring (Linux 5.1 and later have)"
    if code == errno.ENOMEM:
        return f"{text}: RLIMIT_MEMLOCK is too small (ulimit -l)"
    return text


def _ask_kernel(ffi: Any, libc: Any, found: dict[str, Any]) -> None:
    fd, features = _setup(ffi, libc, 0)
    if fd < 0:
        found["why"] = explain(-fd, sysctl=found["sysctl"], seccomp=found["seccomp"])
        return
    try:
        found["io_uring"] = True
        found["features"] = [name for bit, name in enumerate(_FEATURES) if features >> bit & 1]
        table = ffi.new("struct probe *")
        if libc.syscall(_REGISTER, ffi.cast("int", fd), ffi.cast("unsigned", _REGISTER_PROBE), table, ffi.cast("unsigned", 256)) == 0:
            found["opcodes"] = [name for name, op in _OPCODES.items() if op <= table.last_op and table.ops[op].flags & _SUPPORTED]
        found["registered_buffers"] = _pin(ffi, libc, fd)
    finally:
        libc.close(fd)
    found["setup_flags"] = []
    for name, flag in _FLAGS.items():
        fd, _ = _setup(ffi, libc, flag)
        if fd >= 0:
            libc.close(fd)
            found["setup_flags"].append(name)


def _setup(ffi: Any, libc: Any, flags: int) -> tuple[int, int]:
    """(descriptor or -errno, features)"""
    params = ffi.new("struct params *")
    params.flags = flags
    params.cq_entries = 16
    fd = libc.syscall(_SETUP, ffi.cast("unsigned", 4), params)
    return (fd if fd >= 0 else -ffi.errno), params.features


def _pin(ffi: Any, libc: Any, fd: int, nbytes: int = 16 << 20) -> bool | str:
    memory = ffi.new("char[]", nbytes)
    ranges = ffi.new("struct range *", {"base": memory, "length": nbytes})
    if libc.syscall(_REGISTER, ffi.cast("int", fd), ffi.cast("unsigned", _REGISTER_BUFFERS), ranges, ffi.cast("unsigned", 1)) == 0:
        return True
    return explain(ffi.errno, sysctl=None, seccomp=None)


def _built() -> str:
    try:
        from zinf import _aio
    except ImportError as error:
        return f"no: {error}"
    return "with liburing" if _aio.have_liburing else "without liburing: only the threads backend"


def _liburing() -> str | None:
    """Version of the shared library that the loader finds; the engine may have it linked in statically and not need it."""
    import ctypes.util

    name = ctypes.util.find_library("uring")
    if name is None:
        return None
    for folder in ("/usr/lib", "/lib", "/usr/local/lib", "/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu"):
        path = Path(folder) / name
        if path.exists():
            version = re.search(r"\.so\.([\d.]+)$", path.resolve().name)
            return version.group(1) if version else name
    return name


def _number(path: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return int(found.group(1)) if found else None
