"""Promise: what zinf loads is what transformers' from_pretrained loads, bit for bit, and what it saves transformers loads again."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import transformers as hf
from test_checkpoint import Chunks, same
from torch import nn

from zinf import checkpoint, ops
from zinf.aio import open_engine
from zinf.chunks import DTYPES
from zinf.discover import discover, layout_of
from zinf.errors import CheckpointError, ConfigError, StoreError
from zinf.hf import loading
from zinf.tiers.nvme import Store

hf.utils.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()

LLAMA = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300, pad_token_id=0)
BERT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
GPT = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=300, n_positions=64, bos_token_id=1, eos_token_id=2)
BART = dict(d_model=64, vocab_size=300)
for side in ("encoder", "decoder"):
    BART.update({f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 96})
DEEPSEEK = dict(moe_intermediate_size=32, n_routed_experts=12, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1)
HEADS = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
LM, MLM, S2S = hf.AutoModelForCausalLM, hf.AutoModelForMaskedLM, hf.AutoModelForSeq2SeqLM

CASES = {
    "llama": (LM, hf.LlamaConfig(**LLAMA)),
    "llama-tied": (LM, hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2": (LM, hf.GPT2Config(**GPT)),
    "gptj": (LM, hf.GPTJConfig(**GPT, rotary_dim=16)),  # buffers that depend on the default dtype
    "gemma3": (LM, hf.Gemma3TextConfig(**LLAMA, head_dim=16)),
    "bert": (MLM, hf.BertConfig(**BERT)),
    "gpt-neox": (LM, hf.GPTNeoXConfig(**BERT)),  # another name in the files
    "vit": (hf.AutoModelForImageClassification, hf.ViTConfig(**{k: v for k, v in BERT.items() if k != "vocab_size"}, image_size=32, patch_size=8)),
    "t5": (S2S, hf.T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=300)),  # one table under four names, fp32 parts in fp16
    "bart": (S2S, hf.BartConfig(**BART)),  # a persistent buffer
    "mixtral": (LM, hf.MixtralConfig(**LLAMA, num_local_experts=12)),  # stacked experts; 10 comes after 9
    "deepseek-v3": (LM, hf.DeepseekV3Config(**LLAMA, **DEEPSEEK, **HEADS)),  # fp32 parameters and buffers in a bf16 model
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options) -> Path:
    """A random model of CASES, saved by transformers."""
    auto, config = CASES[name]
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=dtype)
    for buffer in loading.persistent_buffers(model).values():
        if buffer.is_floating_point():
            buffer.normal_()
    model.save_pretrained(folder, **options)
    return folder


def stream(folder: Path, auto, dtype: torch.dtype, chunk: int = 4096, **options):
    """(the model on meta, a store in a dict with its weights, the names)"""
    model = loading.build_on_meta(folder, auto_class=auto, dtype=dtype)
    source, names = loading.open_source(model, str(folder), **options)
    chunks = Chunks(layout_of(discover(model, leaf_bytes=4096), chunk))
    with source:
        loading.load_buffers(model, source, names)
        checkpoint.import_tensors(chunks.model, source, chunks.write)
    return model, chunks, names


def masters(chunks: Chunks) -> dict[str, torch.Tensor]:
    """The fp32 value of every parameter, from the records."""
    out = {}
    for s, shard in enumerate(chunks.model.shards):
        for r, run in enumerate(shard.runs):
            flat = torch.empty(run.padded)
            if run.trainable and run.dtype == "bf16":
                ops.join(chunks.run(s, r), chunks.run(s, r, "state", 0), flat)
            elif run.trainable and run.dtype == "fp16":
                flat.copy_(chunks.run(s, r, "state", 0))
            else:
                flat.copy_(chunks.run(s, r))
            out.update((p.name, flat[p.offset : p.offset + p.numel].view(p.shape)) for p in run.params)
    return out


def sharing(model: nn.Module) -> list[list[str]]:
    """The names of parameters that are one."""
    groups: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), []).append(name)
    return sorted(groups.values())


def export(model: nn.Module, chunks: Chunks, names, out: Path, **options) -> None:
    buffers = {names.buffers.get(n, n): b for n, b in loading.persistent_buffers(model).items()}
    checkpoint.export_safetensors(out, chunks.model, chunks.read, names=names.save, buffers=buffers, **options)
    loading.save_extras(model, out)


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in CASES for d in ("bf16", "fp32")] + [(n, "fp16") for n in ("llama-tied", "t5", "deepseek-v3")])
def test_same_as_transformers(tmp_path, name, dtype):
    auto, _ = CASES[name]
    folder = save(name, tmp_path / "in")
    theirs = auto.from_pretrained(folder, dtype=DTYPES[dtype])
    exact = auto.from_pretrained(folder, dtype=torch.float32).state_dict()
    model, chunks, names = stream(folder, auto, DTYPES[dtype])

    assert type(model) is type(theirs) and not model.training and sharing(model) == sharing(theirs)
    buffers = dict(theirs.named_buffers())
    assert [n for n, _ in model.named_buffers()] == list(buffers)
    for n, b in model.named_buffers():
        assert same(b, buffers[n]), n
    for (n, p), (m, q) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        assert n == m and p.is_meta and (p.dtype, p.shape, p.requires_grad) == (q.dtype, q.shape, q.requires_grad), n
        ours, value = chunks.param(n), q.detach()
        if dtype == "bf16" and p.dtype == torch.bfloat16:  # hi rounds exact ties away from zero; torch rounds them to even
            value = torch.empty_like(value)
            ops.split(exact[n].reshape(-1), value.view(-1), torch.empty(value.numel(), dtype=torch.int16))
        assert same(ours, value), n
    for n, value in masters(chunks).items():
        assert same(value, exact[n]), n

    export(model, chunks, names, tmp_path / "out", dtype="fp32")
    again = auto.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for n, value in again.state_dict().items():
        assert same(value, exact[n] if n not in buffers else buffers[n].float()), n
    if dtype == "fp32":
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "bert", "mixtral"])
def test_bf16_to_bf16_in_many_files(tmp_path, name):
    auto, _ = CASES[name]
    folder = save(name, tmp_path / "in", torch.bfloat16, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    theirs = auto.from_pretrained(folder, dtype=torch.bfloat16)
    model, chunks, names = stream(folder, auto, torch.bfloat16)
    assert not any(key[0] == "state" for key in chunks.data)
    for n, p in theirs.named_parameters():
        assert same(chunks.param(n), p.detach()), n
    export(model, chunks, names, tmp_path / "out", max_shard_size=30_000)
    if name != "mixtral":  # whose experts transformers spreads over the files in another order
        files = {p.name for p in folder.iterdir()}
        assert files == {p.name for p in (tmp_path / "out").iterdir()}
        for file in files:
            assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes(), file
    again = auto.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    for n, value in again.state_dict().items():
        assert same(value, theirs.state_dict()[n]), n


def test_checkpoint_without_the_prefix(tmp_path):
    """A base model's checkpoint in a model with a head on top, and back under the head's names."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    hf.LlamaModel(config).save_pretrained(tmp_path / "in")
    theirs = hf.LlamaForCausalLM.from_pretrained(tmp_path / "in")
    model, chunks, names = stream(tmp_path / "in", hf.LlamaForCausalLM, torch.float32)
    for n, p in theirs.named_parameters():
        assert same(chunks.param(n), p.detach()), n
    export(model, chunks, names, tmp_path / "out")
    theirs.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "theirs" / "model.safetensors").read_bytes()


