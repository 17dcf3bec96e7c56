"""`python -m tests.bench.even_model FOLDER`: a servable model of SmolLM2's shape whose heads divide evenly.

Random weights; the tokenizer and templates are the default model's.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.worker.engine.config import parse_config
from services.worker.engine.weights import expected_shapes
from shared.model import resolve

CHANGED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 576}


def write(folder: Path, seed: int = 0) -> Path:
    """Returns `folder`."""
    source = resolve("smollm2-135m-instruct").path
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt") and file.name != "manifest.json":
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text()) | CHANGED
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(parse_config(config, str(folder))).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            value = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[name] = value.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
