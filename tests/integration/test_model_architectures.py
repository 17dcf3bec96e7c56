"""Every architecture that can be imported, loaded by transformers from the folder that comes out."""

import json

import numpy as np
import pytest

from shared.model import open_folder
from shared.model.gguf_config import llama3_factors
from shared.model.gguf_import import import_gguf
from shared.model.progress import silent
from tests.support.gguf_files import HEAD_DIM, weights, write

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("arch", "pre", "kind"),
    [
        ("llama", "smollm", ""),
        ("llama", "llama-bpe", "llama3"),
        ("qwen2", "qwen2", ""),
        ("qwen3", "qwen2", ""),
    ],
)
def test_transformers_finds_every_weight_and_no_other(tmp_path, arch, pre, kind):
    import torch
    import transformers

    tensors = weights(3, arch)
    if kind:
        tensors["rope_freqs.weight"] = np.array(llama3_factors(10000.0, HEAD_DIM, LLAMA3), dtype=np.float32)
    out = tmp_path / "out"
    out.mkdir()
    import_gguf(write(tmp_path / "m.gguf", tensors, arch=arch, pre=pre), out, silent)
    folder = open_folder(out)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder.path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model.config.rope_parameters["rope_type"] == (kind or "default")
    if kind:
        # The rotary table transformers makes of the parameters is the one the file's factors describe.
        plain = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        wanted = plain / tensors["rope_freqs.weight"]
        np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), wanted, rtol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
    ids = tokenizer("ab 123", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0
