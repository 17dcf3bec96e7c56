"""The client's side of the protocol, event by event."""

from typing import Any

import pytest

from shared.client import (
    Accepted,
    ClientCore,
    Close,
    Effect,
    Ended,
    Open,
    Progress,
    Refused,
    Tick,
    Unsendable,
)
from shared.ids import MAX_EPOCH
from shared.wire import (
    Ack,
    Answer,
    Beacon,
    Cancel,
    EndRow,
    LogprobRow,
    PromptLogprobRow,
    Sampling,
    Submit,
    TokenRow,
    Tokens,
)

SAMPLING = Sampling(max_tokens=10, stop_token_ids=(2,))


class Client:
    """A core with one request `r` of two choices (handles 1 and 2), and its clock."""

    def __init__(self, choices: int = 2, **spec: Any) -> None:
        self.core = ClientCore("c")
        self.now = 0.0
        self.seq = 0
        self.leader = (1, "a")
        event = Open(request_id="r", prompt=[7, 8], sampling=SAMPLING, sinks=(None,) * choices, **spec)
        self.first = self.do(event)

    def do(self, event: Any) -> list[Effect]:
        return self.core.handle(event, self.now)

    def tick(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.do(Tick())

    def frame(self, **content: Any) -> list[Effect]:
        self.seq += 1
        return self.at(self.seq, **content)

    def at(self, seq: int, **content: Any) -> list[Effect]:
        return self.do(Tokens(epoch=self.leader[0], owner=self.leader[1], seq=seq, **content))

    def beacon(self, epoch: int, owner: str, last: int = 0) -> list[Effect]:
        return self.do(Beacon(model="m", epoch=epoch, owner=owner, clients={"c": last}))


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def only(effects: list[Effect], kind: type) -> Any:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def fresh(effects: list[Effect]) -> list[tuple[int, list[int]]]:
    return [(seq.handle, ids) for e in effects if isinstance(e, Progress) for seq, ids in e.rows]


def test_a_submit_is_repeated_every_300_ms_until_it_is_answered() -> None:
    client = Client()
    assert kinds(client.first) == [Submit]
    assert client.tick(0.2) == []
    assert kinds(client.tick(0.1)) == [Submit]
    assert kinds(client.frame(answers=[Answer("r", "accepted")])) == [Accepted]
    assert Submit not in kinds(client.tick(0.5))


def test_a_first_token_counts_as_the_answer() -> None:
    client = Client()
    assert kinds(client.frame(rows=[TokenRow(1, 1, 0, [5])])) == [Accepted, Progress]
    assert Submit not in kinds(client.tick(0.5))


def test_tokens_come_once_and_in_order_whatever_is_repeated() -> None:
    client = Client()
    assert fresh(client.frame(rows=[TokenRow(1, 1, 0, [5, 6])])) == [(1, [5, 6])]
    assert fresh(client.at(1, rows=[TokenRow(1, 1, 0, [5, 6])])) == []
    assert fresh(client.frame(rows=[TokenRow(1, 2, 1, [6, 9])])) == [(1, [9])]
    assert fresh(client.frame(rows=[TokenRow(1, 2, 0, [5])])) == []
    assert client.core.counts.repeated_tokens == 2


def test_a_row_of_an_older_attempt_is_dropped() -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 2, 0, [5])])
    assert fresh(client.frame(rows=[TokenRow(1, 1, 1, [6])])) == []
    assert client.core.counts.stale_rows == 1


def test_an_index_that_skips_tokens_is_never_delivered() -> None:
    client = Client()
    assert fresh(client.frame(rows=[TokenRow(1, 1, 3, [5])])) == []
    assert client.core.counts.impossible_rows == 1


def test_a_gap_is_asked_for_at_once_but_not_more_than_every_100_ms() -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    client.now = 1.0
    gap = client.at(3, rows=[TokenRow(1, 1, 2, [7])])
    assert gap == [Ack(client="c", epoch=1, owner="a", seq=1, resend=True)]
    assert client.at(4) == []
    client.now += 0.1
    assert only(client.at(5), Ack).resend
    assert fresh(client.at(2, rows=[TokenRow(1, 1, 1, [6])])) == [(1, [6])]
    assert fresh(client.at(3, rows=[TokenRow(1, 1, 2, [7])])) == [(1, [7])]


def test_acknowledgements_are_cumulative_every_250_ms_then_every_second_as_the_lease() -> None:
    client = Client()
    client.now = 10.0
    client.frame(answers=[Answer("r", "accepted")])
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    assert client.tick(0.2) == []
    assert only(client.tick(0.05), Ack).seq == 2
    client.frame(rows=[TokenRow(1, 1, 1, [5])])
    assert client.tick(0.2) == []
    assert only(client.tick(0.1), Ack).seq == 3
    assert client.tick(0.9) == []
    assert only(client.tick(0.1), Ack).seq == 3


