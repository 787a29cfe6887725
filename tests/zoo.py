"""Tiny models of every architecture that real models come in, and batches for them: each step has other data and other lengths.

One row is a builder and a loss. Comments name the hazard that a row is there for: what its forward does beyond calling its
children in the order of their registration.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCAB = 96
SHAPES = [(2, 16), (3, 11), (1, 20)]  # (rows, length) of each step


@dataclasses.dataclass(frozen=True)
class Row:
    """How to make a model (before seeding and casting) and the loss of a step."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, int], torch.Tensor]
    blocks: tuple[str, ...] | None = None
    dtype: torch.dtype | None = torch.bfloat16

    def build(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        random.seed(0)
        model = self.make()
        with torch.no_grad():
            for p in model.parameters():  # what begins as zeros has gradients of its own, and gives some to others
                p += 0.02 * torch.randn_like(p)
        return (model if self.dtype is None else model.to(self.dtype)).train()


def noise(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def tokens(step: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(3, vocab, SHAPES[step % len(SHAPES)], generator=noise(step))


def floats(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=noise(step)).to(torch.bfloat16)


# -- losses ---------------------------------------------------------------------------------------------------------------


def lm(model: Any, step: int) -> torch.Tensor:
    """Next-token loss with the right part of some rows masked, as batches are padded."""
    ids = tokens(step)
    mask = torch.ones_like(ids)
    mask[0, ids.shape[1] * 2 // 3 :] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss


def masked(model: Any, step: int) -> torch.Tensor:
    return model(input_ids=tokens(step), labels=tokens(step)).loss


def translated(model: Any, step: int) -> torch.Tensor:
    return model(input_ids=tokens(step), labels=tokens(step + 3), use_cache=False).loss


def heard(model: Any, step: int) -> torch.Tensor:
    rows = SHAPES[step % len(SHAPES)][0]
    return model(input_features=floats(step, rows, 8, 32), labels=tokens(step), use_cache=False).loss


def seen(model: Any, step: int) -> torch.Tensor:
    rows = SHAPES[step % len(SHAPES)][0]
    return model(pixel_values=floats(step, rows, 3, 16, 16), labels=torch.arange(rows) % 2).loss


def hidden(model: Any, step: int) -> torch.Tensor:
    return model(input_ids=tokens(step)).last_hidden_state.float().square().mean()


def output(model: Any, step: int) -> torch.Tensor:
    return model(floats(step, SHAPES[step % len(SHAPES)][0] * 4, 64)).float().square().mean()


# -- decoders ---------------------------------------------------------------------------------------------------------------

SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCAB, pad_token_id=0)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, output_router_logits=True, router_aux_loss_coef=0.5)


def causal(config: type, **options: Any) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForCausalLM.from_config(config(**{**SMALL, **options}), dtype=torch.float32)


def fp32_gates(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A bf16 model whose routers and their persistent correction stay fp32, as from_pretrained loads it."""

    def build() -> nn.Module:
        model = make().to(torch.bfloat16)
        gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
        assert gates
        for gate in gates:
            gate.to(torch.float32)
        return model

    return build


def mistral_windowed(model: Any, step: int) -> torch.Tensor:
    return model(input_ids=tokens(step), labels=tokens(step), use_cache=False).loss  # no mask given: a dense one is made, and shared


GPT2 = dict(n_embd=32, n_layer=3, n_head=2, vocab_size=VOCAB, n_positions=32)
DEEPSEEK = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=2,
    n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=1,
)  # fmt: skip
GEMMA3N = dict(
    head_dim=16, num_key_value_heads=1, num_hidden_layers=4, intermediate_size=[64] * 4, layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2, laurel_rank=8,
    altup_num_inputs=2, altup_coef_clip=120.0, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
)  # fmt: skip
HYBRID = dict(
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16, num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2, shared_expert_intermediate_size=32,
)  # fmt: skip
SSM = dict(hidden_size=32, num_hidden_layers=3, vocab_size=VOCAB, state_size=8, conv_kernel=3, expand=2)

ROWS: dict[str, Row] = {
    "llama": Row(causal(hf.LlamaConfig), lm),
    "llama tied": Row(causal(hf.LlamaConfig, tie_word_embeddings=True), lm),
    "qwen2": Row(causal(hf.Qwen2Config, tie_word_embeddings=True), lm),
    "qwen3": Row(causal(hf.Qwen3Config, head_dim=16), lm),
    "mistral, windowed": Row(causal(hf.MistralConfig, sliding_window=5), mistral_windowed),
    "gemma2": Row(causal(hf.Gemma2Config, head_dim=16, sliding_window=5), lm),  # two masks, by layer type
    "gemma3": Row(causal(hf.Gemma3TextConfig, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]), lm),
    "gemma3n": Row(causal(hf.Gemma3nTextConfig, **GEMMA3N), lm),  # altup is never called; K/V shared by layers
    "gpt2 with dropout": Row(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), lm),
    "gpt-neox": Row(causal(hf.GPTNeoXConfig), lm),
    "gpt-j": Row(lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT2, rotary_dim=8)), lm),
    "phi-3": Row(causal(hf.Phi3Config), lm),
    "phi": Row(causal(hf.PhiConfig, resid_pdrop=0.1), lm),  # calls its dropout twice
    "olmo2": Row(causal(hf.Olmo2Config), lm),
    "smollm3": Row(causal(hf.SmolLM3Config), lm),
    "stablelm": Row(causal(hf.StableLmConfig), lm),
    "starcoder2": Row(causal(hf.Starcoder2Config), lm),
    "cohere2": Row(causal(hf.Cohere2Config), lm),
    "bloom": Row(lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=3, n_head=2, vocab_size=VOCAB)), lm),  # a tuple of tensors
    "falcon": Row(causal(hf.FalconConfig), lm),  # x @ weight.T, and (h, None)
    "opt, layerdrop": Row(
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=4,
                num_attention_heads=2,
                vocab_size=VOCAB,
                word_embed_proj_dim=32,
                max_position_embeddings=32,
                layerdrop=0.5,
                pad_token_id=0,
            )
        ),
        lm,
    ),
    # experts: one parameter of three dimensions for all of them
    "mixtral": Row(causal(hf.MixtralConfig, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5), lm),
    "mixtral, eager experts": Row(causal(hf.MixtralConfig, num_local_experts=4, experts_implementation="eager"), lm),
    "qwen2-moe": Row(causal(hf.Qwen2MoeConfig, **MOE, shared_expert_intermediate_size=32), lm),
    "qwen3-moe": Row(causal(hf.Qwen3MoeConfig, **MOE, head_dim=16, mlp_only_layers=[1]), lm),
    "olmoe": Row(causal(hf.OlmoeConfig, num_experts=4, num_experts_per_tok=2, output_router_logits=True), lm),
    "deepseek-v3": Row(fp32_gates(causal(hf.DeepseekV3Config, **DEEPSEEK)), lm, dtype=None),  # a dense layer first; fp32 gates
    "glm4-moe": Row(
        fp32_gates(causal(hf.Glm4MoeConfig, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, head_dim=16)),
        lm,
        dtype=None,
    ),
    "gpt-oss": Row(
        causal(
            hf.GptOssConfig,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        lm,
    ),  # experts transposed, with biases; sinks
    "llama-4": Row(
        causal(hf.Llama4TextConfig, head_dim=16, num_local_experts=4, intermediate_size_mlp=64, interleave_moe_layer_step=2, num_hidden_layers=4), lm
    ),
    # states instead of attention: a convolution that is never called
    "qwen3-next": Row(causal(hf.Qwen3NextConfig, **{**MOE, **HYBRID}), lm),
    "mamba": Row(lambda: hf.MambaForCausalLM(hf.MambaConfig(**SSM)), lm),
    "mamba2": Row(lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**SSM, num_heads=4, head_dim=16, n_groups=1, chunk_size=8)), lm),
    "falcon-h1": Row(causal(hf.FalconH1Config, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8, mamba_n_groups=1), lm),
    # encoders, encoder-decoders, images, sound
    "t5": Row(
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, vocab_size=VOCAB, decoder_start_token_id=0)),
        translated,
    ),
    "switch": Row(
        lambda: hf.SwitchTransformersForConditionalGeneration(
            hf.SwitchTransformersConfig(
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                vocab_size=VOCAB,
                decoder_start_token_id=0,
                num_experts=4,
                expert_capacity=6,
                num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1,
            )
        ),
        translated,
    ),
    "bart, layerdrop": Row(
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(
                d_model=32,
                encoder_layers=3,
                decoder_layers=3,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                vocab_size=VOCAB,
                max_position_embeddings=32,
                encoder_layerdrop=0.4,
                decoder_layerdrop=0.4,
                pad_token_id=1,
                bos_token_id=0,
                eos_token_id=2,
                decoder_start_token_id=2,
                forced_eos_token_id=2,
            )
        ),
        translated,
    ),
    "whisper": Row(
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                vocab_size=VOCAB,
                num_mel_bins=8,
                max_source_positions=16,
                max_target_positions=32,
                encoder_layerdrop=0.3,
                decoder_layerdrop=0.3,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                suppress_tokens=None,
                begin_suppress_tokens=None,
            )
        ),
        heard,
    ),
    "bert": Row(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, max_position_embeddings=32)), masked
    ),
    "bert, unused pooler": Row(
        lambda: hf.BertModel(hf.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, max_position_embeddings=32)), hidden
    ),
    "albert": Row(
        lambda: hf.AlbertForMaskedLM(
            hf.AlbertConfig(
                hidden_size=32,
                embedding_size=16,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=2,
                vocab_size=VOCAB,
                max_position_embeddings=32,
            )
        ),
        masked,
    ),
    "modernbert": Row(
        lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=2,
                vocab_size=VOCAB,
                pad_token_id=0,
                global_attn_every_n_layers=2,
                local_attention=6,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
            )
        ),
        masked,
    ),
    "vit": Row(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8)
        ),
        seen,
    ),
}


# -- images with text -------------------------------------------------------------------------------------------------------

VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)


def llava() -> nn.Module:
    text = hf.LlamaConfig(**SMALL)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**VISION), text_config=text, image_token_id=2, vision_feature_layer=-1)
    )


def shown_and_told(model: Any, step: int) -> torch.Tensor:
    """Each row's image stands for its first four tokens."""
    ids = tokens(step)
    ids[:, :4] = 2
    return model(input_ids=ids, pixel_values=floats(step, ids.shape[0], 3, 16, 16), labels=ids, use_cache=False).loss


def qwen2_vl() -> nn.Module:
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
    text = dict(SMALL, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]))
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=2, video_token_id=1, vision_start_token_id=0)
    )


