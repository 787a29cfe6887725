"""Runs parts of tiny trainings in fresh processes, for tests/test_resume.py: torch is imported once, each part is a fork.

stdin: a JSON line for each part: {"case": ..., "folder": ..., "until": steps or null, "resume": ..., "kill": ...}
stdout: a line with the exit code. The part leaves FOLDER/OUT.json (losses and learning rates by step) and FOLDER/OUT.pt (bits).
"""

import json
import os
import random
import sys
import traceback

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

import numpy  # noqa: E402
import torch  # noqa: E402
from oracle import engine_snapshot  # noqa: E402
from torch import nn  # noqa: E402

from zinf import saves  # noqa: E402
from zinf.data import Loader, Rows, Tokens  # noqa: E402
from zinf.engine import Engine  # noqa: E402
from zinf.loader import ResumableLoader  # noqa: E402

WIDTH, STEPS, VOCAB = 32, 7, 64


def model(case: dict) -> nn.Module:
    torch.manual_seed(0)
    drop = case.get("dropout", 0.0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    net = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, VOCAB))
    if case.get("frozen"):
        net[1].requires_grad_(False)
    net = net.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.get("dtype", "bf16")])
    return with_adapters(net) if case.get("lora") else net


def with_adapters(net: nn.Module) -> nn.Module:
    """LoRA on the linear layers, with dropout of its own; the base is frozen, and the norm trained as a whole."""
    import peft

    options = dict(r=2, target_modules=["1.0", "1.3", "2.0", "2.3"], modules_to_save=["4"], lora_dropout=0.2, init_lora_weights=False)
    return peft.get_peft_model(net, peft.LoraConfig(**options)).train()


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 22  # not a multiple of the batch

    def __getitem__(self, i):
        return torch.randint(0, VOCAB, (6,), generator=torch.Generator().manual_seed(i))


def batches(case: dict):
    """The loader of a case, endless."""
    if case.get("data") == "packed":
        ids = numpy.random.Generator(numpy.random.PCG64(3)).integers(0, VOCAB, 150).astype(numpy.int32)
        tokens = Tokens(ids, numpy.ones(150, bool), numpy.array([40, 90, 150]), None, "x")
        loader = Loader(Rows(tokens, 6), 4, seed=1)
        return loader, iter(lambda: loader.next_batch()["input_ids"], None)
    loader = ResumableLoader(Words(), 4, shuffle=True, seed=5, num_workers=case.get("workers", 0))

    def endless():
        while True:
            yield from loader

    return loader, endless()


def loss_of(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    out = engine(ids.reshape(-1))
    noise = torch.rand(()) + random.random() + float(numpy.random.rand())  # the numbers depend on every generator
    return torch.nn.functional.cross_entropy(out.float(), ids.reshape(-1).roll(-1)) * (1 + 0.1 * noise)


class Average:
    """An EMA of the losses, moved after the step."""

    def __init__(self):
        self.value = torch.zeros(2)

    def update(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * torch.tensor([loss, 1.0])

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def run(part: dict) -> None:
    torch.set_num_threads(1)
    case, folder = part["case"], part["folder"]
    random.seed(1)
    numpy.random.seed(1)
    net = model(case)
    torch.manual_seed(2 if not part["resume"] else 99)
    drives = part.get("drives") or [os.path.join(folder, f"drive{i}") for i in range(case.get("paths", 1))]
    for drive in drives:
        os.makedirs(drive, exist_ok=True)
    options = {"chunk_size": 2048, "leaf_bytes": 1024, "cpu_threads": 1, "lr": 1e-2, "weights": "nvme", "state": "nvme", **case.get("engine", {})}
    accumulation = options.get("gradient_accumulation_steps", 1)
    with Engine(net, nvme_path=drives, resume=part["resume"] in ("store", "store, then checkpoint"), **options) as engine:
        seen = follow(engine, part, accumulation)
        with open(os.path.join(folder, f"{part['out']}.json"), "w") as f:
            json.dump(seen, f)
        if part["kill"]:
            os._exit(9)  # no close, no commit
        torch.save((engine_snapshot(engine), [b.clone() for b in engine.module.buffers()]), os.path.join(folder, f"{part['out']}.pt"))


def follow(engine: Engine, part: dict, accumulation: int) -> dict:
    """The training loop, as a user would write it; (loss..., lr, average) of each step that was made."""
    case, folder, seen = part["case"], part["folder"], {}
    average = engine.register("average", Average(), late=True)
    loader, data = batches(case)
    engine.register("data", loader)
    scheduler = None
    if case.get("schedule") == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=STEPS)
    elif case.get("schedule") == "lambda":
        warm = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda n: (n + 1) / 3)
        fall = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1, 3])
        scheduler = torch.optim.lr_scheduler.SequentialLR(engine.optimizer, [warm, fall], [3])
    if scheduler is not None:
        engine.register("scheduler", scheduler)
    if part["resume"] == "store, then checkpoint":  # killed when all records are loaded, and not committed
        saves._take_over = lambda *args: os._exit(9)
    if "checkpoint" in (part["resume"] or ""):
        engine.load_checkpoint(os.path.join(folder, "saved"))
    elif part["resume"]:
        engine.restore_rng()
    while engine.global_step < STEPS:
        step = engine.global_step
        if case.get("by_hand") and step == 2:
            engine.optimizer.param_groups[0]["lr"] *= 0.5  # and it stays so
        losses = []
        for _ in range(accumulation):
            loss = loss_of(engine, next(data)) / accumulation
            engine.backward(loss)
            losses.append(loss.item())
        lr = engine.optimizer.param_groups[0]["lr"]
        engine.step()
        if scheduler is not None:
            scheduler.step()
        average.update(sum(losses))
        seen[str(engine.global_step)] = [losses, lr, average.value.tolist()]
        if case.get("evaluate") and engine.global_step % case["evaluate"] == 0:
            engine.eval()
            with torch.no_grad():
                seen[str(engine.global_step)].append(loss_of(engine, torch.arange(12).view(2, 6)).item())
            engine.train()
            engine.commit()  # the evaluation has drawn random numbers, and a resumed loop does not repeat it
        if engine.global_step == part["until"]:
            if part["save"]:
                engine.save_checkpoint(os.path.join(folder, "saved"), wait=part["save"] != "beside")
            break
    return seen


def main() -> None:
    for line in sys.stdin:
        part = json.loads(line)
        if part["case"].get("lora"):
            import peft  # noqa: F401   here, as torch: once
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(part)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