def test_a_lost_last_frame_is_seen_by_the_beacon_but_only_when_it_stays_away() -> None:
    client = Client()
    client.now = 1.0
    client.frame(answers=[Answer("r", "accepted")])
    client.tick(0.0)
    assert client.beacon(1, "a", last=2) == []
    assert client.tick(0.02) == []
    assert only(client.tick(0.05), Ack) == Ack(client="c", epoch=1, owner="a", seq=1, resend=True)
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    client.beacon(1, "a", last=2)
    assert not any(effect.resend for effect in client.tick(0.3) if isinstance(effect, Ack))


@pytest.mark.parametrize("announced_by", ["beacon", "tokens"])
def test_a_new_leader_is_told_everything_open_with_what_was_accepted(announced_by: str) -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 1, 0, [5, 6]), TokenRow(2, 1, 0, [9])])
    client.now = 3.0
    if announced_by == "beacon":
        effects = client.beacon(2, "b")
    else:
        effects = client.do(Tokens(epoch=2, owner="b", seq=1))
    submit = only(effects, Submit)
    assert [(seq.handle, seq.choice, seq.accepted) for seq in submit.seqs] == [(1, 0, [5, 6]), (2, 1, [9])]
    assert submit.timeout_s == pytest.approx(597.0)
    assert submit.sampling.max_tokens == 10
    client.leader, client.seq = (2, "b"), 0 if announced_by == "beacon" else 1
    assert fresh(client.frame(rows=[TokenRow(1, 1, 2, [7])])) == [(1, [7])]


@pytest.mark.parametrize("stale", [(1, "a"), (2, "c")])
def test_nothing_of_a_fenced_leader_is_delivered(stale: tuple[int, str]) -> None:
    client = Client()
    client.beacon(2, "b")
    epoch, owner = stale
    assert client.do(Tokens(epoch=epoch, owner=owner, seq=1, rows=[TokenRow(1, 9, 0, [5])])) == []
    assert client.beacon(epoch, owner) == []
    assert client.core.owner == "b"


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 2**64 - 1])
def test_an_epoch_that_is_nonsense_is_followed_neither_in_a_beacon_nor_in_a_frame(epoch: int) -> None:
    client = Client()
    client.beacon(2, "b")
    assert client.beacon(epoch, "a") == []
    assert client.do(Tokens(epoch=epoch, owner="a", seq=1, rows=[TokenRow(1, 9, 0, [5])])) == []
    client.leader = (2, "b")
    assert fresh(client.frame(rows=[TokenRow(1, 1, 0, [7])])) == [(1, [7])]


def test_between_equal_epochs_the_smaller_owner_leads() -> None:
    client = Client()
    client.beacon(2, "b")
    assert kinds(client.beacon(2, "a")) == [Submit]
    assert client.core.owner == "a"


def test_exactly_one_end_and_it_counts_the_tokens() -> None:
    client = Client(choices=1)
    end = EndRow(1, 1, "length", 1)
    effects = client.frame(rows=[TokenRow(1, 1, 0, [5])], ends=[end])
    assert only(effects, Ended).end == end
    assert client.frame(ends=[end]) == []
    assert client.core.requests == {}


def test_an_end_that_counts_other_tokens_than_were_delivered_is_an_error() -> None:
    client = Client(choices=1)
    ended = only(client.frame(rows=[TokenRow(1, 1, 0, [5])], ends=[EndRow(1, 1, "length", 2)]), Ended)
    assert ended.end.reason == "error"


def test_a_cancel_is_repeated_until_every_handle_has_ended() -> None:
    client = Client()
    client.frame(answers=[Answer("r", "accepted")])
    assert only(client.do(Close("r")), Cancel).handles == [1, 2]
    assert only(client.tick(0.3), Cancel).handles == [1, 2]
    client.frame(ends=[EndRow(1, 1, "cancelled", 0)])
    assert only(client.tick(0.3), Cancel).handles == [2]
    client.frame(ends=[EndRow(2, 1, "cancelled", 0)])
    assert Cancel not in kinds(client.tick(0.3))


def test_one_choice_can_be_cancelled_while_the_other_goes_on() -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 1, 0, [5]), TokenRow(2, 1, 0, [5])])
    assert only(client.do(Close("r", (1,))), Cancel).handles == [2]
    assert only(client.frame(answers=[Answer("r", "unknown_request")]), Ended).seq.handle == 2
    assert [seq.handle for seq in only(client.tick(0.3), Submit).seqs] == [1]


def test_cancelled_choices_are_not_submitted_to_a_new_leader() -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    client.do(Close("r", (0,)))
    effects = client.beacon(2, "b")
    assert only(effects, Ended).end.reason == "cancelled"
    assert [seq.handle for seq in only(effects, Submit).seqs] == [2]


def test_a_submit_that_arrives_after_its_cancel_is_cancelled_again() -> None:
    client = Client()
    client.frame(answers=[Answer("other", "accepted")])
    client.do(Close("r"))
    assert kinds(client.frame(answers=[Answer("r", "unknown_request")])) == [Ended, Ended]
    assert only(client.frame(answers=[Answer("r", "accepted")]), Cancel).request_id == "r"


def test_a_refusal_ends_a_request_that_was_never_taken() -> None:
    client = Client()
    answer = Answer("r", "queue_full", "64 wait", 1.5)
    assert only(client.frame(answers=[answer]), Refused).answer == answer
    assert not client.core.requests
    assert Submit not in kinds(client.tick(1.0))


