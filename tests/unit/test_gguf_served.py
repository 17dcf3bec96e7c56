"""GGUF files of every type, from the file to the engine's tokens, against transformers with their values."""

import numpy as np
import pytest
from engine_support import Driver, greedy, save_tiny
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.engine.executor import EngineOptions, TorchExecutor  # noqa: E402
from shared.model import resolve  # noqa: E402
from shared.model.cache import ModelCache  # noqa: E402
from tests.support.gguf_files import add_tokenizer, stored, write_model  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}
OFTEN = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]
SELDOM = [Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.IQ4_NL, Kind.IQ4_XS]


@pytest.mark.parametrize(
    ("arch", "kind"),
    [("llama", kind) for kind in OFTEN]
    + [pytest.param("llama", kind, marks=pytest.mark.slow) for kind in SELDOM]
    + [("qwen2", Kind.BF16), ("qwen3", Kind.Q4_K)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_engine_computes_what_the_files_values_say(tmp_path, arch, kind):
    head_dim = {"head_dim": 64} if arch == "qwen3" else {}
    tied = {"tie_word_embeddings": arch != "llama"}
    reference = save_tiny(arch, tmp_path / "hf", **SIZES, **head_dim, **tied)
    pre = "smollm" if arch == "llama" else "qwen2"
    write_model(tmp_path / "m.gguf", reference, kind, arch, lambda writer: add_tokenizer(writer, pre))
    folder = resolve(str(tmp_path / "m.gguf"), ModelCache(tmp_path / "cache"), quiet=True)
    options = EngineOptions(dtype="float32", kv_bytes=1 << 20, kernels="torch", measure_s=0.0, threads=1)
    prompts = [np.random.default_rng(7).integers(0, 97, size=n).tolist() for n in (3, 40)]
    executor = TorchExecutor(folder.path, options)
    runs = Driver(executor).generate(prompts, [greedy(8, logprobs=1) for _ in prompts], chunk=16)
    for prompt, run in zip(prompts, runs):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + run.tokens])).logits[0, len(prompt) - 1 : -1]
        assert run.tokens == logits.argmax(-1).tolist()
        wanted = torch.log_softmax(logits, -1).max(-1).values
        found = [step.chosen for step in run.logprobs]
        np.testing.assert_allclose(found, wanted, atol=1e-3)


def q4_k(block: bytes) -> list[float]:
    """`dequantize_row_q4_K` of ggml-quants.c, one value at a time."""
    d, least = (float(np.frombuffer(block[i : i + 2], "<f2")[0]) for i in (0, 2))
    scales, quants = block[4:16], block[16:]

    def scale_and_min(j: int) -> tuple[int, int]:
        if j < 4:
            return scales[j] & 63, scales[j + 4] & 63
        high = scales[j + 4]
        return (high & 0xF) | (scales[j - 4] >> 6) << 4, (high >> 4) | (scales[j] >> 6) << 4

    values = []
    for pair in range(4):
        for nibble in range(2):
            scale, minimum = scale_and_min(2 * pair + nibble)
            part = quants[32 * pair : 32 * pair + 32]
            values += [d * scale * ((q >> 4 * nibble) & 0xF) - least * minimum for q in part]
    return values


def q6_k(block: bytes) -> list[float]:
    """`dequantize_row_q6_K` of ggml-quants.c, one value at a time."""
    low, high, d = block[:128], block[128:192], float(np.frombuffer(block[208:], "<f2")[0])
    scales = np.frombuffer(block[192:208], np.int8).astype(int)
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            bits = high[32 * half + i]
            for quarter in range(4):
                byte = low[64 * half + i + 32 * (quarter & 1)]
                nibble = byte >> 4 if quarter > 1 else byte & 0xF
                q = (nibble | ((bits >> 2 * quarter) & 3) << 4) - 32
                scale = scales[8 * half + 2 * quarter + i // 16]
                values[128 * half + 32 * quarter + i] = d * scale * q
    return values


@pytest.mark.parametrize(("kind", "slowly"), [(Kind.Q4_K, q4_k), (Kind.Q6_K, q6_k)])
def test_super_blocks_are_read_as_their_definition_says(kind, slowly):
    raw = stored(np.zeros((3, 512)), kind)
    size = raw.shape[1] // 2
    wanted = [[*slowly(row[:size].tobytes()), *slowly(row[size:].tobytes())] for row in raw]
    np.testing.assert_allclose(dequantize(raw, kind), wanted, rtol=1e-6, atol=1e-9)