def shown_in_patches(model: Any, step: int) -> torch.Tensor:
    """Images of other sizes in every row, as one run of patches."""
    ids = tokens(step)
    rows = ids.shape[0]
    ids[:, 1:5] = 2  # 4x4 patches, merged 2x2
    grid = torch.tensor([[1, 4, 4]] * rows)
    kinds = (ids == 2).int()
    return model(
        input_ids=ids, pixel_values=floats(step, 16 * rows, 3 * 2 * 4 * 4), image_grid_thw=grid, mm_token_type_ids=kinds, labels=ids, use_cache=False
    ).loss


# -- no transformers at all ---------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.norm(self.conv(x)))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = Conv(3, 16), nn.Sequential(*[Conv(16, 16) for _ in range(4)]), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Lstm(nn.Module):
    """A large layer that is no block, of which several outputs are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(VOCAB, 32), nn.LSTM(32, 32, num_layers=2, dropout=0.1), nn.Linear(32, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.lstm(self.embed(ids).transpose(0, 1))
        logits = self.head(out).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), ids.t().flatten()) + (h * c).float().mean()


class Reused(nn.Module):
    """One linear layer at three places, one activation for all, a nested list, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.act, self.scale = nn.Linear(64, 64), nn.GELU(), nn.Parameter(torch.ones(64))
        self.branches = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for branch in self.branches:
            x = self.act(self.same(x)) + sum(self.act(linear(x)) for linear in branch)
        return self.same(x) * self.scale


