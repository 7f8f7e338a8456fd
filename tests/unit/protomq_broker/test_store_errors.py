"""What the operator is told of the store's errors."""

from __future__ import annotations

import logging

import pytest

from protomq_broker import store_errors
from protomq_broker.said_once import KEYS_MAX, SaidOnce
from protomq_broker.store.errors import CorruptLogError


def test_each_damaged_place_is_said_once_a_minute_and_each_answer_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(store_errors, "_damage_said", SaidOnce(now_s=lambda: now_s[0]))

    def errors_of(position: int, count: int) -> int:
        caplog.clear()
        for _ in range(count):
            error = CorruptLogError("/s/commitlog/0", position, "a bit has flipped")
            assert store_errors.to_service_error(error).reason == "CORRUPT_LOG"
        return sum(record.levelno >= logging.ERROR for record in caplog.records)

    assert errors_of(53, 5) == 1
    assert errors_of(99, 5) == 1, "another place"
    now_s[0] = 59.0
    assert errors_of(53, 5) == 0
    now_s[0] = 60.0
    assert errors_of(53, 5) == 1


def test_what_was_said_does_not_grow_without_end() -> None:
    said = SaidOnce(now_s=lambda: 0.0)
    assert all(said.is_due(key) for key in range(KEYS_MAX + 1))
    assert not said.is_due(KEYS_MAX)
    assert len(said._said_at) <= KEYS_MAX
