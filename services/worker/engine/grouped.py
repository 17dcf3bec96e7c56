"""The decoder of one rank of a tensor-parallel group: the same kind on all ranks, and measured together.

Every rank runs this at once and makes the same calls: what is decided here is decided by what all have told.
"""

import math
import os
from dataclasses import replace

import numpy as np
import torch

from services.worker.collective.port import Collective
from services.worker.engine import cores
from services.worker.engine.choose import (
    Candidate,
    Choice,
    Scope,
    Speed,
    kinds_of_kernels,
    measure_speed,
)
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.cuda.group import DeviceGroup
from services.worker.engine.cuda.planning import ROWS, plan_by_measuring
from services.worker.engine.decoder import Decoder, TorchDecoder
from services.worker.engine.device import Device
from services.worker.engine.kvcache import KvCache
from services.worker.engine.native.build import KernelsUnavailable
from services.worker.engine.native.decoder import Kernels, NativeDecoder
from services.worker.engine.shards import ShardedFolder, shard_of
from services.worker.engine.weights import ModelFolder

_REPEATS = 3


def choose_in_group(
    folder: ModelFolder, device: Device, kv: KvCache, scope: Scope, collective: Collective
) -> Choice:
    """This rank's decoder, its speed as rank 0 measured it. Writes into block 0 onwards.

    Native kernels unless a rank lacks them. Threads are as many as asked for, or the rank's own cores; they
    are pinned to these if nobody else has them. Raises `KernelsUnavailable` if `scope` insists on native
    kernels and some rank has none, ValueError for what devices do not do, and `GroupLost`.
    """
    if device.torch.type != "cpu":
        return _on_devices(folder, device, kv, scope, collective)
    native, reason = _agree_on_native(folder, kv, scope, collective)
    threads = scope.asked_threads() or max(1, len(scope.cores))
    pinned = native and len(scope.cores) >= threads and cores.claim(scope.cores[:threads])
    candidate = Candidate("native" if native else "torch", threads, pinned)
    decoder: Decoder
    if native:
        shard = _part(folder, collective, filled=False)
        kernels = _pinned(scope.cores[:threads]) if pinned else Kernels(threads)
        torch.set_num_threads(1)
        decoder = NativeDecoder(kernels, shard, device.form, kv, collective)
    else:
        torch.set_num_threads(threads)
        shard = _part(folder, collective, filled=True)
        decoder = TorchDecoder(shard, device, kv, scope.deterministic, collective)
    own = measure_speed(decoder, kv, folder.config.max_len, math.inf, repeats=_REPEATS)
    speed = _of_rank_0(own, collective)
    return Choice(decoder, candidate, speed, (), reason, f"one of {collective.size} ranks")


def _on_devices(
    folder: ModelFolder, device: Device, kv: KvCache, scope: Scope, collective: Collective
) -> Choice:
    """As `choose_in_group`, of ranks with a device each."""
    kind = device.torch.type
    if scope.kernels not in ("auto", "torch") or scope.deterministic:
        raise ValueError(f"neither --kernels {scope.kernels} nor --deterministic is computed on {kind}")
    shard = _part(folder, collective, filled=True)
    decoder: Decoder
    if scope.kernels == "torch":
        decoder = TorchDecoder(shard, device, kv, collective=collective)
    else:
        most_bytes = 4 * folder.config.hidden * max(ROWS)
        group = DeviceGroup(collective, device.torch, most_bytes)
        decoder = CudaDecoder(shard, kv, getattr(torch, device.weight_dtype), reducer=group.reducer)
        decoder.joins(group)
        plan_by_measuring(decoder, kv, collective, group.table)
    own = measure_speed(decoder, kv, folder.config.max_len, math.inf, repeats=_REPEATS)
    candidate = Candidate("cuda" if scope.kernels == "auto" else "torch", torch.get_num_threads())
    return Choice(
        decoder,
        candidate,
        _of_rank_0(own, collective),
        (),
        f"{scope.kernels} on {kind}",
        f"one of {collective.size} ranks",
    )


def _part(folder: ModelFolder, collective: Collective, filled: bool) -> ShardedFolder:
    """This rank's part, which nobody goes on loading once the group is lost."""
    return shard_of(folder, collective.rank, collective.size, filled, collective.check)


def _agree_on_native(
    folder: ModelFolder, kv: KvCache, scope: Scope, collective: Collective
) -> tuple[bool, str | None]:
    """Whether all ranks compute with native kernels, and why not."""
    wanted = "auto" if scope.kernels == "native" else scope.kernels
    kinds, reason = kinds_of_kernels(folder.config, kv, wanted)
    have = collective.gather(np.array([kinds[0] == "native"], np.uint8))[:, 0]
    if have.all():
        return True, None
    lacking = [rank for rank, has in enumerate(have) if not has]
    reason = reason or f"rank {lacking[0]} has none"
    if scope.kernels == "native":
        raise KernelsUnavailable(f"{reason} (ranks without native kernels: {lacking})")
    return False, reason


def _pinned(own: tuple[int, ...]) -> Kernels:
    """A team whose members stay on `own`, this thread on the first; threads inherit the starter's cores."""
    os.sched_setaffinity(0, own[1:] or own)
    team = Kernels(len(own))
    os.sched_setaffinity(0, own[:1])
    return team


def _of_rank_0(own: Speed, collective: Collective) -> Speed:
    told = np.array([own.prefill_tok_s, own.decode_step_s])
    prefill, decode = collective.gather(told.view(np.uint8))[0].view(np.float64)
    return replace(own, prefill_tok_s=float(prefill), decode_step_s=float(decode))
