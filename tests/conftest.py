"""Where tests keep stores: `tmp_path` on the disk of the checkout, since /tmp may be memory, where there is no O_DIRECT."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _two_threads():
    """As many threads as a small machine has: bits of matmul may depend on it, so the oracle and the engine share it."""
    import torch

    torch.set_num_threads(2)