def test_head_dropped_only_when_asked(tmp_path):
    """A model with a head loaded as its base: the head's weights are not silently lost."""
    folder = save("bert", tmp_path)
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.bias is in the checkpoint and not in the model") as e:
        stream(folder, hf.AutoModel, torch.float32)
    assert "pooler.dense.weight is missing" in str(e.value)
    theirs = hf.BertForMaskedLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"in 2 places: pooler\.dense\.weight is missing; pooler\.dense\.bias is missing$"):
        stream(folder, hf.AutoModel, torch.float32, ignore_unexpected=True)
    theirs.save_pretrained(folder)


def tie_file(folder: Path, change: float) -> None:
    """Write lm_head.weight beside the embedding it is tied to, as older checkpoints do."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tied_weights_that_are_in_the_file_twice(tmp_path):
    folder = save("llama-tied", tmp_path / "in")
    tie_file(folder, 0.0)
    _, chunks, names = stream(folder, LM, torch.float32)
    assert names.copies and same(chunks.param("model.embed_tokens.weight"), LM.from_pretrained(folder).lm_head.weight.detach())
    tie_file(folder, 1.0)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differ.*tie_word_embeddings=False"):
        stream(folder, LM, torch.float32)
    model = loading.build_on_meta(folder, tie_word_embeddings=False)
    source, names = loading.open_source(model, str(folder))
    source.close()
    assert not names.copies and "lm_head.weight" in names.load


def test_tied_weights_under_the_other_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save("llama-tied", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    expected = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": expected}, folder / "model.safetensors", metadata={"format": "pt"})
    _, chunks, _ = stream(folder, LM, torch.float32)
    assert same(chunks.param("model.embed_tokens.weight"), expected)


def test_old_buffers_in_files_are_ignored(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stream(folder, LM, torch.float32)


def test_conversions_that_change_values_are_refused_by_name(tmp_path):
    from transformers.core_model_loading import Transpose, WeightConverter

    from zinf.hf.names import _Group

    group = _Group(WeightConverter("a.w", "b.w", [Transpose(0, 1)]), "x.b.w", {"a.w": [("x.a.w", "x.a.w")]})
    with pytest.raises(CheckpointError, match=r"Arch: x\.b\.w is made from 1 tensors of the checkpoint \(x\.a\.w\) by Transpose"):
        list(group.parts("Arch", {"x.a.w": (2, 3)}))


# ---- building


def test_parameters_on_meta_keeps_sharing_and_threads_apart():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.a, self.b = nn.Module(), nn.Module()
            self.a.w, self.b.w = w, w
            self.register_buffer("real", torch.arange(3))

    register = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="stop"), loading.parameters_on_meta():
        m = Shared()
        other: list[nn.Module] = []
        t = threading.Thread(target=lambda: other.append(nn.Linear(2, 2)))
        t.start()
        t.join()
        raise RuntimeError("stop")
    assert m.a.w is m.b.w and m.a.w.is_meta and not m.a.w.requires_grad and m.real.tolist() == [0, 1, 2]
    assert not other[0].weight.is_meta and nn.Module.register_parameter is register


def test_building_leaves_the_random_numbers_alone(tmp_path):
    folder = save("llama", tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loading.build_on_meta(folder)
    assert torch.equal(torch.rand(3), expected)


def test_config_and_generation_config(tmp_path):
    folder = save("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    model = loading.build_on_meta(folder, attn_implementation="eager", dtype=torch.float16, rms_norm_eps=0.5)
    assert model.config._attn_implementation == "eager" and model.config.rms_norm_eps == 0.5 and model.dtype == torch.float16
    assert model.generation_config.max_new_tokens == 7
    assert type(loading.build_on_meta(folder, auto_class=hf.LlamaForSequenceClassification)) is hf.LlamaForSequenceClassification
    with pytest.raises(ConfigError, match="LlamaConfig has no attribute rms_norm_epsilon"):
        loading.build_on_meta(folder, rms_norm_epsilon=0.5)


def test_what_cannot_be_built(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is not a folder, and not a hub id"):
        loading.build_on_meta("./no/such/folder")
    with pytest.raises(ConfigError, match=r"has no usable config\.json"):
        loading.build_on_meta(tmp_path)
    folder = save("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ConfigError, match=r"has quantized weights \(gptq\)"):
        loading.build_on_meta(folder)


def test_hub_without_a_network_is_one_line(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nand more\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError) as e:
        loading.from_pretrained("owner/model", nvme_path=tmp_path)
    assert str(e.value) == (
        "owner/model is not a folder here, and could not be downloaded from the hub: HF_HUB_OFFLINE is set: give a folder, or unset it "
        "(LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder)"
    )
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: asked.update(k) or str(tmp_path))
    assert loading.resolve("owner/model", revision="v1") == str(tmp_path)
    assert asked["revision"] == "v1" and not any(p.endswith((".bin", ".py")) or p == "*.safetensors" for p in asked["allow_patterns"])


# ---- the whole way


def read_all(paths, io) -> tuple[dict[str, torch.Tensor], Store]:
    store = Store.open(paths, io, verify="always")
    chunks = Chunks(store.model)
    for s, shard in enumerate(store.model.shards):
        for r, run in enumerate(shard.runs):
            for c in store.model.chunks(s, r):
                for kind, nbytes in (("weights", run.mode.weights_bytes), ("state", run.mode.state_bytes)):
                    if kind == "weights" or run.trainable:
                        t = checkpoint.staging.pages(c.length * nbytes)
                        store.read([((kind, s, r, c.index), t)])[0].wait()
                        chunks.data[kind, s, r, c.index] = t
    return masters(chunks), store


def test_from_pretrained(tmp_path):
    folder = save("llama-tied", tmp_path / "in")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md", "LICENSE", "pytorch_model.bin"):
        (folder / file).write_text(file)
    exact = LM.from_pretrained(folder, dtype=torch.float32).state_dict()
    seen: list[tuple[int, int]] = []
    for path in "abc":
        (tmp_path / path).mkdir()
    model = loading.from_pretrained(
        folder, nvme_path=[tmp_path / "a", tmp_path / "b"], run_name="r", chunk_size=4096, progress=lambda done, total: seen.append((done, total))
    )
    origin = model.zinf_origin
    assert sharing(model) == sharing(LM.from_pretrained(folder))
    for n, p in model.named_parameters():
        assert p.is_leaf and p.requires_grad and p.untyped_storage().nbytes() == p.element_size(), n
        p.data = torch.zeros(p.shape, dtype=p.dtype)  # as an engine does; meta would refuse
    assert origin.paths == (str(tmp_path / "a" / "r"), str(tmp_path / "b" / "r")) and origin.chunk_size == 4096 and seen[-1][0] == seen[-1][1]
    io = open_engine("auto")
    try:
        values, store = read_all(origin.paths, io)
        assert store.model == layout_of(discover(model), 4096) and store.step == 0 and store.extra["origin"]["source"] == str(folder)
        for n, value in values.items():
            assert same(value, exact[n]), n
        checkpoint.export_safetensors(tmp_path / "out", store.model, store.read, names=origin.names, buffers=origin.buffers_of(model), dtype="fp32")
        store.close()
    finally:
        io.close()
    model.config.bos_token_id = 17
    origin.save_extras(model, tmp_path / "out", dtype=torch.float32)
    assert LM.from_pretrained(tmp_path / "out").dtype == torch.float32, "the config says what the weights are"
    assert sorted(os.listdir(tmp_path / "out")) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 17
    with pytest.raises(StoreError, match="there is a store at"):
        loading.from_pretrained(folder, nvme_path=[tmp_path / "a", tmp_path / "b"], run_name="r")

    again = loading.from_pretrained(folder, nvme_path=[tmp_path / "a", tmp_path / "b"], run_name="r", resume=True, progress=lambda *_: pytest.fail("imported"))
    assert again.zinf_origin == origin, "the chunk size is the store's"
    with pytest.raises(StoreError, match="chunk_size 4096"):
        loading.from_pretrained(folder, nvme_path=[tmp_path / "a", tmp_path / "b"], run_name="r", resume=True, chunk_size=8192)
    with pytest.raises(StoreError, match="is of another model"):
        loading.from_pretrained(save("llama", tmp_path / "other"), nvme_path=[tmp_path / "a", tmp_path / "b"], run_name="r", resume=True)
    loading.from_pretrained(folder, nvme_path=[tmp_path / "a", tmp_path / "b"], run_name="r", overwrite=True, trainable=lambda n: "mlp" in n)
    assert loading.from_pretrained(folder, nvme_path=tmp_path / "c", resume=True).zinf_origin.paths == (str(tmp_path / "c" / "run"),)


def test_frozen_parameters_have_no_state(tmp_path):
    folder = save("llama", tmp_path / "in")
    model = loading.from_pretrained(folder, nvme_path=tmp_path, trainable=lambda n: "layers.1." in n)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n, _ in model.named_parameters() if "layers.1." in n}
    io = open_engine("auto")
    try:
        values, store = read_all(model.zinf_origin.paths, io)
        store.close()
    finally:
        io.close()
    exact = LM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for n, value in values.items():
        assert same(value, exact[n] if "layers.1." in n else exact[n].bfloat16().float()), n


def test_a_bad_checkpoint_makes_no_store(tmp_path):
    folder = save("llama", tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[300, 64\] there and \[301, 64\] in the model"):
        loading.from_pretrained(folder, nvme_path=tmp_path / "nvme", vocab_size=301)
    assert not (tmp_path / "nvme").exists()
