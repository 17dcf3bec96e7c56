"""Which executor a worker computes with, and on which runner, by its settings.

torch is imported only when a model is really computed: a mock runs on a machine without it.
"""

import json
from collections.abc import Callable
from pathlib import Path

from services.worker.compute import Compute
from services.worker.mock import MockCosts, MockExecutor
from services.worker.runner import InlineRunner, Runner, ThreadRunner
from services.worker.settings import WorkerSettings, parse_bytes, parse_cores
from services.worker.shape import BatchShape
from services.worker.slots import Batch
from services.worker.step import Executor, ExecutorInfo
from shared.runtime.settings import SettingsError

MOCK_MAX_LEN = 8192
"""Context of a mock for which neither settings nor a model folder name one."""


def make_runner(settings: WorkerSettings) -> Runner:
    """The runner, not started. Raises `SettingsError` for settings that contradict each other."""
    if settings.mock:
        costs = MockCosts(settings.mock_step_s, settings.mock_token_s)
        runner = ThreadRunner if costs.any else InlineRunner
        return runner(_maker(settings, lambda: mock_executor(settings, costs)))
    if not settings.model_dir:
        raise SettingsError("HORTATOR_MODEL_DIR is empty: name a model folder, or set HORTATOR_MOCK=1")
    return ThreadRunner(_maker(settings, lambda: torch_executor(settings)))


def mock_executor(settings: WorkerSettings, costs: MockCosts) -> Executor:
    vocab_size, max_len = settings.mock_vocab, MOCK_MAX_LEN
    if settings.model_dir:
        vocab_size, max_len = _read_config(Path(settings.model_dir))
    info = ExecutorInfo(
        fingerprint=f"mock-{vocab_size}",
        block_tokens=settings.block_tokens,
        blocks_total=settings.mock_blocks,
        max_len=min(settings.max_len or max_len, max_len)
        if settings.model_dir
        else settings.max_len or max_len,
        vocab_size=vocab_size,
        prefill_tok_s=1 / costs.token_s if costs.token_s else 1e6,
        decode_step_s=costs.step_s + costs.token_s if costs.any else 1e-4,
        detail=(("executor", "mock"),),
    )
    return MockExecutor(info, settings.slots, costs)


def torch_executor(settings: WorkerSettings) -> Executor:
    from services.worker.engine.executor import EngineOptions, TorchExecutor

    return TorchExecutor(
        Path(settings.model_dir),
        EngineOptions(
            dtype=settings.dtype,
            kv_dtype=settings.kv_format,
            kv_bytes=parse_bytes(settings.kv_memory),
            block_tokens=settings.block_tokens,
            max_len=settings.max_len or None,
            threads=settings.threads or None,
            device=settings.device,
            kernels=settings.kernels,
            cores=parse_cores(settings.cores),
            deterministic=settings.deterministic,
        ),
    )


def _maker(settings: WorkerSettings, executor: Callable[[], Executor]) -> Callable[[], Compute]:
    def make() -> Compute:
        built = executor()
        info = built.info
        shape = BatchShape(
            settings.slots, info.max_len, info.block_tokens, info.blocks_total, info.vocab_size
        )
        return Compute(built, Batch(shape, info.fingerprint))

    return make


def _read_config(folder: Path) -> tuple[int, int]:
    """(vocabulary size, context) of a model folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        return int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{path} does not say vocab_size and max_position_embeddings: {error!r}"
        ) from None
