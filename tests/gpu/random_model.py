"""Model folders with random weights, written without any other library's help."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.worker.engine.config import parse_config
from services.worker.engine.weights import expected_shapes

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _sizes(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


SIZES = {
    "tiny": _sizes(3, 384, 512, 6, 2, 199) | {"max_position_embeddings": 256},
    "135m": _sizes(30, 576, 1536, 9, 3, 49152),
    "1b": _sizes(16, 2048, 8192, 32, 8, 128256),
    "8b": _sizes(32, 4096, 14336, 32, 8, 128256) | {"tie_word_embeddings": False},
}
"""`tiny` for tests; the others have the shapes of SmolLM2 135M, Llama 3.2 1B and Llama 3.1 8B."""


def write_random(path: Path, size: str, seed: int = 0) -> Path:
    """A Hugging Face folder of random bfloat16 weights in `path`, scaled so that nothing grows or fades."""
    config = _LLAMA | SIZES[size]
    shapes = expected_shapes(parse_config(config, str(path)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            value = torch.ones(shape)
        else:
            value = torch.randn(shape, generator=generator, device=device) * shape[1] ** -0.5
        tensors[name] = value.to(torch.bfloat16).cpu()
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
