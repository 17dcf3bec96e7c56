"""A mock worker on a bus in memory, spoken to frame by frame as a scheduler would (docs/protocol.md §3)."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import generate_latest

from services.worker.service import EngineFailed
from services.worker.settings import WorkerSettings
from shared import subjects
from shared.blocks import chain, root_hash
from shared.bus.memory import MemoryBus
from shared.ids import BlockHash
from shared.wire import (
    Admit,
    Beat,
    Claimed,
    Done,
    Drain,
    Extend,
    Goodbye,
    Inventory,
    KvEvents,
    Ready,
    Refused,
    Restate,
    Resync,
    Sampling,
    Stopped,
    Work,
)
from tests.support.fake_scheduler import FakeScheduler
from tests.support.running_worker import Worker, running

MOCK = WorkerSettings(
    instance="w0", model="m", mock=True, max_len=256, mock_vocab=1000, mock_blocks=64, max_slots=8
)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running(MOCK) as worker:
        yield worker


@pytest.fixture
async def scheduler(worker: Worker) -> FakeScheduler:
    scheduler = worker.scheduler()
    await scheduler.connect()
    await scheduler.claim()
    return scheduler


def admission(
    slot: int = 0, length: int = 20, blocks: tuple[int, ...] = (0, 1, 2, 3), **sampling: object
) -> Admit:
    how = Sampling(max_tokens=30, seed=7, **sampling)  # type: ignore[arg-type]
    return Admit(slot, 0, length, list(range(100, 100 + length)), 0, list(blocks), how)


async def test_a_claim_names_the_instance_its_blocks_and_a_fresh_incarnation(worker: Worker) -> None:
    scheduler = worker.scheduler()
    await scheduler.connect()
    first = await scheduler.claim()
    second = await scheduler.claim()
    assert (first.ok, first.epoch, first.owner) == (True, 1, "fake")
    assert (first.info.instance, first.info.blocks_total, first.info.max_slots) == ("w0", 64, 8)
    assert (first.info.vocab_size, first.info.max_len, first.info.state) == (1000, 256, "ready")
    assert second.incarnation > first.incarnation > first.info.born


async def test_a_repeated_claim_is_answered_with_the_same_incarnation(scheduler: FakeScheduler) -> None:
    assert (await scheduler.claim("again")).incarnation == (await scheduler.claim("again")).incarnation


async def test_prompt_chunks_and_decodes_come_back_with_tokens_timing_and_hashes(
    scheduler: FakeScheduler,
) -> None:
    first = await scheduler.step(admit=[admission()], work=[Work(0, 12)])
    second = await scheduler.step(work=[Work(0, 8)])
    third = await scheduler.step()
    assert (first.slots, first.tokens) == ([], [])
    assert (first.timing.prefill_tokens, second.timing.prefill_tokens, third.timing.decode_tokens) == (
        12,
        8,
        1,
    )
    assert second.slots == third.slots == [0]
    ids = [*range(100, 120), *second.tokens]
    assert scheduler.claimed is not None
    root = root_hash(scheduler.claimed.info.fingerprint, 16)
    assert [(row.block, row.hash) for row in second.stored] == [(0, chain(root, ids, 16)[0])]


async def test_frames_in_flight_give_the_tokens_of_frames_sent_one_by_one(worker: Worker) -> None:
    how = [Sampling(max_tokens=40, seed=seed) for seed in range(12)]
    prompts = [list(range(start, start + 5 + start)) for start in range(12)]
    one = worker.scheduler(owner="b", in_flight=1)
    await one.connect()
    alone = await one.generate(prompts, how, chunk=7)
    many = worker.scheduler(owner="a", in_flight=4)
    await many.connect()
    ahead = await many.generate(prompts, how, chunk=512)
    assert [s.tokens for s in ahead] == [s.tokens for s in alone]
    assert all(len(s.tokens) == 40 and s.finished == "length" for s in ahead)


async def test_a_repeated_frame_brings_its_result_again_and_runs_once(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    second = await scheduler.step()
    del scheduler.done[second.seq]
    await scheduler.send(scheduler.sent[-1])
    assert await scheduler.result(second.seq) == second
    assert (await scheduler.step()).tokens != second.tokens
    assert b'hortator_worker_frames_total{verdict="duplicate"} 1.0' in generate_latest(worker.registry)


async def test_a_gap_asks_for_what_is_missing_and_the_replay_runs(scheduler: FakeScheduler) -> None:
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    lost, after = scheduler.frame(), scheduler.frame()
    await scheduler.send(after)
    resync = await scheduler.hear(Resync)
    assert (resync.have_seq, resync.incarnation) == (1, scheduler.incarnation)
    await scheduler.send(lost)
    await scheduler.send(after)
    assert (await scheduler.result(after.seq)).slots == [0]
    assert lost.seq in scheduler.done


async def test_a_storm_of_gaps_is_named_once(worker: Worker, scheduler: FakeScheduler) -> None:
    scheduler.frame()
    for _ in range(20):
        await scheduler.send(scheduler.frame())
    await worker.broker.settle()
    await scheduler.hear(Resync)
    assert sum(isinstance(message, Resync) for message in scheduler.heard) == 1


async def test_a_beacon_exposes_a_lost_last_frame(scheduler: FakeScheduler) -> None:
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    scheduler.frame()
    await scheduler.beacon()
    assert (await scheduler.hear(Resync)).have_seq == 1


async def test_every_beacon_that_does_not_list_the_instance_is_answered_with_a_beat(worker: Worker) -> None:
    scheduler = worker.scheduler()
    await scheduler.connect()
    for _ in range(10):
        await scheduler.beacon(instances={})
    # By themselves ten beats take five seconds.
    await scheduler.hear(Beat, lambda beat: beat.epoch == 1, times=10, timeout_s=4)


async def test_a_beacon_of_another_model_is_nobodys_business(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    await scheduler.beacon(model="other", epoch=99, owner="x", instances={})
    assert (await scheduler.step()).seq == 1


async def test_a_new_leader_takes_over_and_the_old_one_is_refused(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    successor = worker.scheduler(epoch=2, owner="next")
    await successor.connect()
    claimed = await successor.claim()
    assert [row.block for row in claimed.blocks] == [0]
    await scheduler.send(scheduler.frame())
    refused = await scheduler.hear(Refused)
    assert (refused.epoch, refused.owner) == (2, "next")
    denied = await scheduler.claim()
    assert (denied.ok, denied.epoch, denied.owner) == (False, 2, "next")
    done = await successor.step(admit=[admission(blocks=(4, 5, 6, 7))], work=[Work(0, 20)])
    assert done.slots == [0]


async def test_a_beacon_of_a_higher_epoch_fences_before_its_claim_arrives(scheduler: FakeScheduler) -> None:
    await scheduler.beacon(epoch=5, owner="higher", instances={})
    await scheduler.hear(Beat, lambda beat: beat.epoch == 5)
    await scheduler.send(scheduler.frame())
    assert (await scheduler.hear(Refused)).epoch == 5


async def test_a_cached_prefix_survives_a_takeover_and_is_verified(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    await scheduler.step(admit=[admission(length=40)], work=[Work(0, 40)])
    successor = worker.scheduler(epoch=2)
    await successor.connect()
    hits = [row.block for row in (await successor.claim()).blocks]
    assert hits == [0, 1]
    ids = list(range(100, 140))
    again = Admit(0, 0, 40, ids, 32, [0, 1, 9], Sampling(max_tokens=30, seed=7))
    warm = await successor.step(admit=[again], work=[Work(0, 8)])
    assert warm.tokens == scheduler.done[1].tokens


async def test_a_contradictory_frame_ends_the_session_and_the_next_claim_heals_it(
    scheduler: FakeScheduler,
) -> None:
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    broken = scheduler.incarnation
    await scheduler.send(scheduler.frame(admit=[admission(slot=1, blocks=(99,))]))
    await scheduler.send(scheduler.frame())
    beat = await scheduler.hear(Beat, lambda beat: beat.info.state == "failed")
    assert "block is 99, allowed is 0 to 63" in dict(beat.info.detail)["failure"]
    assert beat.incarnation > broken
    assert 2 not in scheduler.done
    assert 3 not in scheduler.done
    claimed = await scheduler.claim()
    assert claimed.info.state == "ready"
    assert [row.block for row in claimed.blocks] == [0]
    assert (await scheduler.step(admit=[admission()], work=[Work(0, 20)])).slots == [0]


async def test_a_request_that_cannot_be_computed_ends_alone(scheduler: FakeScheduler) -> None:
    foreign = Admit(1, 0, 3, [1, 2, 5000], 0, [4], Sampling(max_tokens=4))
    done = await scheduler.step(admit=[admission(), foreign], work=[Work(0, 20), Work(1, 3)])
    assert done.slots == [0]
    assert [(row.slot, row.reason) for row in done.stopped] == [(1, "error")]
    assert "outside [0, 1000)" in done.stopped[0].detail


async def test_a_stopped_slot_ignores_frames_sent_before_its_end_was_known(scheduler: FakeScheduler) -> None:
    probe = await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    stop = probe.tokens[0]
    await scheduler.claim()
    frames = [scheduler.frame(admit=[admission(stop_token_ids=(stop,))], work=[Work(0, 20)])]
    frames += [scheduler.frame(blocks=[Extend(0, [9])]), scheduler.frame(work=[Work(0, 1)])]
    for frame in frames:
        await scheduler.send(frame)
    results = [await scheduler.result(frame.seq) for frame in frames]
    assert results[0].stopped == [Stopped(0, "stop")]
    assert results[1].slots == results[2].slots == []


async def test_a_result_too_large_for_the_broker_ends_only_the_sequence_that_made_it_so() -> None:
    async with running(MOCK, max_payload=20_000) as worker:
        scheduler = worker.scheduler()
        await scheduler.connect()
        await scheduler.claim()
        wordy = Admit(
            1, 0, 200, list(range(200)), 0, list(range(4, 17)), Sampling(max_tokens=4, prompt_logprobs=20)
        )
        done = await scheduler.step(admit=[admission(), wordy], work=[Work(0, 20), Work(1, 200)])
        assert [(row.slot, row.reason) for row in done.stopped] == [(1, "error")]
        assert "exceed the broker's limit" in done.stopped[0].detail
        assert (await scheduler.step(release=[1])).slots == [0]


async def test_idle_time_counts_as_starvation_only_while_sequences_run(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    def starved() -> float:
        value = worker.registry.get_sample_value("hortator_worker_starved_seconds_total")
        assert value is not None
        return value

    await scheduler.step()
    assert starved() == 0
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    await scheduler.step()
    while_running = starved()
    assert while_running > 0
    await scheduler.step(release=[0])
    before = starved()
    await scheduler.step()
    assert starved() == before


async def test_an_inventory_is_paged_and_belongs_to_one_incarnation(
    worker: Worker, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.hashes.PAGE", 2)
    await scheduler.step(admit=[admission(length=60, blocks=(5, 3, 8, 2))], work=[Work(0, 60)])
    claimed = await scheduler.claim()
    pages = [claimed]
    while pages[-1].next_offset:
        page: Claimed = await scheduler.ask(
            "inventory", Inventory(incarnation=scheduler.incarnation, offset=pages[-1].next_offset)
        )
        pages.append(page)
    assert [[row.block for row in page.blocks] for page in pages] == [[3, 5], [8]]
    assert not (await scheduler.ask("inventory", Inventory(incarnation=1, offset=0))).ok


async def test_drain_shows_in_beats_and_can_be_undone(scheduler: FakeScheduler) -> None:
    assert (await scheduler.ask("drain", Drain())).info.state == "draining"
    assert (await scheduler.ask("drain", Drain())).info.state == "draining"
    assert (await scheduler.step(admit=[admission()], work=[Work(0, 20)])).slots == [0]
    assert (await scheduler.ask("ready", Ready())).info.state == "draining"
    assert (await scheduler.ask("drain", Drain(undo=True))).info.state == "ready"


async def test_kv_events_are_gapless_and_a_restate_begins_anew(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    heard: list[KvEvents] = []
    news = asyncio.Event()
    bus: MemoryBus = worker.broker.connect()

    def hear(event: KvEvents) -> None:
        heard.append(event)
        news.set()

    async def until(kind: str, **fields: object) -> KvEvents:
        async with asyncio.timeout(5):
            while True:
                for event in heard:
                    if event.restate == kind and all(getattr(event, k) for k in fields):
                        return event
                news.clear()
                await news.wait()

    await bus.subscribe(subjects.KV_EVENTS.at(instance="w0"), hear)
    done = await scheduler.step(admit=[admission(length=40)], work=[Work(0, 40)])
    hashes = [BlockHash(row.hash) for row in done.stored]
    assert (await until("", stored=True)).stored == hashes
    # The blocks of a released slot keep their hashes until they are handed out again.
    other = Admit(1, 0, 10, list(range(10)), 0, [0], Sampling(max_tokens=4))
    await scheduler.step(release=[0])
    await scheduler.step(admit=[other], work=[Work(1, 10)])
    assert (await until("", removed=True)).removed == hashes[:1]
    await bus.publish(subjects.KV_RESTATE.at(instance="w0"), Restate(instance="w0"))
    assert (await until("begin")).stored == hashes[1:]
    seqs = [event.seq for event in heard]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


async def test_told_to_stop_the_instance_says_goodbye(worker: Worker, scheduler: FakeScheduler) -> None:
    await worker.stop()
    goodbye = await scheduler.hear(Goodbye)
    assert goodbye.incarnation == scheduler.incarnation


async def test_a_step_that_never_ends_makes_the_instance_unhealthy(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.service.health() == (True, {"state": "ready", "step_running_s": 0.0})
    monkeypatch.setattr(worker.runner, "busy_s", lambda: 30.0)
    assert worker.service.health() == (False, {"state": "ready", "step_running_s": 30.0})


async def test_beats_go_on_and_results_can_be_fetched_after_the_broker_was_away(
    worker: Worker, scheduler: FakeScheduler
) -> None:
    await scheduler.step(admit=[admission()], work=[Work(0, 20)])
    frame = scheduler.frame()
    await scheduler.send(frame)
    worker.broker.stop()
    await asyncio.sleep(0)
    worker.broker.start()
    await scheduler.send(frame)
    assert (await scheduler.result(frame.seq)).slots == [0]


class TestWithAnEngineThread:
    SLOW = WorkerSettings(
        instance="w0",
        model="m",
        mock=True,
        max_len=256,
        mock_vocab=1000,
        mock_blocks=64,
        max_slots=8,
        mock_step_s=0.01,
    )

    async def test_the_same_tokens_come_from_the_thread(self, worker: Worker) -> None:
        prompts, how = [[1, 2, 3], [4, 5]], [Sampling(max_tokens=6, seed=1), Sampling(max_tokens=6, seed=2)]
        inline = worker.scheduler()
        await inline.connect()
        expected = await inline.generate(prompts, how)
        async with running(self.SLOW) as slow:
            scheduler = slow.scheduler(in_flight=3)
            await scheduler.connect()
            assert [s.tokens for s in await scheduler.generate(prompts, how)] == [s.tokens for s in expected]

    async def test_frames_of_a_session_that_is_over_are_dropped_from_the_queue(self) -> None:
        async with running(self.SLOW) as slow:
            scheduler = slow.scheduler()
            await scheduler.connect()
            await scheduler.claim()
            first = scheduler.frame(admit=[admission()], work=[Work(0, 20)])
            await scheduler.send(first)
            for _ in range(30):
                await scheduler.send(scheduler.frame())
            await scheduler.result(first.seq)
            old = scheduler.incarnation
            await scheduler.claim()
            assert (await scheduler.step(admit=[admission(blocks=(8, 9))], work=[Work(0, 20)])).seq == 1
            results: list[Done] = list(slow.service._session._results.values())
            assert {done.incarnation for done in results} == {scheduler.incarnation} != {old}

    async def test_the_step_at_hand_is_finished_before_the_goodbye(self) -> None:
        async with running(self.SLOW) as slow:
            scheduler = slow.scheduler()
            await scheduler.connect()
            await scheduler.claim()
            frame = scheduler.frame(admit=[admission()], work=[Work(0, 20)])
            await scheduler.send(frame)
            await slow.broker.settle()
            while not slow.runner.busy_s():
                await asyncio.sleep(0)
            await slow.stop()
            await scheduler.hear(Goodbye)
            assert frame.seq in scheduler.done

    @pytest.mark.parametrize("settings", [SLOW, MOCK], ids=["thread", "inline"])
    async def test_an_engine_that_raises_ends_the_process_after_beat_and_goodbye(
        self, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def explode(*_: object) -> None:
            raise MemoryError("device gone")

        monkeypatch.setattr("services.worker.mock.MockExecutor.run", explode)
        async with running(settings) as slow:
            scheduler = slow.scheduler()
            await scheduler.connect()
            await scheduler.claim()
            await scheduler.send(scheduler.frame(admit=[admission()], work=[Work(0, 20)]))
            goodbye = await scheduler.hear(Goodbye)
            assert "device gone" in goodbye.reason
            assert any(m.info.state == "failed" for m in scheduler.heard if isinstance(m, Beat))
            assert not slow.service.health()[0]
            with pytest.raises(EngineFailed, match="device gone"):
                await slow.task
