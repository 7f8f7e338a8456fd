"""Test a listener without a server: FakeGroup delivers, and its clock jumps over the delays of retries. pytest runs these, too."""

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


if __name__ == "__main__":
    test_a_ticket_is_billed_when_the_bank_answers()
    test_a_ticket_without_a_seat_is_a_dead_letter()
