"""Which executor a worker computes with, and on which runner, by its settings.

torch is imported only when a model is really computed: a mock runs on a machine without it.
"""

import json
from pathlib import Path

from services.worker.collective.port import LOOPBACK, Collective
from services.worker.compute import Compute
from services.worker.engine.native.build import KernelsUnavailable
from services.worker.group.form import lead
from services.worker.group.layout import layout_of
from services.worker.mock import MockCosts, MockExecutor
from services.worker.runner import InlineRunner, Runner, ThreadRunner
from services.worker.settings import WorkerSettings, parse_bytes, parse_cores
from services.worker.shape import BatchShape
from services.worker.slots import Batch
from services.worker.step import Executor, ExecutorInfo
from services.worker.tier.port import HasKvMemory
from services.worker.tier.rates import PrefillRate
from services.worker.tier.second import SecondTier, Whose
from shared.model import ModelError
from shared.runtime.settings import SettingsError, parse_size
from shared.subjects import TIER

UNSERVABLE = (ModelError, KernelsUnavailable, ValueError, OSError)
"""What building an executor raises where a person has to mend something: weights, formats, sizes."""

MOCK_BLOCK_TOKENS = 16
"""Of a mock that is told none: its blocks cost nothing, whatever their size."""

MOCK_MAX_LEN = 8192
"""Context of a mock for which neither settings nor a model folder name one."""


def make_runner(settings: WorkerSettings) -> Runner:
    """The runner, not started. Raises `SettingsError` for settings that contradict each other."""
    layout_of(settings)
    if settings.instance.startswith(TIER):
        raise SettingsError(
            f"HORTATOR_INSTANCE={settings.instance}: names that begin with {TIER} are those of second tiers; "
            "take another"
        )
    if not (settings.mock or settings.model_dir):
        raise SettingsError("HORTATOR_MODEL_DIR is empty: name a model folder, or set HORTATOR_MOCK=1")
    if settings.tp > 1:
        return ThreadRunner(lambda: _lead(settings))
    inline = settings.mock and not _costs(settings).any
    runner = InlineRunner if inline else ThreadRunner
    return runner(lambda: _alone(settings))


def build_executor(settings: WorkerSettings, collective: Collective) -> Executor:
    """What one rank computes with. Raises what its construction does."""
    if settings.mock:
        return mock_executor(settings, _costs(settings), collective)
    return torch_executor(settings, collective)


def batch_for(settings: WorkerSettings, info: ExecutorInfo) -> Batch:
    shape = BatchShape(settings.slots, info.max_len, info.block_tokens, info.blocks_total, info.vocab_size)
    return Batch(shape, info.fingerprint)


def tier_for(settings: WorkerSettings, executor: Executor, part: int = 0) -> SecondTier | None:
    """What keeps the blocks of this rank elsewhere as well; None: nothing does. Raises ValueError."""
    staging = parse_size("tier_staging", settings.tier_staging)
    memory = executor.kv_memory if staging and isinstance(executor, HasKvMemory) else None
    if memory is None:
        return None
    info = executor.info
    tier = SecondTier(
        memory, Whose(settings.model, part, settings.tp), info.block_tokens, info.blocks_total, staging
    )
    tier.prefill = PrefillRate(info.prefill_tok_s)
    return tier


def _alone(settings: WorkerSettings) -> Compute:
    executor = build_executor(settings, LOOPBACK)
    return Compute(executor, batch_for(settings, executor.info), tier=tier_for(settings, executor))


def _lead(settings: WorkerSettings) -> Compute:
    executor, relay = lead(settings, build_executor)
    batch = batch_for(settings, executor.info)
    return Compute(executor, batch, relay=relay, tier=tier_for(settings, executor))


def _costs(settings: WorkerSettings) -> MockCosts:
    return MockCosts(settings.mock_step_s, settings.mock_token_s)


def mock_executor(settings: WorkerSettings, costs: MockCosts, collective: Collective = LOOPBACK) -> Executor:
    vocab_size, max_len = settings.mock_vocab, MOCK_MAX_LEN
    if settings.model_dir:
        vocab_size, max_len = _read_config(Path(settings.model_dir))
    info = ExecutorInfo(
        fingerprint=f"mock-{vocab_size}",
        block_tokens=settings.block_tokens or MOCK_BLOCK_TOKENS,
        blocks_total=settings.mock_blocks,
        max_len=min(settings.max_len or max_len, max_len)
        if settings.model_dir
        else settings.max_len or max_len,
        vocab_size=vocab_size,
        prefill_tok_s=1 / costs.token_s if costs.token_s else 1e6,
        decode_step_s=costs.step_s + costs.token_s if costs.any else 1e-4,
        detail=(("executor", "mock"),),
    )
    return MockExecutor(info, settings.slots, costs, collective)


def torch_executor(settings: WorkerSettings, collective: Collective = LOOPBACK) -> Executor:
    from services.worker.engine.executor import EngineOptions, TorchExecutor
    from services.worker.engine.runtime_memory import runtime_bytes

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
            most_tokens=settings.max_step_tokens,
            slots=settings.slots,
            runtime_bytes=runtime_bytes(),
            staging_bytes=parse_size("tier_staging", settings.tier_staging),
        ),
        collective,
    )


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
