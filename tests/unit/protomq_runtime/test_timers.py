from protomq_runtime.timers import REBUILD_COUNT_MIN, Timers


def test_due_timers_are_given_in_the_order_of_time():
    timers = Timers()
    called: list[str] = []
    timers.add(3.0, lambda: called.append("c"))
    timers.add(1.0, lambda: called.append("a"))
    timers.add(1.0, lambda: called.append("b"))
    for callback in timers.due(2.0):
        callback()
    assert called == ["a", "b"]
    assert timers.next_at() == 3.0
    assert len(timers) == 1


def test_a_cancelled_timer_is_not_given():
    timers = Timers()
    timer = timers.add(1.0, lambda: None)
    timer.cancel()
    timer.cancel()
    assert len(timers) == 0
    assert timers.due(2.0) == []
    assert timers.next_at() is None


def test_of_timers_that_are_due_together_one_may_cancel_another():
    timers = Timers()
    called: list[str] = []

    def first() -> None:
        called.append("a")
        later.cancel()

    timers.add(1.0, first)
    later = timers.add(1.0, lambda: called.append("b"))
    for callback in timers.due(1.0):
        callback()
    assert called == ["a"]
    assert len(timers) == 0


def test_cancelling_a_timer_that_has_run_is_harmless():
    timers = Timers()
    timer = timers.add(1.0, lambda: None)
    assert len(timers.due(1.0)) == 1
    timer.cancel()
    assert len(timers) == 0


def test_cancelled_timers_do_not_pile_up():
    timers = Timers()
    kept = timers.add(1e9, lambda: None)
    for _ in range(20 * REBUILD_COUNT_MIN):
        timers.add(1e6, lambda: None).cancel()
    assert len(timers._heap) <= 2 * REBUILD_COUNT_MIN
    assert len(timers) == 1
    kept.cancel()
    assert len(timers) == 0
