"""One rank of a group as a process: `python collective_rank.py '<json>'`, descriptors inherited.

Prints a line when it has joined and one for the outcome: `done <digest>` or `lost <seconds> <reason>`.
"""

import hashlib
import json
import socket
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from services.worker.collective.native import NativeCollective
from services.worker.collective.port import GroupLost


def main() -> None:
    told = json.loads(sys.argv[1])
    peers = {int(rank): socket.socket(fileno=fd) for rank, fd in told["peers"].items()}
    end = NativeCollective(told["rank"], told["size"], told["memory"], peers, spin_us=told["spin_us"])
    end.set_table([(1 << 40, told["algorithm"])])
    rng, digest = np.random.default_rng(told["rank"]), hashlib.sha256()
    values = np.empty(told["floats"], np.float32)
    last = time.monotonic()
    try:
        for number in range(told["sums"]):
            values[...] = rng.standard_normal(told["floats"])
            end.all_reduce(values)
            digest.update(values.tobytes())
            last = time.monotonic()
            if number == 3:
                print("running", flush=True)
    except GroupLost as error:
        print(f"lost {time.monotonic() - last:.3f} {error}", flush=True)
    else:
        print(f"done {digest.hexdigest()}", flush=True)
    end.close()


if __name__ == "__main__":
    main()
