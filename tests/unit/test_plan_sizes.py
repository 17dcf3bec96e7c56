"""Parameters are counted from config.json alone: against the counts that the models' authors publish."""

from typing import Any

import pytest

from services.worker.engine.config import parse_config
from services.worker.memory.model_config import read_sizes
from services.worker.memory.sizes import BadModel, parse_count, sizes_of_numbers

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def config(
    kind: str,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    made = {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    return made | more


DEEPSEEK_V3 = config(
    *("deepseek_v3", 129280, 7168, 18432, 61, 128),
    moe_intermediate_size=2048,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    topk_method="noaux_tc",
)
QWEN3_30B = config(
    *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4),
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
)

PUBLISHED = {
    "SmolLM2-135M": (config("llama", 49152, 576, 1536, 30, 9, 3, tie_word_embeddings=True), 134_515_008),
    "Llama-2-7B": (config("llama", 32000, 4096, 11008, 32, 32), 6_738_415_616),
    "Llama-2-70B": (config("llama", 32000, 8192, 28672, 80, 64, 8), 68_976_648_192),
    "Llama-3-8B": (config("llama", 128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3-70B": (config("llama", 128256, 8192, 28672, 80, 64, 8), 70_553_706_496),
    "Mistral-7B": (config("mistral", 32000, 4096, 14336, 32, 32, 8), 7_241_732_096),
    "Qwen2-0.5B": (config("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), 494_032_768),
    "Qwen2-7B": (config("qwen2", 152064, 3584, 18944, 28, 28, 4), 7_615_616_512),
    "Qwen3-0.6B": (
        config("qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (config("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128), 8_190_735_360),
    "Mixtral-8x7B": (
        config("mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (QWEN3_30B, 30_532_122_624),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "GPT-2": (
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        },
        124_439_808,
    ),
    "Gemma-2B": (config("gemma", 256000, 2048, 16384, 18, 8, 1, head_dim=256), 2_506_172_416),
    "Gemma-2-2B": (config("gemma2", 256000, 2304, 9216, 26, 8, 4, head_dim=256), 2_614_341_888),
    "Phi-2": (config("phi", 51200, 2560, 10240, 32, 32), 2_779_683_840),
    "Phi-3-mini": (config("phi3", 32064, 3072, 8192, 32, 32), 3_821_079_552),
    "Pythia-6.9B": (config("gpt_neox", 50432, 4096, 16384, 32, 32), 6_857_302_016),
    "OPT-1.3B": (
        config("opt", 50272, 2048, 0, 24, 32, ffn_dim=8192, max_position_embeddings=2048)
        | {"intermediate_size": None},
        1_315_758_080,
    ),
    "BLOOM-560M": (
        {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
        559_214_592,
    ),
    "Falcon-7B": (
        config("falcon", 65024, 4544, 0, 32, 71, multi_query=True) | {"intermediate_size": None},
        6_921_720_704,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    raw, published = PUBLISHED[name]
    assert read_sizes(raw, name).parameters.total == published


def test_a_token_is_multiplied_with_the_experts_it_passes_only() -> None:
    # "A3B": 3.3 billion active parameters, of which the embedding (0.3) is looked up and not multiplied.
    sizes = read_sizes(QWEN3_30B, "config.json")
    assert sizes.per_token == pytest.approx(3.35e9 - 0.31e9, rel=0.01)
    assert sizes.touched(1) == pytest.approx(8 / 128)
    assert sizes.touched(10_000) == pytest.approx(1.0)


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    assert read_sizes(DEEPSEEK_V3, "config.json").kv_elements() == 61 * (512 + 64)


def test_a_model_of_text_and_pictures_is_planned_by_its_text_part() -> None:
    raw, published = PUBLISHED["Llama-3-8B"]
    assert read_sizes({"model_type": "llava", "text_config": raw}, "c").parameters.total == published


def test_what_the_engine_computes_is_told_from_what_it_does_not() -> None:
    raw = PUBLISHED["SmolLM2-135M"][0] | LLAMA | {"max_position_embeddings": 8192}
    sizes = read_sizes(raw, "config.json")
    assert sizes.config == parse_config(raw, "config.json")
    mixture = read_sizes(PUBLISHED["Mixtral-8x7B"][0], "config.json")
    assert mixture.config is None
    assert "architectures" in mixture.reason


def test_an_unknown_family_is_counted_like_llama_and_that_is_said() -> None:
    raw = PUBLISHED["Llama-3-8B"][0] | {"model_type": "someday"}
    sizes = read_sizes(raw, "config.json")
    assert sizes.parameters.total == PUBLISHED["Llama-3-8B"][1]
    assert any("someday" in note for note in sizes.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"hidden_size": "576"}, "hidden_size = '576'"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"vocab_size": float("nan")}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_key_value_heads": 2}, "must divide the 9 heads"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "give head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "only 4 experts"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_its_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadModel, match=said) as caught:
        read_sizes(PUBLISHED["SmolLM2-135M"][0] | change, "some/config.json")
    assert "some/config.json" in str(caught.value)
    assert "--params" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"), [("10B", 10**10), ("135m", 135 * 10**6), ("7.5e9", 7_500_000_000)]
)
def test_numbers_of_parameters_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "-1B", "1e99", "nan", "10 bananas", "9" * 40])
def test_what_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(BadModel, match="write for example"):
        parse_count(text)


def test_weights_of_bare_sizes_are_estimated_and_that_is_said() -> None:
    sizes = sizes_of_numbers(60, 8000, None, None, None)
    assert sizes.parameters.total == 12 * 60 * 8000**2
    assert sizes.kv_elements() == 2 * 60 * 8000
    assert any("estimated" in note for note in sizes.notes)
