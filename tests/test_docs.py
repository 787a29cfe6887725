"""The documentation is true: every Python snippet of every page runs, at toy size; every run's file is read; generated pages are the code's.

A snippet runs as a script in an empty folder, in this process. `/mnt/nvme` is a folder there, and a hub id a tiny model (STANDINS). What earlier
snippets of its page have imported or defined (modules, classes, functions) it has too; what else it uses without making it is one of PREPARED.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib.util
import inspect
import json
import re
import runpy
import shutil
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from models import batches, llama
from tiny_tokenizer import tiny_tokenizer

import zinf
from zinf.train import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in `language`; those in a tab are indented."""
    return [textwrap.dedent(code) for code in re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.S | re.M)]


SNIPPETS = {page: fenced(page, "python") for page in PAGES}
RUNS = [(page, text) for page in PAGES for text in fenced(page, "yaml")]
BUDGETS = {"48GiB": "1GiB", "20GiB": "1GiB", "64GiB": "1GiB", "16GiB": "1GiB"}
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=300, head_dim=16)

pytestmark = pytest.mark.usefixtures("one_thread")


def dense(folder: str) -> None:
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, eos_token_id=1)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def experts(folder: str) -> None:
    config = transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def vision(folder: str) -> None:
    config = transformers.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
    transformers.ViTForImageClassification(config).save_pretrained(folder)


STANDINS: dict[str, Callable[[str], None]] = {"Qwen/Qwen3-8B": dense, "Qwen/Qwen3-30B-A3B": experts, "google/vit-base-patch16-224": vision}


# ------------------------------------------------------------------------------------------- what snippets take for granted


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids % 300, "labels": ids % 300} for ids in batches(1)[0]]


def loader() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids % 300, "labels": ids % 300} for ids in batches(2)]


def arguments() -> Any:
    return transformers.TrainingArguments("out", max_steps=1, per_device_train_batch_size=2, learning_rate=1e-4, report_to=[], use_cpu=True)


def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.pad_token = "</s>"
    return made


