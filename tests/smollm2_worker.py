"""A fresh process that goes on from a store of SmolLM2: what tests/test_smollm2.py starts. Prints the step it found and the next loss, exactly.

python smollm2_worker.py MODEL STORE IDS(json) OPTIONS(json)
"""

import json
import os
import sys

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

import torch  # noqa: E402

from zinf.engine import Engine  # noqa: E402
from zinf.hf.loading import from_pretrained  # noqa: E402


def main(model: str, store: str, ids: list[list[int]], options: dict) -> None:
    torch.set_num_threads(2)
    with Engine(from_pretrained(model, nvme_path=store, resume=True), **options) as engine:
        batch = torch.tensor(ids)
        loss = engine.train()(input_ids=batch, labels=batch).loss
        print(json.dumps({"step": engine.global_step, "extra": engine.extra, "loss": loss.item().hex()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4]))
