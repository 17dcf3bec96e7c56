"""What a rank takes before it has a model: measured once for each build, by a process that serves next to
nothing.

`python -m services.worker.engine.runtime_memory` loads a model of a few kilobytes as a worker would, and says
what of its memory is neither weights nor KV nor activations.
"""

import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.worker.engine.native import build
from services.worker.engine.remembered import Remembered

log = logging.getLogger(__name__)

_GUESS = 320 << 20
"""Where it cannot be measured."""
_LIMIT_S = 120.0
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def runtime_bytes() -> int:
    """Of a rank that computes on this CPU; remembered, or measured now, which takes some seconds."""
    memory = Remembered(int, "memory", _circumstances())
    if (known := memory.recall()) is not None:
        return known
    try:
        made = subprocess.run(
            [sys.executable, "-P", "-m", "services.worker.engine.runtime_memory"],
            capture_output=True,
            check=True,
            timeout=_LIMIT_S,
            env={k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith("HORTATOR_")},
        )
        measured = int(json.loads(made.stdout.splitlines()[-1])["runtime_bytes"])
    except (subprocess.SubprocessError, OSError, ValueError, KeyError, IndexError) as error:
        log.warning("the runtime's memory is not measured, %d MiB are assumed: %s", _GUESS >> 20, error)
        return _GUESS
    memory.keep(measured)
    return measured


def remembered_runtime_bytes() -> int | None:
    """As `runtime_bytes` if it was measured before; it works where there is no torch and no compiler, too."""
    try:
        return Remembered(int, "memory", _circumstances()).recall()
    except (PackageNotFoundError, build.KernelsUnavailable):
        return None


_KEPT = {"HORTATOR_CACHE"}


def _circumstances() -> dict[str, object]:
    return {
        "what": "runtime",
        "python": platform.python_version(),
        "native": build.library_path().name,
        "libraries": {name: version(name) for name in ("hortator", "torch", "numpy", "nats-py")},
    }


def _measure() -> int:
    import torch
    from safetensors.torch import save_file

    import services.worker.__main__  # noqa: F401 - all that a worker imports
    from services.worker.engine.config import parse_config
    from services.worker.engine.executor import EngineOptions, TorchExecutor
    from services.worker.engine.weights import expected_shapes

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        shapes = expected_shapes(parse_config(_CONFIG, "config.json"))
        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
        options = EngineOptions(kv_bytes=1 << 20, measure_s=0.0, runtime_bytes=0)
        account = TorchExecutor(folder, options).account
    return account.measured.runtime_bytes if account and account.measured else _GUESS


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"runtime_bytes": _measure()}))
