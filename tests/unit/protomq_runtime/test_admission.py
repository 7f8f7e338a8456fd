import pytest

from protomq_runtime.admission import AdmissionConfig, QueueTimeRule


def rule(target_ms: float = 5, interval_ms: float = 100) -> QueueTimeRule:
    return QueueTimeRule(
        AdmissionConfig(queue_time_target_ms=target_ms, queue_time_interval_ms=interval_ms)
    )


def observe(
    queue_rule: QueueTimeRule, start: float, waits_ms: list[float], every_ms: float = 10
) -> float:
    now = start
    for wait_ms in waits_ms:
        now += every_ms / 1000
        queue_rule.observe(now, wait_ms / 1000)
    return now


def test_a_wait_above_the_target_for_an_interval_is_an_overload():
    queue_rule = rule()
    now = observe(queue_rule, 10, [8] * 10)
    assert not queue_rule.overloaded
    observe(queue_rule, now, [8] * 3)
    assert queue_rule.overloaded
    assert queue_rule.shed_after == 0.010


def test_a_burst_that_is_worked_off_within_the_interval_is_none():
    queue_rule = rule()
    observe(queue_rule, 10, [50, 40, 30, 20, 10, 1, 0, 0, 50, 40] * 5)
    assert not queue_rule.overloaded


def test_an_overload_ends_with_the_first_good_interval():
    queue_rule = rule()
    now = observe(queue_rule, 10, [8] * 15)
    assert queue_rule.overloaded
    observe(queue_rule, now, [1] * 25)
    assert not queue_rule.overloaded


def test_an_overload_from_before_an_idle_time_is_forgotten():
    queue_rule = rule()
    now = observe(queue_rule, 10, [8] * 15)
    assert queue_rule.overloaded
    queue_rule.observe(now + 5, 0.008)
    assert not queue_rule.overloaded


def test_a_target_of_zero_turns_the_rule_off():
    queue_rule = rule(target_ms=0)
    observe(queue_rule, 10, [500] * 50)
    assert not queue_rule.overloaded


def test_the_longest_wait_of_the_last_interval_is_told_until_the_lane_is_idle():
    queue_rule = rule()
    now = observe(queue_rule, 10, [1, 9, 2] * 8)
    assert queue_rule.queue_time_us(now) == 9000
    assert queue_rule.queue_time_us(now + 10) == 0


@pytest.mark.parametrize(
    "values", [{"depth_max": 0}, {"queue_time_target_ms": -1}, {"queue_time_interval_ms": 0}]
)
def test_limits_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        AdmissionConfig(**values)
