"""Questions to members of groups: who wants a member to describe itself waits here, until the member has done so in its next call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from protomq.v1.membership_service_pb2 import DescribeMemberResponse, MemberDescription
from protomq_runtime.errors import SHUTTING_DOWN, too_many

from .memberships import MemberKey

if TYPE_CHECKING:
    import threading

    from protomq_runtime.call import Call
    from protomq_runtime.regions import Region
    from protomq_runtime.timers import Timer

QUESTIONS_MAX: Final = 64
"""Most questions that may wait for members to describe themselves."""
DESCRIPTION_MAX_BYTES: Final = 1 << 20
DESCRIPTION_WAIT_MS: Final = 5_000
DESCRIPTION_WAIT_MAX_MS: Final = 30_000

MemberId = tuple[str, MemberKey]
"""Group and member."""


class WaitingCall:
    """A call that waits for an answer, and the timer that ends its wait. On the lane of the call."""

    __slots__ = ("call", "timer")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.timer: Timer | None = None

    def answer(self, payload: bytes, regions: tuple[Region, ...] = (), regions_size_bytes: int = 0) -> None:
        """Answers the call, unless that is done."""
        self._end_timer()
        if not self.call.answered:
            self.call.answer(payload, regions, regions_size_bytes)

    def refuse(self) -> None:
        """Refuses the call of a service that stops, unless it is answered."""
        self._end_timer()
        if not self.call.answered:
            self.call.fail(SHUTTING_DOWN)

    def _end_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class _Question(WaitingCall):
    """A caller that wants a member to describe itself."""

    __slots__ = ("is_asked", "member", "wants_stacks")

    def __init__(self, call: Call, member: MemberId, wants_stacks: bool) -> None:
        super().__init__(call)
        self.member = member
        self.wants_stacks = wants_stacks
        self.is_asked = False


class MemberQuestions:
    """The questions that wait. All methods are called with the lock of the service."""

    def __init__(self, lock: threading.Lock) -> None:
        """`lock`: of the service; taken where a question ends by itself."""
        self._lock = lock
        self._waiting: dict[int, _Question] = {}
        self._last_number = 0

    def add(self, call: Call, member: MemberId, wait_ms: float, *, wants_stacks: bool) -> None:
        """Holds the call until the member has described itself, or the time is over. Raises TOO_MANY."""
        if len(self._waiting) >= QUESTIONS_MAX:
            raise too_many("questions", QUESTIONS_MAX, f"{QUESTIONS_MAX} members are being asked already")
        self._last_number += 1
        number = self._last_number
        question = self._waiting[number] = _Question(call, member, wants_stacks)
        question.timer = call.lane.call_later(call.hold_time_ms(wait_ms), partial(self._end, number))
        call.hold(partial(self._end, number, is_gone=True))

    def next_for(self, member: MemberId) -> int:
        """Returns the number of the next question to a member, which counts as asked; 0: there is none."""
        for number, question in self._waiting.items():
            if question.member == member and not question.is_asked:
                question.is_asked = True
                return number
        return 0

    def wants_stacks(self, number: int) -> bool:
        """Whether a question that waits is about the stacks of the member's threads, too."""
        return self._waiting[number].wants_stacks

    def answer(self, member: MemberId, description: MemberDescription) -> None:
        """Gives what a member has said to who asked, if that one still waits."""
        question = self._waiting.get(description.description_id)
        if question is None or question.member != member:
            return
        del self._waiting[description.description_id]
        response = DescribeMemberResponse(description=description)
        if description.ByteSize() > DESCRIPTION_MAX_BYTES:
            response = DescribeMemberResponse(
                description=MemberDescription(kind=description.kind, version=description.version, is_cut=True)
            )
        question.call.lane.post(partial(question.answer, response.SerializeToString()))

    def take_all(self) -> list[WaitingCall]:
        """Takes out all calls that wait."""
        waiting: list[WaitingCall] = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _end(self, number: int, is_gone: bool = False) -> None:
        """Without the lock: ends a question whose time is over, or whose caller is gone."""
        with self._lock:
            question = self._waiting.pop(number, None)
        if question is not None:
            if is_gone and question.timer is not None:
                question.timer.cancel()
            elif not is_gone:
                question.answer(b"")
