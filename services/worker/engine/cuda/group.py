"""The ranks of a group on CUDA devices: how their tensors are summed, chosen by what is measured.

Formed over a `Collective` between the same ranks, which goes on to carry what is small and of the host.
It has not been run on GPUs yet (docs/gpu.md).
"""

import hashlib
import logging
import socket

import numpy as np
import torch

from services.worker.collective.nccl import Nccl
from services.worker.collective.port import Collective, GroupLost
from services.worker.collective.symmetric import symmetric_ways
from services.worker.collective.tensors import ChosenReducer, Way
from services.worker.collective.torch_dist import shared_store
from services.worker.engine.crossing import crossovers

log = logging.getLogger(__name__)


class DeviceGroup:
    """This rank's device among those of its group. All ranks make one at once, on a device each.

    `most_bytes`: of the longest message. Where ranks are on several hosts, these must find rank 0's by its
    name. Raises ValueError where torch has no NCCL or two ranks share a device, and `GroupLost`.
    """

    def __init__(self, collective: Collective, device: torch.device, most_bytes: int) -> None:
        self._collective = collective
        torch.cuda.set_device(device)
        places = _places(collective, device)
        host = _host_of_rank_0(collective) if len({host for host, _ in places}) > 1 else "127.0.0.1"
        self._nccl = Nccl(shared_store(collective, host), collective.rank, collective.size, device)
        ways = {"nccl": Way(self._nccl.sum)}
        self._why_not = why_not_symmetric(places)
        if self._why_not is None:
            ways |= self._symmetric(device, most_bytes)
        self.reducer = ChosenReducer(collective.rank, collective.size, ways, device, queues=True)
        facts = {
            "ranks": collective.size,
            "places": [host for host, _ in places],
            "devices": [torch.cuda.get_device_name(device), *(str(index) for _, index in places)],
            "algorithms": self.reducer.algorithms(),
            "torch": torch.__version__,
            "nccl": str(torch.cuda.nccl.version()),
        }
        self.table = crossovers(collective, most_bytes, facts, through=self.reducer)

    def detail(self) -> dict[str, str]:
        """For people: how sums go."""
        found = {"sums": ", ".join(self.reducer.algorithms())}
        return found | ({"sums_reason": self._why_not} if self._why_not else {})

    def check(self) -> None:
        """Raise `GroupLost` if the group is, and end what the device waits for."""
        try:
            self._collective.check()
        except GroupLost:
            self._nccl.abort()
            raise

    def _symmetric(self, device: torch.device, most_bytes: int) -> dict[str, Way]:
        """Ways that all ranks have."""
        try:
            ways = symmetric_ways(self._nccl.name, device, most_bytes)
        except (RuntimeError, AttributeError, ImportError) as error:
            self._why_not = f"symmetric memory cannot be had: {str(error).splitlines()[0]}"
            log.warning("%s", self._why_not)
            ways = {}
        names = ", ".join(ways).encode().ljust(256)
        everywhere = self._collective.gather(np.frombuffer(names, np.uint8))
        if bool((everywhere == everywhere[0]).all()):
            return ways
        self._why_not = self._why_not or "some rank has no symmetric memory"
        return {}


def _places(collective: Collective, device: torch.device) -> list[tuple[str, int]]:
    """(host, index of the device) of every rank. Raises ValueError if two are the same."""
    index = device.index or 0
    name = hashlib.sha256(f"{socket.gethostname()} {_boot_id()}".encode()).digest()[:8]
    rows = collective.gather(np.frombuffer(name + index.to_bytes(4, "little"), np.uint8))
    places = [(row[:8].tobytes().hex(), int(row[8:].view(np.int32)[0])) for row in rows]
    if len(set(places)) < len(places):
        raise ValueError(f"ranks are on devices {[i for _, i in places]}: give each its own (--device)")
    return places


def why_not_symmetric(places: list[tuple[str, int]]) -> str | None:
    """Why devices at these (host, index) cannot see each other's memory, or None; the same on all ranks."""
    hosts = {host for host, _ in places}
    if len(hosts) > 1:
        return f"ranks are on {len(hosts)} hosts"
    if max(index for _, index in places) >= torch.cuda.device_count():
        return "not every rank sees all devices of the group"
    for _, one in places:
        for _, other in places:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"cuda:{one} cannot see the memory of cuda:{other}"
    return None


def _host_of_rank_0(collective: Collective) -> str:
    name = socket.gethostname().encode().ljust(256, b"\0")
    return collective.gather(np.frombuffer(name, np.uint8))[0].tobytes().rstrip(b"\0").decode()


def _boot_id() -> str:
    """Told apart from other machines of the same name; containers of one machine have it in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
