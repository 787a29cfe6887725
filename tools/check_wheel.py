"""What an installed wheel must be able to do without a compiler, liburing or torch: import its native halves, with io_uring compiled in."""

from __future__ import annotations

import subprocess
from importlib.metadata import distribution
from importlib.resources import files

import zinf
from zinf import _aio, _ops

needs = "".join(subprocess.run(["ldd", module.__file__], capture_output=True, text=True, check=True).stdout for module in (_aio, _ops))
assert "liburing" not in needs, f"liburing is not linked in: {needs}"
assert _aio.have_liburing, "built without liburing"
assert files("zinf").joinpath("py.typed").is_file() and files("zinf").joinpath("planner/machines/rtx4090.yaml").is_file()
assert any(str(f).endswith("smollm2.yaml") for f in distribution("zinf").files or []), "the demo's file is missing"
print(f"zinf {zinf.__version__}: {_aio.__file__}, {_ops.__file__}")
