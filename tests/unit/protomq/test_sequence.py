"""Sequences are handed out once, and a forked child is another producer."""

from __future__ import annotations

import threading

import pytest

from protomq._sequence import SequenceSource


def test_sequences_are_consecutive() -> None:
    source = SequenceSource()
    assert [source.take(), source.take(3), source.take()] == [0, 1, 4]
    assert source.take() == 5


def test_threads_never_share_a_sequence() -> None:
    source = SequenceSource()
    taken: list[range] = []

    def take() -> None:
        for count in (1, 2, 3) * 50:
            first = source.take(count)
            taken.append(range(first, first + count))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in taken for number in numbers) == list(range(8 * 300))


def test_ids_are_random_64_bit_numbers_and_never_zero() -> None:
    ids = {SequenceSource().producer_id for _ in range(100)}
    assert len(ids) == 100
    assert all(0 < producer_id < 1 << 64 for producer_id in ids)


def test_renew_makes_another_producer() -> None:
    source = SequenceSource(17, 3)
    source.take(5)
    source.renew()
    assert source.producer_id != 17
    assert (source.producer_epoch, source.take()) == (0, 0)


@pytest.mark.parametrize(("producer_id", "epoch"), [(0, 0), (1 << 64, 0), (1, -1), (1, 1 << 32)])
def test_an_identity_that_does_not_fit_the_wire_is_refused(producer_id: int, epoch: int) -> None:
    with pytest.raises(ValueError):
        SequenceSource(producer_id, epoch)