PREPARED: dict[str, Callable[[], Any]] = {
    "zinf": lambda: zinf,
    "torch": lambda: torch,
    "transformers": lambda: transformers,
    "model": lambda: llama(num_hidden_layers=1),
    "dataset": rows,
    "loader": loader,
    "batches": loader,
    "batch": lambda: loader()[0],
    "args": arguments,
    "tokenizer": tokenizer,
    "TrainingArguments": lambda: lambda out, **more: transformers.TrainingArguments(out, **{"max_steps": 1, "report_to": [], "use_cpu": True, **more}),
    "images": lambda: [{"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}],
    "preferences": lambda: preferences(),
    "wait_until_repaired": lambda: lambda: None,
}


def preferences() -> Any:
    import datasets

    return datasets.Dataset.from_list([{"prompt": "the cat ", "chosen": "sat on the mat", "rejected": "and the dog"}] * 4)


def engine(names: dict[str, Any]) -> Any:
    """An engine over `model`, for the snippets that show one of its calls; where they step, a backward is done."""
    model = names.setdefault("model", llama(num_hidden_layers=1))
    made = zinf.Engine(model, nvme_path="nvme", run_name="prepared")
    made.backward(made(**loader()[0]).loss)
    return made


def from_deepspeed() -> dict[str, Any]:
    """What docs/from-deepspeed.md and docs/trainer.md speak of: configs, a checkpoint that DeepSpeed wrote, its model."""
    from ds_data.make_checkpoints import Tiny
    from test_ds_checkpoints import CONFIG, groups

    nvme = {"device": "nvme", "nvme_path": "nvme"}
    fixed = {
        "train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    }  # fmt: skip
    auto = {
        "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    }  # fmt: skip
    Path("ds_config.json").write_text(json.dumps(fixed))
    Path("auto.json").write_text(json.dumps(auto))
    if not Path("llama").exists():
        llama(num_hidden_layers=1).save_pretrained("llama")
        shutil.copytree(ROOT / "tests" / "ds_data" / "checkpoints" / "z3r2", "deepspeed_checkpoint")
    torch.manual_seed(0)
    tiny = Tiny()
    return {"tiny": tiny, "groups": groups(tiny), "tiny_config": CONFIG}


# --------------------------------------------------------------------------------------------------------------- running


def free_names(source: str) -> set[str]:
    """Names that `source` reads and never makes."""
    nodes = list(ast.walk(ast.parse(source)))
    made = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    made |= {(a.asname or a.name).split(".")[0] for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    made |= {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)} | {a.arg for n in nodes if isinstance(n, ast.arguments) for a in n.args}
    reads = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    rebinds = {t.id for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name) and reads_itself(n, t.id)}
    return (reads - made - set(dir(builtins))) | (rebinds & reads)


def reads_itself(assign: ast.Assign, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(assign.value))


def at_toy_size(source: str) -> str:
    for name in STANDINS:
        source = source.replace(name, name.replace("/", "--"))
    for much, little in BUDGETS.items():
        source = source.replace(f'"{much}"', f'"{little}"')
    source = source.replace("report_to=[])", "report_to=[], use_cpu=True)")  # TRL asks for bf16, and so for a card
    return source.replace("/mnt/nvme", "nvme")


def run(page: Path, source: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Runs `source`; what it made that a later snippet may use. Engines and trainers that it left open are closed."""
    shutil.rmtree("nvme", ignore_errors=True)
    Path("nvme").mkdir()
    names = dict(kept)
    if "deepspeed" in page.read_text():
        names |= from_deepspeed()
        if page.name == "trainer.md":
            shutil.copy("auto.json", "ds_config.json")
    wanted = free_names(source) - set(names)
    for name in wanted & set(PREPARED):
        names[name] = PREPARED[name]()
    if "engine" in wanted:
        names["engine"] = engine(names)
    unknown = wanted - set(names)
    assert not unknown, f"{page.name} uses {', '.join(sorted(unknown))} without saying what it is:\n{source}"
    Path("snippet.py").write_text(at_toy_size(source))
    result = runpy.run_path("snippet.py", init_globals=names)
    for value in list(result.values()):
        if type(value).__name__ in ("Engine", "DeepSpeedEngine") or isinstance(value, transformers.Trainer):
            value.close() if hasattr(value, "close") else value.destroy()
    return {k: v for k, v in result.items() if isinstance(v, types.ModuleType | type | types.FunctionType) and not k.startswith("__")}


@pytest.mark.parametrize("page", [p for p in PAGES if SNIPPETS[p]], ids=lambda p: p.name)
def test_every_snippet_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    for name, make in STANDINS.items():
        if name in text:
            torch.manual_seed(0)
            make(name.replace("/", "--"))
    kept: dict[str, Any] = {}
    for source in SNIPPETS[page]:
        kept |= run(page, source, kept)
        gc.collect()


def test_pages_have_snippets() -> None:
    """The pattern finds them; and Python that is indented instead of fenced would not be run."""
    assert sum(map(len, SNIPPETS.values())) > 20
    for page in PAGES:
        indented = re.findall(r"^    (?:import |from \w+ import|engine\b|model = |trainer = ).*", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
        assert not indented, f"{page.name}: {indented}"


@pytest.mark.parametrize("page, text", RUNS, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(RUNS)])
def test_every_run_file_is_read(page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    assert set(yaml.safe_load(text)) >= {"model", "data"}
    TrainConfig.load("run.yaml")


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_words_of_errors_are_the_librarys() -> None:
    """docs/troubleshooting.md quotes errors: each quotation that is a sentence stands in the code, with a value for each {}."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = " ".join(re.sub(r'"\n\s*f?"', "", p.read_text()) for p in (ROOT / "zinf").rglob("*.py"))
    source = re.sub(r"\{[^{}]*\}", "{}", source)
    quoted = re.findall(r"^\| (`.*?) \|", page, re.M)
    assert len(quoted) > 20
    for words in (w for line in quoted for w in re.findall(r"`([^`]+)`", line)):
        assert words.replace("'uring'", "{}") in source, f"no error says: {words}"


# ------------------------------------------------------------------------------------------------------- generated pages


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / "tools" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_is_the_dataclasses() -> None:
    assert generator().configuration() == (ROOT / "docs" / "configuration.md").read_text(), "run tools/docs.py"


def test_hardware_is_what_zinf_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each shape, and a plan in full: the page takes 15 seconds as a whole (tools/docs.py --check)."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    page, made = (ROOT / "docs" / "hardware.md").read_text(), generator()
    for shape, machine in zip(made.SHAPES, made.MACHINES[1:], strict=False):
        assert made.row(shape, machine) in page, "run tools/docs.py"
    assert made.plan("qwen3-8b", "rtx4090") in page, "run tools/docs.py"


def test_every_option_is_explained() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"| `{name}` |" in page for name in inspect.signature(zinf.Config).parameters)
