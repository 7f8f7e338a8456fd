"""SlaveReads: who lags reads from a slave, and is told to return when it has caught up."""

from __future__ import annotations

from protomq_ha.replicas import ReplicaView
from protomq_ha.slave_reads import MASTER_ID, SlaveReads

LAG_MAX_BYTES = 1_000
END = 10_000
OLD, NEW = END - LAG_MAX_BYTES - 1, END - LAG_MAX_BYTES

MASTER = SlaveReads(MASTER_ID, LAG_MAX_BYTES)
SLAVE = SlaveReads(2, LAG_MAX_BYTES)


def slave(replica_id: int, written_position: int = END, *, is_in_sync: bool = True) -> ReplicaView:
    return ReplicaView(replica_id, "", is_in_sync, written_position, written_position, END - written_position, 0)


def test_old_messages_are_read_from_a_slave() -> None:
    assert MASTER.suggest(0, OLD, END, [slave(2)]) == 2


def test_new_messages_are_read_from_the_master() -> None:
    assert MASTER.suggest(0, NEW, END, [slave(2)]) == MASTER_ID


def test_without_a_slave_in_sync_that_has_them_the_master_goes_on() -> None:
    assert MASTER.suggest(0, OLD, END, []) == MASTER_ID
    assert MASTER.suggest(0, OLD, END, [slave(2, is_in_sync=False)]) == MASTER_ID
    assert MASTER.suggest(0, OLD, END, [slave(2, OLD - 1)]) == MASTER_ID
    assert MASTER.suggest(0, OLD, END, [slave(2, OLD - 1), slave(3, OLD)]) == 3


def test_queues_are_spread_over_the_slaves() -> None:
    told = [MASTER.suggest(queue_id, OLD, END, [slave(2), slave(5)]) for queue_id in range(4)]
    assert told == [2, 5, 2, 5]


def test_a_slave_keeps_whoever_lags_and_sends_back_whoever_has_caught_up() -> None:
    assert SLAVE.suggest(0, OLD, END, []) == 2
    assert SLAVE.suggest(0, NEW, END, []) == MASTER_ID


def test_a_search_that_has_found_nothing_yet_goes_on_where_it_is() -> None:
    assert SLAVE.suggest(0, None, END, []) == 2
    assert MASTER.suggest(0, None, END, [slave(2)]) == MASTER_ID


def test_it_can_be_switched_off() -> None:
    off = SlaveReads(MASTER_ID, None)
    assert off.suggest(0, 0, END, [slave(2)]) == MASTER_ID
    assert SlaveReads(2, None).suggest(0, 0, END, []) == MASTER_ID
