import pytest

from protomq_runtime.admission import AdmissionConfig, QueueTimeRule


class Rule(QueueTimeRule):
    """A rule whose lane works for this part of each turn; the rest it waits for a CPU, or for the disk."""

    def __init__(self, target_ms: float = 5, interval_ms: float = 100, works: float = 1.0, waits_for_disk: bool = False) -> None:
        self.works = works
        self._worked_s = 77.0
        super().__init__(
            AdmissionConfig(queue_time_target_ms=target_ms, queue_time_interval_ms=interval_ms, waits_for_disk=waits_for_disk),
            lambda: self._worked_s,
        )

    def observe(self, now: float, waited: float) -> None:
        self._worked_s += waited * self.works
        super().observe(now, waited)


def rule(target_ms: float = 5, interval_ms: float = 100) -> Rule:
    return Rule(target_ms, interval_ms)


def observe(queue_rule: QueueTimeRule, start: float, waits_ms: list[float], every_ms: float = 10) -> float:
    now = start
    for wait_ms in waits_ms:
        now += every_ms / 1000
        queue_rule.observe(now, wait_ms / 1000)
    return now


def turns(queue_rule: QueueTimeRule, start: float, lengths_ms: list[float]) -> float:
    """Turns of these lengths, each of which finds what came during the one before."""
    now = start
    for length_ms in lengths_ms:
        now += length_ms / 1000
        queue_rule.observe(now, length_ms / 1000)
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


def test_an_overload_ends_at_once_when_the_queue_has_emptied():
    queue_rule = rule()
    now = observe(queue_rule, 10, [8] * 15)
    assert queue_rule.overloaded
    queue_rule.observe(now + 0.01, 0.0)
    assert not queue_rule.overloaded
    # Nor does what comes next begin in the middle of an interval.
    now = observe(queue_rule, now + 0.01, [8] * 10)
    assert not queue_rule.overloaded
    observe(queue_rule, now, [8] * 2)
    assert queue_rule.overloaded


def test_a_lane_that_gets_no_cpu_is_not_overloaded_however_long_its_turns_are():
    """330 callers that wait for their answers, as they were measured beside eight busy processes: 15 ms of work in turns of 150 ms."""
    queue_rule = Rule(50, 100, works=0.1)
    turns(queue_rule, 10, [150] * 100)
    assert not queue_rule.overloaded
    assert queue_rule.last_max == pytest.approx(0.150)


def test_a_lane_whose_own_work_is_too_much_is_overloaded_on_a_busy_machine_too():
    queue_rule = Rule(50, 100, works=0.3)
    turns(queue_rule, 10, [400] * 3)
    assert queue_rule.overloaded


def test_two_long_turns_are_no_overload_before_an_interval_is_over():
    queue_rule = Rule(50, 100)
    now = turns(queue_rule, 10, [60, 60])
    assert not queue_rule.overloaded
    turns(queue_rule, now, [60])
    assert queue_rule.overloaded


def test_one_turn_with_little_work_is_the_end_of_an_overload():
    queue_rule = Rule(50, 100)
    now = turns(queue_rule, 10, [60] * 4)
    assert queue_rule.overloaded
    queue_rule.works = 0.1
    turns(queue_rule, now, [60])
    assert not queue_rule.overloaded


def test_waiting_counts_in_a_lane_that_waits_for_the_disk():
    queue_rule = Rule(50, 100, works=0.0, waits_for_disk=True)
    turns(queue_rule, 10, [60] * 4)
    assert queue_rule.overloaded


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
