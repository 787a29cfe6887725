"""What only a card can show. bench/gpu.py does the same at the size of real models, and measures."""

from __future__ import annotations

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, llama, train

from zinf.engine import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no card here")
NVME = dict(weights="nvme", state="nvme", chunk_size=4096)
PLACEMENTS = {"host": dict(weights="host", state="host"), "nvme": NVME, "activations": dict(NVME, activations="host")}


def run(folder, steps=4, **options):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with Engine(llama(), device="cuda", nvme_path=str(folder), leaf_bytes=LEAF_BYTES, max_grad_norm=1.0, **HYPER, **options) as engine:
            return train(engine, steps), engine.state_dict()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_gives_the_same_bits(tmp_path, placement, debug):
    want, weights = run(tmp_path / "a", **PLACEMENTS["host"])
    got, others = run(tmp_path / "b", debug=debug, **PLACEMENTS[placement])
    assert got == want
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_first_loss_and_gradients_are_those_of_torch_on_the_card(tmp_path):
    model = llama().cuda()
    batch = batches(1)[0].cuda()
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    with Engine(llama(), device="cuda", leaf_bytes=LEAF_BYTES, **HYPER) as engine:
        assert engine(input_ids=batch, labels=batch).loss.item() == loss.item()


def test_a_dropout_is_recomputed_with_the_numbers_of_its_forward(tmp_path):
    """A recompute with other numbers would give other gradients than no recompute."""

    def norms(**options):
        torch.manual_seed(7)
        with Engine(llama(attention_dropout=0.3), device="cuda", leaf_bytes=LEAF_BYTES, max_grad_norm=1.0, **HYPER, **options) as engine:
            return train(engine, 2)

    again, kept = norms(), norms(recompute=False)
    assert again[0] == kept[0] and again[1] == pytest.approx(kept[1], rel=1e-3)  # sums of another order in the backward of attention


def test_a_steady_state_allocates_nothing(tmp_path):
    with Engine(llama(), device="cuda", nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, max_grad_norm=1.0, **HYPER, **NVME) as engine:
        train(engine, 3)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        train(engine, 3)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
    for key in ("segment.all.allocated", "reserved_bytes.all.peak", "num_alloc_retries"):
        assert after[key] == before[key], key


def test_no_synchronization_in_a_step(tmp_path):
    with Engine(llama(), device="cuda", nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, max_grad_norm=1.0, **HYPER, **NVME) as engine:
        batch = batches(1)[0].cuda()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