ROWS |= {
    "llava": Row(llava, shown_and_told),
    "qwen2-vl": Row(qwen2_vl, shown_in_patches),
    "cnn with batchnorm": Row(Cnn, lambda m, s: m(floats(s, SHAPES[s % 3][0] + 1, 3, 8, SHAPES[s % 3][1])).float().square().mean()),
    "lstm": Row(Lstm, lambda m, s: m(tokens(s))),
    "mlp with reused layers": Row(Reused, output),
    "torch's transformer": Row(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128), 3, enable_nested_tensor=False),
        lambda m, s: m(floats(s, *SHAPES[s % 3], 64)).float().square().mean(),
    ),
}


class Normalised(nn.Module):
    """Weights computed in forward from other parameters, in the old way (hooks) and the new one (parametrizations), and a state that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
        self.c = nn.utils.spectral_norm(nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Recurrent(nn.Module):
    """A cell in a loop, as often as the batch is long."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(h)
        return x + torch.stack(out, 1)


ROWS |= {
    "weight and spectral norm": Row(lambda: nn.Sequential(*[Normalised() for _ in range(4)]), output),
    "cells in a loop": Row(lambda: nn.Sequential(*[Recurrent() for _ in range(4)]), lambda m, s: m(floats(s, *SHAPES[s % 3], 64)).float().square().mean()),
    "gemma4": Row(
        causal(
            hf.Gemma4TextConfig,
            head_dim=16,
            global_head_dim=16,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=8,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
        ),
        lm,
    ),  # a second embedding table; K/V shared by layers through a dictionary
}

GENERATING = (
    "llama",
    "gemma3n",
    "gemma4",
    "gpt2 with dropout",
    "bloom",
    "falcon",
    "deepseek-v3",
    "qwen3-next",
    "mamba",
    "mamba2",
    "falcon-h1",
    "t5",
    "whisper",
)
