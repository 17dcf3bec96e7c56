#!/usr/bin/env python3
"""A whole internal client of the mesh: nats-py and msgpack, nothing of Hortator.

Usage: nats_client.py NATS_URL MODEL_SUBJECT ID [ID ...]     (token ids of the prompt)
User and password come from NATS_USER and NATS_PASSWORD. Prints the ids as they come.
"""

import asyncio
import os
import secrets
import sys

import msgpack
import nats


async def main(url: str, model: str, prompt: list[int]) -> int:
    user = os.environ.get("NATS_USER", "")
    broker = await nats.connect(
        url, user=user or None, password=os.environ.get("NATS_PASSWORD"),
        inbox_prefix=f"_INBOX.{user or 'any'}".encode(), pending_size=0,
    )  # fmt: skip
    client, request = f"example-{secrets.token_hex(6)}", secrets.token_hex(8)
    frames: asyncio.Queue[dict] = asyncio.Queue()

    async def take(message) -> None:
        await frames.put(msgpack.unpackb(message.data))

    await broker.subscribe(f"hortator.v1.tokens.{client}", cb=take)
    submit = msgpack.packb(
        {
            "kind": "submit", "client": client, "request_id": request, "prompt": prompt,
            "seqs": [[1, 0]],  # handle 1 is choice 0
            "sampling": {"max_tokens": 16, "temperature": 0.0},
        }
    )  # fmt: skip
    known, wanted, reason = False, 1, None
    while reason is None:
        if not known:
            await broker.publish(f"hortator.v1.submit.{model}", submit)
        try:
            frame = await asyncio.wait_for(frames.get(), 0.3)
        except TimeoutError:
            continue
        if frame["seq"] == wanted:  # in order only; others are sent again after our ack
            wanted += 1
            for request_id, code, message, *_ in ([*row, "", 0.0] for row in frame.get("answers", [])):
                if request_id == request and code != "accepted":
                    raise SystemExit(f"refused: {code} {message}")
                known = True
            for _handle, _attempt, _index, ids in frame.get("rows", []):
                known = True
                print(*ids, end=" ", flush=True)
            for row in frame.get("ends", []):
                reason = row[2]
        ack = {
            "kind": "ack",
            "client": client,
            "epoch": frame["epoch"],
            "owner": frame["owner"],
            "seq": wanted - 1,
        }
        await broker.publish(f"hortator.v1.ack.{client}", msgpack.packb(ack))
    print(f"\nended: {reason}")
    await broker.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1], sys.argv[2], [int(a) for a in sys.argv[3:]])))
