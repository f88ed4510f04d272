"""Megatron-LM launch flags -> shape, setup and layout. A blank or missing flag means the launcher's default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from placement.shapes import Attention, Experts, Latent, Layout, Loss, ModelShape, Optimizer, Setup, ShapeError

GPT2_VOCABULARY = 50257
BERT_VOCABULARY = 30522
T5_EXTRA_TOKENS = 100
MOE_FAMILIES = ("moe", "mixtral")


@dataclass(frozen=True)
class Case:
    """One measured run, read from its flags. `layout` holds one plan."""

    shape: ModelShape
    setup: Setup
    layout: Layout
    gpu: str
    image: str
    """Software image."""
    fallback: Setup | None
    """Set where the flags name no attention kernel and the image is known to fall back to plain products at times: the
    setup of that case, which the upper bound has to cover."""


@dataclass(frozen=True)
class Unsupported:
    """A run that the predictor does not claim to know."""

    reason: str


class Flags:
    """Typed access to the flags of one row."""

    def __init__(self, row: Mapping[str, str | None]):
        self._row = row

    def text(self, name: str) -> str:
        return (self._row.get(name) or "").strip()

    def flag(self, name: str) -> bool:
        return self.text(name).lower() in ("true", "1", "1.0", "yes")

    def number(self, name: str, default: float) -> float:
        text = self.text(name)
        if not text:
            return default
        try:
            return float(text)
        except ValueError:
            raise ShapeError(f"{name} = '{text}' is not a number") from None

    def count(self, name: str, default: int) -> int:
        """An integer written as 8 or 8.0."""
        value = self.number(name, default)
        if value != int(value):
            raise ShapeError(f"{name} = {value} is not a whole number")
        return int(value)


def read_case(row: Mapping[str, str | None]) -> Case | Unsupported:
    """Read one row. Raises ShapeError on flags that are not numbers or contradict each other.

    Switches for which the table has no column (loss fusion, normalised queries, deferred head gradients, the mask, the
    missing kernel library, the deterministic mode) are taken from the name of the test case, the only record of them.
    """
    flags = Flags(row)
    name = flags.text("test_case")
    family = flags.text("family")
    reason = _unsupported(flags, family, name)
    if reason:
        return Unsupported(reason)
    shape = _shape(flags, family, name)
    setup = _setup(flags, name)
    tensor, pipeline = flags.count("tensor_model_parallel_size", 1), flags.count("pipeline_model_parallel_size", 1)
    context, world = flags.count("context_parallel_size", 1), flags.count("world_size_assumed", 0)
    if world % (tensor * pipeline * context):
        raise ShapeError(f"{world} GPUs are not a multiple of t*p*c = {tensor}*{pipeline}*{context}")
    data = world // (tensor * pipeline * context)
    per_chunk = flags.count("num_layers_per_virtual_pipeline_stage", 0)
    micro_batch = flags.count("micro_batch_size", 1)
    layout = Layout.of(
        micro_batch=micro_batch,
        num_micro=max(1, setup.global_batch // (micro_batch * data)),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        virtual=max(1, shape.layers // (pipeline * per_chunk)) if per_chunk else 1,
        context=context,
        expert=flags.count("expert_model_parallel_size", 1),
        expert_tensor=flags.count("expert_tensor_parallel_size", tensor),
        sequence_parallel=flags.flag("sequence_parallel") and tensor > 1,
        sharding=1 if flags.flag("use_distributed_optimizer") else 0,
        recompute={"selective": 1, "full": 2}.get(flags.text("recompute_granularity"), 0),
    )
    return Case(shape, setup, layout, flags.text("gpu"), flags.text("software_env"), _fallback(flags, setup))


def _unsupported(flags: Flags, family: str, name: str) -> str:
    if family not in ("gpt", "moe", "mixtral", "bert", "t5"):
        return f"family {family or 'not stated'}"
    if flags.count("world_size_assumed", 0) == 0:
        return "world size not stated"
    for word, reason in (
        ("grpo", "reinforcement-learning step"),
        ("distill", "distillation holds a second model"),
        ("account_for", "stages dealt unevenly"),
        ("selective_recompute_experimental", "the recomputed modules are not stated"),
    ):
        if word in name:
            return reason
    for column, reason in (
        ("use_megatron_fsdp", "Megatron FSDP"),
        ("use_torch_fsdp2", "torch FSDP2"),
        ("optimizer_cpu_offload", "optimizer on the host"),
        ("enable_cuda_graph", "CUDA graphs"),
    ):
        if flags.flag(column):
            return reason
    if flags.text("cuda_graph_impl") not in ("", "none"):
        return "CUDA graphs"
    if flags.text("spec"):
        return "layer specification outside the flags"
    return ""


def class_key(family: str, case: Case) -> str:
    """The class that rows are grouped and held out by: family, layers, hidden, heads, sequence, t, p, experts."""
    shape, layout = case.shape, case.layout
    experts = shape.experts.num_experts if shape.experts else 0
    return (
        f"{family} l={shape.layers} h={shape.hidden} a={shape.heads} s={shape.seq} "
        f"t={layout.tensor[0]} p={layout.pipeline[0]} E={experts}"
    )


def is_dense_gpt(row: Mapping[str, str | None]) -> bool:
    """Whether a row belongs to the headline: family gpt without experts, latent attention, recomputation, fp8, MTP."""
    flags = Flags(row)
    switched = ("num_experts", "recompute_granularity", "fp8_format", "mtp_num_layers")
    return (
        flags.text("family") == "gpt"
        and not any(flags.text(column) for column in switched)
        and not flags.flag("multi_latent_attention")
    )


def _shape(flags: Flags, family: str, name: str) -> ModelShape:
    hidden, heads = flags.count("hidden_size", 0), flags.count("num_attention_heads", 0)
    layers = flags.count("num_layers", 0) or flags.count("decoder_num_layers", 0)
    encoder_layers = flags.count("encoder_num_layers", 0) if family == "t5" else 0
    seq = flags.count("seq_length", 0) or flags.count("decoder_seq_length", 0)
    vocab = flags.count("vocab_size", 0) or GPT2_VOCABULARY
    if "BertWordPiece" in flags.text("tokenizer_type") or family == "bert":
        vocab = BERT_VOCABULARY + (T5_EXTRA_TOKENS if family == "t5" else 0)
    learned = flags.text("position_embedding_type") in ("", "learned_absolute")
    experts = _experts(flags, hidden)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq=seq,
        vocab=vocab,
        ffn=flags.count("ffn_hidden_size", 0),
        groups=flags.count("num_query_groups", 0) if flags.flag("group_query_attention") else 0,
        head_dim=flags.count("kv_channels", 0),
        gated=flags.flag("swiglu"),
        bias=not flags.flag("disable_bias_linear"),
        norm="rms" if flags.text("normalization") == "RMSNorm" else "layer",
        learned_positions=(flags.count("max_position_embeddings", 0) or seq) if learned else 0,
        rotary=flags.text("position_embedding_type") == "rope",
        tied=not flags.flag("untie_embeddings_and_output_weights"),
        vocab_multiple=flags.count("make_vocab_size_divisible_by", 128),
        qk_norm="qk_layernorm" in name,
        latent=_latent(flags),
        experts=experts,
        moe_pattern=_pattern(flags.text("moe_layer_freq"), layers) if experts else (),
        mtp_depth=flags.count("mtp_num_layers", 0),
        encoder_layers=encoder_layers,
        encoder_seq=flags.count("encoder_seq_length", 0) if encoder_layers else 0,
        head_transform=family == "bert",
    )


def _latent(flags: Flags) -> Latent | None:
    if not flags.flag("multi_latent_attention"):
        return None
    return Latent(
        q_rank=flags.count("q_lora_rank", 0),
        kv_rank=flags.count("kv_lora_rank", 32),
        qk_dim=flags.count("qk_head_dim", 128),
        rope_dim=flags.count("qk_pos_emb_head_dim", 64),
        v_dim=flags.count("v_head_dim", 128),
    )


def _experts(flags: Flags, hidden: int) -> Experts | None:
    num_experts = flags.count("num_experts", 0)
    if num_experts == 0:
        return None
    ffn = flags.count("ffn_hidden_size", 0) or 4 * hidden
    return Experts(
        num_experts=num_experts,
        top_k=flags.count("moe_router_topk", 2),
        ffn=flags.count("moe_ffn_hidden_size", 0) or ffn,
        shared_ffn=flags.count("moe_shared_expert_intermediate_size", 0),
        grouped_gemm=flags.flag("moe_grouped_gemm"),
    )


def _pattern(text: str, layers: int) -> tuple[bool, ...]:
    """'([0]*1+[1]*15)', '[0,1,1]' or '2' (every second layer, from the first) -> one bool a layer."""
    if not text:
        return ()
    if re.fullmatch(r"\d+(\.0*)?", text):
        period = int(float(text))
        return tuple(index % period == 0 for index in range(layers))
    pattern: list[bool] = []
    for block, repeat in re.findall(r"\[([01,\s]+)\](?:\s*\*\s*(\d+))?", text):
        pattern += [bit.strip() == "1" for bit in block.split(",")] * int(repeat or 1)
    return tuple(pattern)


def _setup(flags: Flags, name: str) -> Setup:
    half = flags.flag("fp16")
    optimizer: Optimizer = "adam_fp16" if half else ("adam" if flags.flag("bf16") else "adam_fp32")
    if flags.text("optimizer").endswith("muon"):
        optimizer = "muon"
    loss: Loss = "vocab_parallel"
    if "cross_entropy_loss_fusion" in name:
        loss = "fused_out_of_place" if "dracooci" in flags.text("software_env") else "fused_vocab_parallel"
    return Setup(
        global_batch=flags.count("global_batch_size", 1),
        hidden_dropout=flags.number("hidden_dropout", 0.1),
        attention_dropout=flags.number("attention_dropout", 0.1),
        attention=_attention(flags, name),
        loss=loss,
        optimizer=optimizer,
        fp8=bool(flags.text("fp8_format")),
        dense_mask="no_create_attention_mask" not in name,
        fused_wgrad=not flags.flag("no_gradient_accumulation_fusion"),
        strict_blas=_strict_blas(flags, name),
        kernel_library=flags.text("transformer_impl") != "local" and "uninstall_te" not in name,
        recompute_layers=flags.count("recompute_num_layers", 1),
        optimizer_replicas=flags.count("num_distributed_optimizer_instances", 1),
        deferred_head_grad="defer_embedding_wgrad" in name,
    )


def _attention(flags: Flags, name: str) -> Attention:
    """The kernel that ran. Without a flag it depends on the image: the older ones fall back to plain products."""
    backend, image = flags.text("attention_backend"), flags.text("software_env")
    if "uninstall_te" in name:
        return "unfused_fp32"
    if backend == "flash":
        return "flash"
    if backend == "fused":
        return "fused"
    if backend == "unfused" or flags.text("transformer_impl") == "local":
        return "unfused"
    return "unfused" if "dracooci" in image and "reshard" not in name else "fused"


def _fallback(flags: Flags, setup: Setup) -> Setup | None:
    if setup.attention != "fused" or flags.text("attention_backend"):
        return None
    image = flags.text("software_env")
    doubtful = image == "lts_dgx_a100" or (flags.text("gpu") == "A100" and setup.loss != "vocab_parallel")
    return replace(setup, attention="unfused") if doubtful else None


def _strict_blas(flags: Flags, name: str) -> bool:
    """Whether the run was in deterministic mode. A100 runs of dense models with context parallelism never were."""
    if "reshard" in name or "loss_fusion" in name:
        return False
    if flags.text("family") != "gpt":
        return True
    long_a100 = flags.count("context_parallel_size", 1) > 1 and flags.text("gpu") == "A100"
    return "nondeterministic" not in name and not long_a100
