import pytest

from placement.catalogue import GIB, gpu_type
from placement.configs import predict_config, shape_of_config
from placement.shapes import Layout, ShapeError, stage_parameters

GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None}
LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 163840, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GPT2, 124_439_808), (LLAMA, 8_030_261_248), (MIXTRAL, 46_702_792_704), (DEEPSEEK, 671_026_404_352)],
)
def test_published_models_have_their_published_parameters(config, parameters):
    held = stage_parameters(shape_of_config(config), Layout.of(micro_batch=1), first=False)
    assert held.total[0] == parameters


def test_one_gpu_is_the_default_and_more_share_the_load():
    one = predict_config(LLAMA, gpu_type("H200"), micro_batch=1, seq=2048)
    four = predict_config(LLAMA, gpu_type("H200"), micro_batch=1, seq=2048, tensor=4)
    assert one.static == pytest.approx(18 * 8_030_261_248, rel=1e-3)
    assert not one.fits(gpu_type("H200"))
    assert four.static < one.static / 3.9
    assert four.nvml < 60 * GIB


def test_a_missing_key_is_named():
    with pytest.raises(ShapeError, match="hidden_size or n_embd"):
        shape_of_config({"vocab_size": 10})
    with pytest.raises(ShapeError, match="give seq"):
        shape_of_config({key: value for key, value in LLAMA.items() if key != "max_position_embeddings"})
