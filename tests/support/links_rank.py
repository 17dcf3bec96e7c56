"""`python -m tests.support.links_rank RANK ADDRESS,… PORT`: measure a group's links, print them on rank 0."""

import json
import sys

from services.worker.group.pairwise import measure_links
from tests.support.tp_sockets import connect_all

rank, addresses, port = int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
links = measure_links(rank, len(addresses), connect_all(rank, addresses, port))
if rank == 0:
    print(json.dumps([links.bytes_per_s, links.latency_s]))
