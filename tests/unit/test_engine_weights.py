"""What a model folder may hold: everything else is refused with the file and what to do."""

import json

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from services.worker.engine.config import UnsupportedModel  # noqa: E402
from services.worker.engine.device import Device  # noqa: E402
from services.worker.engine.kvcache import KvCache, plan_kv  # noqa: E402
from services.worker.engine.weights import BadWeights, ModelFolder, expected_shapes  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    from services.worker.engine.config import parse_config

    shapes = expected_shapes(parse_config(CONFIG, "c"))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_whole_folder_is_read_as_float32_whatever_it_is_stored_as(folder):
    expected = ModelFolder(folder).tensor("model.norm.weight")
    change(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    got = ModelFolder(folder).tensor("model.norm.weight")
    assert got.dtype == torch.float32
    assert torch.equal(got, expected.bfloat16().float())


def test_shards_are_read_by_their_index(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f"part-{number}.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(ModelFolder(folder).tensor(names[0]), tensors[names[0]])
    index.write_text(json.dumps({"weight_map": {"x": "../part-0.safetensors"}}))
    with pytest.raises(BadWeights, match="not in the folder"):
        ModelFolder(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is unexpected"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(9)}),
            r"is \(9,\), config.json makes it \(8,\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(8, dtype=torch.int8)}), "stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(folder, edit, message):
    change(folder, edit)
    with pytest.raises(BadWeights, match=message):
        ModelFolder(folder)


def test_a_tied_model_may_carry_its_head_and_old_rotary_buffers(folder):
    change(
        folder,
        lambda t: t.update(
            {
                "lm_head.weight": torch.zeros(11, 8),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
            }
        ),
    )
    ModelFolder(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadWeights, match=r"only pickled weights \(pytorch_model.bin\).*convert"):
        ModelFolder(folder)


def test_a_model_with_its_own_code_is_refused(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "modeling.X"}}))
    with pytest.raises(UnsupportedModel, match="auto_map"):
        ModelFolder(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "does not exist"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "not a readable safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors"),
    ],
)
def test_damaged_folders_say_what_is_wrong(folder, damage, message):
    damage(folder)
    with pytest.raises(BadWeights, match=message):
        ModelFolder(folder)


def test_a_fingerprint_names_weights_and_formats(folder):
    first = ModelFolder(folder).fingerprint("float32", "float32")
    assert ModelFolder(folder).fingerprint("float32", "float32") == first
    assert ModelFolder(folder).fingerprint("float16", "float32") != first
    assert ModelFolder(folder).fingerprint("float32", "float16") != first
    change(folder, lambda t: t["model.norm.weight"].add_(1))
    assert ModelFolder(folder).fingerprint("float32", "float32") != first


def test_kv_memory_that_holds_no_block_is_refused_with_the_arithmetic(folder):
    config = ModelFolder(folder).config
    plan = plan_kv(config, "float16", 10_000, 16)
    assert plan.block_bytes == 2 * 2 * 4 * 2 * 16
    assert plan.blocks == 10_000 // plan.block_bytes
    with pytest.raises(ValueError, match="raise --kv-memory"):
        plan_kv(config, "float32", 100, 16)
    with pytest.raises(ValueError, match="kv-dtype int3"):
        plan_kv(config, "int3", 10**6, 16)
    with pytest.raises(ValueError, match="blocks of 0 tokens"):
        plan_kv(config, "float32", 10**6, 0)


def test_kv_memory_that_the_machine_does_not_have_is_refused(folder):
    config = ModelFolder(folder).config
    for size in (1 << 62, 1 << 70):
        with pytest.raises(ValueError, match=r"cannot be had .*; lower --kv-memory"):
            KvCache(config, plan_kv(config, "float32", size, 16), "float32", torch.device("cpu"))


@pytest.mark.parametrize("name", ["tpu", "mps", "meta", "", "cuda:x"])
def test_a_device_that_nothing_is_computed_on_is_refused(name):
    with pytest.raises(ValueError, match=f"--device {name}"):
        Device(name, "float32")
