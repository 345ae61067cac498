"""Small configs of any model type, made from the type's own config: few layers, one or two of each kind."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

WINDOW = 20  # shorter than a prompt
# Fields by the names that configs of transformers have; only those that a config has already are set.
# fmt: off
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW,
    # decoders of encoder-decoders
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    # latent attention, no two sizes of what is stored alike
    "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16,
    # linear attention and SSM
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "chunk_size": 8, "n_groups": 1, "mamba_n_groups": 1,
}
EVEN_NONE = ("head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id")
LEFT_OUT = "left out"
OVERRIDES: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "gemma3n_text": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6, "vocab_size_per_layer_input": 101,
    },
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48)},
    "gemma4_text": {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
    },
    "gemma4_unified_text": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "d_model": 64, "n_heads": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_bigcode": {"num_key_value_heads": LEFT_OUT},  # one, where `multi_query` is true
    "moshi": {"sliding_window": LEFT_OUT},  # its masks have none
    "whisper": {"num_key_value_heads": LEFT_OUT},  # which is its encoder's heads
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_budget": 64, "indexer_compress_ratio": 16, "indexer_head_dim": 16, "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
    "xlnet": {"d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
    "prophetnet": {"num_hidden_layers": LEFT_OUT},
}
# fmt: on
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
    "num_encoder_layers",
    "num_decoder_layers",
)  # fmt: skip


def small_config(model_type: str, of_kind: int = 2, **changes: Any) -> PretrainedConfig:
    """The config of a type, with small sizes and all kinds of layers that the type has by default.

    Args:
        of_kind: layers of each kind, where a config lists kinds; `OVERRIDES` of the type win.
        changes: fields with other values.
    """
    return shrunk(CONFIG_MAPPING[model_type](), of_kind, **changes)


def shrunk(default: PretrainedConfig, of_kind: int = 2, **changes: Any) -> PretrainedConfig:
    """A small config of the class of `default`, sub-configs included; arguments as of `small_config`."""
    chosen = {name: size for name, size in SIZES.items() if _has(default, name)}
    kept = _kept_layers(default, of_kind)
    if "kv_lora_rank" in chosen:  # latents are expanded for every query head
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    for name in LAYERS:
        if isinstance(_value(default, name), int):
            chosen[name] = min(_value(default, name), len(kept))
    count = _value(default, "num_hidden_layers") or 0
    for name, value in vars(default).items():
        if isinstance(value, list) and count and len(value) == count:
            chosen[name.lstrip("_")] = [value[i] for i in kept]
    for name in default.sub_configs:
        sub = _value(default, name)
        if isinstance(sub, PretrainedConfig):
            chosen[name] = shrunk(sub, of_kind)
    chosen |= {**OVERRIDES.get(default.model_type, {}), **changes}
    return type(default)(**{name: value for name, value in chosen.items() if value is not LEFT_OUT})


def _has(config: PretrainedConfig, name: str) -> bool:
    """Whether a config has this field, and it can be set."""
    own = getattr(type(config), name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    return _value(config, name) is not None or (name in EVEN_NONE and name in vars(config))


def _value(config: PretrainedConfig, name: str) -> Any:
    """A field of a config, or None; some configs refuse fields that differ from layer to layer."""
    try:
        return getattr(config, name, None)
    except AttributeError:
        return None
    except Exception:  # newer releases have a special error if the field differs between layers
        return getattr(config.per_layer_config[0], name, None)


def _kept_layers(config: PretrainedConfig, of_kind: int) -> list[int]:
    """Indices of default layers to keep: the first `of_kind` of each kind, or the first two if all are of one."""
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, list) or len(set(kinds)) == 1:
        return [0, 1]
    kept = [i for kind in set(kinds) for i in [j for j, other in enumerate(kinds) if other == kind][:of_kind]]
    return sorted(kept)
