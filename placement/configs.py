"""The shape of a model from its published configuration, by the names that Hugging Face's `config.json` files use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.catalogue import GpuType
from placement.memory import MemoryPrediction, predict
from placement.shapes import Experts, Latent, Layout, ModelShape, Setup, ShapeError

GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu", "gelu_pytorch_tanh")
"""Activations whose published models all use a gate."""


def shape_of_config(config: Mapping[str, Any], seq: int = 0) -> ModelShape:
    """Read a decoder's shape. `seq` is the training sequence in tokens; 0: the longest that the model allows.

    Raises ShapeError naming the missing key.
    """
    longest = int(_first(config, "max_position_embeddings", "n_positions", "max_seq_len", default=0))
    rotary = "rope_theta" in config or "rope_scaling" in config or "rope_parameters" in config
    hidden = int(_first(config, "hidden_size", "n_embd", "d_model"))
    layers = int(_first(config, "num_hidden_layers", "n_layer", "num_layers"))
    gated = str(_first(config, "hidden_act", "activation_function", default="gelu")) in GATED_ACTIVATIONS
    experts = _experts(config)
    if seq < 1 and longest < 1:
        raise ShapeError("the configuration names no longest sequence; give seq")
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=int(_first(config, "num_attention_heads", "n_head")),
        seq=seq or longest,
        vocab=int(_first(config, "vocab_size")),
        ffn=int(_first(config, "intermediate_size", "n_inner", "ffn_dim", default=0) or 0),
        groups=int(config.get("num_key_value_heads") or 0),
        head_dim=0 if "kv_lora_rank" in config else int(config.get("head_dim") or 0),
        gated=gated,
        bias=bool(_first(config, "attention_bias", "mlp_bias", "bias", default=not gated)),
        norm="rms" if "rms_norm_eps" in config else "layer",
        learned_positions=0 if rotary else longest,
        rotary=rotary,
        tied=bool(config.get("tie_word_embeddings", not gated)),
        vocab_multiple=1,
        latent=_latent(config),
        experts=experts,
        moe_pattern=_pattern(config, layers) if experts else (),
        mtp_depth=int(config.get("num_nextn_predict_layers") or 0),
    )


def predict_config(
    config: Mapping[str, Any],
    gpu: GpuType,
    *,
    micro_batch: int,
    seq: int = 0,
    setup: Setup | None = None,
    **degrees: int,
) -> MemoryPrediction:
    """Memory per GPU of training this model with `micro_batch` sequences of `seq` tokens at once.

    `degrees` are those of `Layout.of` (data, tensor, pipeline, ...); without any, one GPU. The loss is plain cross
    entropy unless `setup` says otherwise.
    """
    shape = shape_of_config(config, seq)
    setup = setup or Setup(global_batch=micro_batch, loss="plain", attention="flash", kernel_library=False)
    return predict(shape, setup, Layout.of(micro_batch=micro_batch, **degrees), gpu).prediction()


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise ShapeError(
            f"the configuration lacks {' or '.join(names)}; it has {', '.join(sorted(config)) or 'nothing'}"
        )
    return default


def _experts(config: Mapping[str, Any]) -> Experts | None:
    num_experts = int(_first(config, "num_local_experts", "n_routed_experts", "num_experts", default=0))
    if num_experts == 0:
        return None
    ffn = int(_first(config, "moe_intermediate_size", "intermediate_size"))
    shared = int(config.get("shared_expert_intermediate_size") or 0) or int(config.get("n_shared_experts") or 0) * ffn
    top_k = int(_first(config, "num_experts_per_tok", "num_experts_per_token", "moe_top_k"))
    return Experts(num_experts=num_experts, top_k=top_k, ffn=ffn, shared_ffn=shared)


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        q_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=int(config["kv_lora_rank"]),
        qk_dim=int(_first(config, "qk_nope_head_dim")),
        rope_dim=int(_first(config, "qk_rope_head_dim")),
        v_dim=int(_first(config, "v_head_dim")),
    )


def _pattern(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """DeepSeek's leading dense layers, or every n-th layer a mixture."""
    dense = int(config.get("first_k_dense_replace") or 0)
    step = int(_first(config, "moe_layer_freq", "decoder_sparse_step", default=1))
    return tuple(index >= dense and index % step == 0 for index in range(layers))
