"""Test listeners without a server: FakeGroup delivers, its clock jumps, and its members crash. pytest runs these, too."""

from protomq import PushConsumer, Reject
from protomq.testing import FakeGroup

consumer = PushConsumer("billing")
billed: dict[str, str] = {}


@consumer.on("tickets")
def bill(seat: str) -> Reject | None:
    """What is tested."""
    if not seat:
        return Reject("a ticket without a seat")
    if seat not in billed and seat.startswith("12"):
        billed[seat] = "on hold"
        raise TimeoutError("the bank does not answer")
    billed[seat] = "paid"
    return None


def test_a_ticket_is_billed_when_the_bank_answers() -> None:
    group = FakeGroup(consumer)
    group.send("tickets", "12A")
    group.deliver()
    assert (billed["12A"], group.next_due_in_s) == ("on hold", 10)
    group.advance(10)
    group.deliver()
    assert billed["12A"] == "paid"
    print("12A is paid at the second try, 10 seconds later")


def test_a_ticket_without_a_seat_is_a_dead_letter() -> None:
    group = FakeGroup(consumer)
    group.send("tickets", "")
    group.deliver()
    ((_, error),) = group.dead_letters
    assert error == "a ticket without a seat"
    print("dead letter:", error)


def test_another_member_takes_over_what_a_dead_one_had_not_committed() -> None:
    group = FakeGroup(consumer, queue_count=4)
    first, second = group.members[0], group.join()
    for queue_id in range(4):
        group.send("tickets", f"{queue_id}C", queue_id=queue_id)
    group.deliver()
    assert (len(first.done), len(second.done)) == (2, 2)
    again = group.crash(second)
    group.deliver()
    assert [bytes(message.body) for message in again] == [b"2C", b"3C"]
    assert len(first.done) == 4
    print("the first member has all queues, and billed 2C and 3C again")


if __name__ == "__main__":
    test_a_ticket_is_billed_when_the_bank_answers()
    test_a_ticket_without_a_seat_is_a_dead_letter()
    test_another_member_takes_over_what_a_dead_one_had_not_committed()