def test_a_request_that_ran_once_is_offered_again_when_a_new_leader_has_no_room_yet() -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    client.beacon(2, "b")
    client.leader, client.seq = (2, "b"), 0
    assert client.frame(answers=[Answer("r", "no_instance", "", 1.0)]) == []
    assert Submit not in kinds(client.tick(0.9))
    assert Submit in kinds(client.tick(0.2))


def test_a_forgotten_client_submits_everything_again_and_follows_the_new_numbers() -> None:
    client = Client()
    for index in range(5):
        client.frame(rows=[TokenRow(1, 1, index, [5])])
    client.now = 20.0
    effects = client.at(1, answers=[Answer("", "unknown_client")])
    assert only(effects, Submit).seqs[0].accepted == [5] * 5
    assert fresh(client.at(2, rows=[TokenRow(1, 1, 5, [6])])) == [(1, [6])]


def test_a_late_copy_of_unknown_client_does_not_disturb_a_running_stream() -> None:
    client = Client()
    client.frame(answers=[Answer("", "unknown_client")])
    client.now = 5.0
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    client.at(1, answers=[Answer("", "unknown_client")])
    assert fresh(client.frame(rows=[TokenRow(1, 1, 1, [6])])) == [(1, [6])]


def test_a_sequence_whose_end_was_lost_with_its_leader_ends_by_its_own_log() -> None:
    client = Client()
    client.frame(rows=[TokenRow(1, 1, 0, [5, 2]), TokenRow(2, 1, 0, [5] * 10)])
    reasons = [effect.end.reason for effect in client.beacon(2, "b") if isinstance(effect, Ended)]
    assert reasons == ["stop", "length"]
    assert not client.core.requests


def test_a_request_nobody_answers_is_refused_after_15_s() -> None:
    client = Client()
    assert Refused not in kinds(client.tick(14.9))
    assert only(client.tick(0.2), Refused).answer.code == "no_instance"


def test_a_request_ends_by_its_deadline_even_when_the_scheduler_is_gone() -> None:
    client = Client(timeout_s=5.0)
    client.frame(rows=[TokenRow(1, 1, 0, [5])])
    assert Ended not in kinds(client.tick(6.9))
    effects = client.tick(0.2)
    assert [e.end.reason for e in effects if isinstance(e, Ended)] == ["timeout", "timeout"]
    assert only(effects, Cancel).request_id == "r"


def test_log_probabilities_stay_with_their_tokens_through_repetition() -> None:
    client = Client(choices=1)
    top = [[(5, -0.1)], [(6, -0.2)]]
    client.frame(
        rows=[TokenRow(1, 1, 0, [5, 6])],
        logprobs=[LogprobRow(1, 0, [-0.1, -0.2], top)],
        prompt_logprobs=[PromptLogprobRow(1, 1, [-3.0], [[]])],
    )
    client.frame(rows=[TokenRow(1, 2, 1, [6])], logprobs=[LogprobRow(1, 1, [-9.0], [[]])])
    request = client.core.requests["r"]
    assert [chosen for chosen, _ in request.seqs[1].logprobs] == [-0.1, -0.2]
    assert request.prompt_logprobs == {1: (-3.0, [])}


def test_a_request_too_large_for_the_broker_is_refused() -> None:
    client = Client()
    assert only(client.do(Unsendable("r", "2 MiB is above 1 MiB")), Refused).answer.code == "too_long"


def test_the_last_frame_is_acknowledged_although_nothing_is_open() -> None:
    client = Client(choices=1)
    client.now = 1.0
    client.frame(rows=[TokenRow(1, 1, 0, [5])], ends=[EndRow(1, 1, "length", 1)])
    assert client.core.is_busy
    assert only(client.tick(0.25), Ack).seq == 1
    assert not client.core.is_busy


def test_after_a_pause_the_lease_is_renewed_before_the_next_submit() -> None:
    client = Client(choices=1)
    client.frame(rows=[TokenRow(1, 1, 0, [5])], ends=[EndRow(1, 1, "length", 1)])
    client.tick(0.3)
    client.now = 60.0
    effects = client.do(Open(request_id="s", prompt=[1], sampling=SAMPLING))
    assert kinds(effects) == [Ack, Submit]
    assert only(effects, Ack).seq == 1


def test_a_leader_that_never_answers_still_hears_of_the_clients_epoch_every_second() -> None:
    client = Client()
    client.beacon(7, "b")
    assert Ack not in kinds(client.tick(0.9))
    assert only(client.tick(0.1), Ack).epoch == 7
    assert Ack not in kinds(client.tick(0.9))
    assert only(client.tick(0.1), Ack).epoch == 7


def test_every_fourth_frame_is_acknowledged_at_once_because_the_scheduler_waits_for_who_is_behind() -> None:
    client = Client()
    acks = []
    for index in range(9):
        effects = client.frame(rows=[TokenRow(1, 1, index, [5])])
        acks += [effect.seq for effect in effects if isinstance(effect, Ack)]
    assert acks == [4, 8]
