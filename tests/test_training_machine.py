"""Options and actions at random, together, are the oracle's training bit for bit. `make combine MINUTES=10` goes on with other seeds."""

from __future__ import annotations

import pytest
import torch
import training_machine


@pytest.fixture(autouse=True)
def _one_thread():
    """Everything is tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a first step that is skipped
@pytest.mark.parametrize("seed", range(12))  # the even ones on the device cpu, the odd ones on sim
def test_a_random_training_is_the_oracles(tmp_path, monkeypatch, seed):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    training_machine.run_seed(seed, tmp_path)
