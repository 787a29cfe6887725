"""Where tests keep stores: `tmp_path` on the disk of the checkout, since /tmp may be memory, where there is no O_DIRECT.

pytest --sim SEED    every engine whose device the test leaves open gets the sim device, with copies and I/O delayed at random, and
                     debug mode: poisoned buffers, owners checked. tests/soak.py runs the parity tests so, seed after seed.
"""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["ZINF_MEASURED"] = "/nonexistent/machine.json"  # what this machine was measured to do is nothing that a test may depend on
sys.path.insert(0, str(Path(__file__).parent))


# HYPOTHESIS_PROFILE=long looks for an hour where CI looks for seconds, and elsewhere each time.
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption("--sim", type=int, metavar="SEED", help="every engine on the sim device with random delays of this seed")


@pytest.fixture(autouse=True, scope="session")
def _two_threads():
    """As many threads as a small machine has: bits of matmul may depend on it, so the oracle and the engine share it.

    With `pytest -n 2` each of the workers has one.
    """
    import torch

    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="module")
def one_thread():
    """For tiny matrices: threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _sim(request, monkeypatch):
    """With --sim: delays drawn for each engine, from the seed and the name of the test."""
    seed = request.config.getoption("--sim")
    if seed is None:
        return
    if getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("device") == "cpu":
        pytest.skip("has a twin on sim")
    from zinf import memory
    from zinf.aio.faults import FaultyEngine, Rule
    from zinf.tiers.device import CpuDevice, SimDevice

    draw = random.Random(f"{seed} {request.node.nodeid}")

    def open_device(name, io=None, **_):
        if name == "cpu":  # the test asks for it by name
            return CpuDevice(io)
        return SimDevice(draw.randrange(1 << 30), delay=draw.choice([0, 1e-4, 1e-3, 5e-3]))

    open_engine = memory.open_engine

    def open_slow(backend="auto", **options):
        if backend.startswith("faults:") or os.environ.get("ZINF_IO_BACKEND", "").startswith("faults:"):
            return open_engine(backend, **options)
        return FaultyEngine(open_engine(backend, **options), [Rule("rw", probability=0.2, seed=draw.randrange(1 << 30), delay_ms=draw.choice([1, 3]))])

    monkeypatch.setattr(memory, "open_device", open_device)
    monkeypatch.setattr(memory, "open_engine", open_slow)
