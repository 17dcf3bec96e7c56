"""One full example of every message kind, and the program that writes their golden bytes.

`python tests/wire/golden_messages.py` adds files for kinds that have none. It never rewrites one: the bytes
of a release are what older and newer processes of a mesh exchange, so a difference is a fault of the change.
"""

import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from shared.wire import (  # noqa: E402
    Ack,
    Admit,
    Answer,
    Beacon,
    Beat,
    Cancel,
    Claim,
    Claimed,
    Done,
    Drain,
    EndRow,
    Extend,
    Fetch,
    Fetched,
    Goodbye,
    InstanceInfo,
    Inventory,
    KvEvents,
    KvOp,
    LogprobRow,
    PromptLogprobRow,
    Ready,
    Refused,
    Restate,
    Resync,
    Sampling,
    SeqTimes,
    SlotLogprobs,
    SlotPromptLogprobs,
    Step,
    StepTiming,
    Stopped,
    Stored,
    Submit,
    SubmitSeq,
    TierOffer,
    TokenRow,
    Tokens,
    Wire,
    Work,
    encode,
)

HASH = bytes(range(32))

SAMPLING = Sampling(
    max_tokens=64,
    seed=0xFEDC_BA98_7654_3210,
    temperature=0.5,
    top_k=40,
    top_p=0.75,
    min_p=0.125,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias=((7, -100.0), (9, 2.5)),
    logprobs=2,
    prompt_logprobs=0,
    min_tokens=1,
    stop_token_ids=(0, 2),
)

INFO = InstanceInfo(
    instance="w0",
    model="smollm2-135m-instruct",
    fingerprint="abc123",
    role="mixed",
    state="ready",
    born=1_764_400_000_000_000,
    block_tokens=16,
    blocks_total=1000,
    max_slots=64,
    max_len=8192,
    vocab_size=49_152,
    max_step_tokens=2048,
    prefill_tok_s=512.5,
    decode_step_s=0.0625,
    tp=2,
    version="0.1.0",
    detail=(("dtype", "float16"), ("threads", "2")),
    tier="tier-kv0-0f1e2d3c",
    tier_fixed_s=0.001,
    tier_block_s=0.0004,
)

EXAMPLES: dict[str, Wire] = {
    "submit": Submit(
        client="gw-1",
        request_id="req 1 ü",
        prompt=[1, 70_000, 3],
        seqs=[SubmitSeq(4, 0, [11, 12]), SubmitSeq(5, 1)],
        sampling=SAMPLING,
        priority=-1,
        timeout_s=30.5,
        queue_timeout_s=5.0,
        salt="tenant",
        pin="w0",
    ),
    "cancel": Cancel(client="gw-1", request_id="r", handles=[4, 5]),
    "ack": Ack(client="gw-1", epoch=3, owner="s-1", seq=99, resend=True),
    "tokens": Tokens(
        epoch=3,
        owner="s-1",
        seq=17,
        answers=[Answer("r", "queue_full", "come back", 1.5)],
        rows=[TokenRow(4, 2, 10, [101, 102])],
        logprobs=[LogprobRow(4, 10, [-0.5, -1.25], [[(101, -0.5), (7, -2.0)], []])],
        prompt_logprobs=[PromptLogprobRow(4, 1, [-0.25], [[(3, -0.25)]])],
        ends=[
            EndRow(
                4,
                2,
                "stop",
                12,
                16,
                "done",
                SeqTimes(0.5, 0.25, 0.0, 0.0, 1.5, 0.125, 0.0625, 0.03125),
                preemptions=1,
            )
        ],
    ),
    "step": Step(
        instance="w0",
        epoch=3,
        owner="s-1",
        incarnation=2,
        seq=41,
        admit=[Admit(1, 0, 3, [5, 6, 7, 8], 0, [10, 11], SAMPLING, "tenant")],
        work=[Work(1, 4), Work(2, 0)],
        blocks=[Extend(3, [12, 13])],
        release=[9],
        kv_ops=[KvOp("copy", 10, 14)],
        offload=[4],
        fetch=[Fetch(7, "tier-kv0-0f1e2d3c", [20, 21], [HASH, HASH[::-1]])],
    ),
    "done": Done(
        instance="w0",
        epoch=3,
        owner="s-1",
        incarnation=2,
        seq=41,
        slots=[1, 3],
        tokens=[101, 49_151],
        stopped=[Stopped(3, "error", "logits are not finite")],
        stored=[Stored(10, HASH)],
        logprobs=[SlotLogprobs(1, -0.5, [(101, -0.5)])],
        prompt_logprobs=[SlotPromptLogprobs(1, 1, [-0.75], [[(6, -0.75)]])],
        timing=StepTiming(1500, 20, 3, 4, 1),
    ),
    "beat": Beat(
        info=INFO, incarnation=2, epoch=3, owner="s-1", seen_seq=41, done_seq=40, fetched=[Fetched(7, 1, 900)]
    ),
    "resync": Resync(instance="w0", epoch=3, owner="s-1", incarnation=2, have_seq=39),
    "refused": Refused(instance="w0", epoch=4, owner="s-2"),
    "goodbye": Goodbye(instance="w0", incarnation=2, reason="drained"),
    "claim": Claim(epoch=3, owner="s-1", claim_id="c1"),
    "claimed": Claimed(
        ok=True,
        epoch=3,
        owner="s-1",
        incarnation=2,
        info=INFO,
        claim_id="c1",
        blocks=[Stored(10, HASH), Stored(11, HASH[::-1])],
        next_offset=2,
    ),
    "inventory": Inventory(incarnation=2, offset=10_000),
    "drain": Drain(undo=True),
    "ready": Ready(),
    "beacon": Beacon(model="m", epoch=3, owner="s-1", instances={"w0": (2, 41)}, clients={"gw-1": 17}),
    "kv_events": KvEvents(
        instance="w0", born=INFO.born, seq=8, info=INFO, stored=[HASH], removed=[HASH[::-1]], restate="begin"
    ),
    "tier_offer": TierOffer(
        instance="kv0",
        host="10.0.0.7",
        port=7100,
        secret="s3cret",
        born=1_764_400_000_000_001,
        memory_bytes=1 << 30,
        disk_bytes=1 << 33,
    ),
    "restate": Restate(instance="w0", reason="gap"),
}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for kind, message in EXAMPLES.items():
        path = GOLDEN / f"{kind}.v1.bin"
        if not path.exists():
            path.write_bytes(encode(message))
            print(f"wrote {path.name}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
