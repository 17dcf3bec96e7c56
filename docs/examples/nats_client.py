#!/usr/bin/env python3
"""A whole internal client of the mesh: nats-py and msgpack, nothing of Hortator.

Usage: nats_client.py NATS_URL MODEL ID [ID ...]     (token ids of the prompt)
User and password come from NATS_USER and NATS_PASSWORD. Prints the ids as they come.
"""

import asyncio
import os
import re
import secrets
import sys

import msgpack
import nats
import nats.errors

PATIENCE_S = 5.0
"""A mesh that serves the model answers a submit at once."""


async def connect(url: str) -> nats.NATS:
    user = os.environ.get("NATS_USER", "")

    async def on_error(error: Exception) -> None:
        """The library would print a traceback of what `connect` raises anyway."""

    attempt = nats.connect(
        url, user=user or None, password=os.environ.get("NATS_PASSWORD"), allow_reconnect=False,
        inbox_prefix=f"_INBOX.{user or 'any'}".encode(), pending_size=0, error_cb=on_error,
    )  # fmt: skip
    try:
        return await asyncio.wait_for(attempt, PATIENCE_S)
    except (nats.errors.Error, OSError, TimeoutError) as error:
        why = str(error) or "nobody answers there"
        raise SystemExit(f"no session with {url} as {user or 'nobody'}: {why}") from None


async def main(url: str, model: str, prompt: list[int]) -> None:
    broker = await connect(url)
    subject = f"hortator.v1.submit.{re.sub('[^A-Za-z0-9_-]', '-', model)[:64]}"
    client, request = f"example-{secrets.token_hex(6)}", secrets.token_hex(8)
    frames: asyncio.Queue[dict] = asyncio.Queue()

    async def take(message) -> None:
        await frames.put(msgpack.unpackb(message.data))

    await broker.subscribe(f"hortator.v1.tokens.{client}", cb=take)
    submit = {
        "kind": "submit", "client": client, "request_id": request, "prompt": prompt,
        "seqs": [[1, 0]],  # handle 1 is choice 0
        "sampling": {"max_tokens": 16, "temperature": 0.0},
    }  # fmt: skip
    ack = {"kind": "ack", "client": client, "seq": 0}
    give_up = asyncio.get_running_loop().time() + PATIENCE_S
    known, reason = False, None
    while reason is None:
        if not known:
            if asyncio.get_running_loop().time() > give_up:
                raise SystemExit(f"no answer within {PATIENCE_S:.0f} s: does a mesh serve {model!r} here?")
            await broker.publish(subject, msgpack.packb(submit))
        try:
            frame = await asyncio.wait_for(frames.get(), 0.3)
        except TimeoutError:
            frame = {}
        if frame.get("seq") == ack["seq"] + 1:  # in order only; others are sent again after our ack
            ack |= {"seq": frame["seq"], "epoch": frame["epoch"], "owner": frame["owner"]}
            for request_id, code, message, *_ in ([*row, "", 0.0] for row in frame.get("answers", [])):
                if request_id == request and code != "accepted":
                    raise SystemExit(f"refused: {code} {message}")
                known = True
            for _handle, _attempt, _index, ids in frame.get("rows", []):
                known = True
                print(*ids, end=" ", flush=True)
            for row in frame.get("ends", []):
                reason = row[2]
        if "owner" in ack:  # also without news: it is what keeps the request alive
            await broker.publish(f"hortator.v1.ack.{client}", msgpack.packb(ack))
    print(f"\nended: {reason}")
    await broker.close()


if __name__ == "__main__":
    try:
        url, model, *prompt = sys.argv[1:]
        ids = [int(text) for text in prompt]
    except ValueError:
        ids = []
    if not ids:
        sys.exit((__doc__ or "").strip())
    try:
        asyncio.run(main(url, model, ids))
    except nats.errors.Error as error:
        sys.exit(f"the session with NATS has ended: {error}")
