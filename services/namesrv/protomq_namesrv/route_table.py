"""Which brokers are registered and alive: every rule of it, without clock, socket or thread.

Rules
- A broker is (name, id). Its incarnation rises with each start of its process. A lower one never replaces a higher one. Nor
  does an older state of the topics replace a newer one of the same incarnation.
- A name belongs to one store at a time. While its broker is registered, one with another store is refused with NAME_TAKEN, whatever
  its incarnation. Otherwise sends meant for one would be stored in the other. The same store may come back at once, as after a kill. Then
  no hold of it is open, since its connection has broken; or it has the address of before.
- A store has one name and id at a time. While its broker is there, a copy at another address is refused with NAME_TAKEN.
- A name belongs to one cluster. A broker that brings another one is refused with NAME_TAKEN, whatever its id and epoch. It may lead an
  election of its own by mistake. It is not refused if it had its name here before, or if only its own store is there.
- A copy of a store has the store's number. So one that comes from another address, while a hold of that store is open, may be a copy. The
  holder is asked to hold again (`on_doubt`), and has `broken_grace_ms` for it. If it does, the other one is refused like another store.
- But a broker that had its name here before replaces one that has just come (`newcomer_ms`). After a restart of this process it is chance
  which of the two asks first.
- A broker is removed when it says so, or when `expiry_ms` pass without a register or heartbeat. It is also removed when its
  hold ended and it did not hold again within a grace. The grace is `broken_grace_ms` after a broken connection,
  `renewal_grace_ms` after an answer. One that never held (any generated client may register) is not asked to.
- Masters that were elected have an epoch. Within one election the name goes to a higher one at once, and never back to a lower one.
- A name belongs to one election. A broker of another one (another etcd, or prefix) is refused with NAME_TAKEN while others have the name,
  whatever its id and epoch. An exception: the etcd of brokers that have the name lost its data, so they bring another number, one by one.
  A broker that had its name before sends newcomers of another election away. Brokers of earlier versions name no election. A master with a
  fixed role counts as an election of its own: it has no epoch.
- What was removed leaves a tombstone for `expiry_ms`: a lower incarnation of the same store, at the same address, stays out. After an
  unregister the same incarnation stays out too, since a late register of a stopped process must not bring it back. Not for ever: a clock
  that was set back between two starts would lock the broker out.
- What was removed is missing, not forgotten: what it stores is in no answer, and who asks is told so. By name, until a broker of that name
  registers or an operator says `forget`; at most `broker_count_max` of them. Not over a restart of this process, which stores nothing.
- While a name has only slaves, the topics of its former master are remembered, or of whoever of it was missing before they came. A slave
  may not have registered the newest of them yet, or be empty. Who asks for such a topic is told that its broker is away, not that nobody
  has it. When the last slave goes, these topics are missing with it.
- A broker is to hear when brokers of other names change the routes of its topics (`take_changed_topics`), for it tells consumers. So no
  consumer has to ask every few seconds whether a topic has got a broker. Only the hold that it opened last takes them. An earlier one may
  be of a connection that has died and not broken yet, and what it takes nobody hears.
- Whom it refuses, it tells operators (`refusals`). Nothing else depends on that.
- Deadlines are for peers, not for us: when this process itself was stopped (scans `pause_ms` apart), all are put off by as much.

Any thread may call: changes are made under one lock, which is never held while anything is served. Each change publishes a new
immutable `snapshot`; readers take the attribute and no lock. Times are milliseconds of a monotonic clock, handed in; `time_ms` is the wall
clock's, for people.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import Final, NamedTuple

from protomq.v1.route_service_pb2 import Broker
from protomq_runtime.errors import Code, ServiceError, too_many

from .config import LimitsConfig, LivenessConfig
from .refusals import Refusals
from .route_snapshot import MASTER_ID, BrokerKey, Missing, Registration, RouteSnapshot, Version

CHANGED_TOPICS_MAX: Final = 1_000
"""Most topics that a broker is told at once."""
PAUSE_SCANS: Final = 5
"""If this many scan intervals pass between two scans, this process was stopped or starved."""


class RemovalCause(Enum):
    """Why a broker was removed."""

    EXPIRED = "no heartbeat in time"
    CONNECTION_BROKEN = "its connection broke and it did not come back in time"
    HOLD_NOT_RENEWED = "it did not renew its hold in time"


STOPPED: Final = "it was stopped"
"""Why a broker is missing that unregistered itself."""


class Removal(NamedTuple):
    """A broker that a scan removed."""

    key: BrokerKey
    cause: RemovalCause


@dataclass(slots=True)
class _Liveness:
    incarnation: int
    store_id: int
    expires_ms: int
    newcomer_until_ms: int
    """Until then the name may go to another store that had it before."""
    holds: set[int] = field(default_factory=set)
    newest_hold_id: int = 0
    """The hold that was opened last, whether it is still open or not; 0: none was."""
    hold_due_ms: int | None = None
    """Until then a hold must be opened; None: one is open, or none was ever opened."""
    hold_due_cause: RemovalCause = RemovalCause.HOLD_NOT_RENEWED
    doubted_until_ms: int | None = None
    """The broker was asked to hold again, and has until then; None: nobody has asked."""
    has_answered: bool = False
    """Whether it has held since it was asked."""


@dataclass(frozen=True, slots=True)
class _Tombstone:
    incarnation_min: int
    store_id: int
    addresses: tuple[str, str]
    until_ms: int


class RouteTable:
    """Registrations and their liveness."""

    def __init__(
        self, liveness: LivenessConfig | None = None, limits: LimitsConfig | None = None
    ) -> None:
        self._config = liveness or LivenessConfig()
        self._limits = limits or LimitsConfig()
        self._pause_ms = PAUSE_SCANS * self._config.scan_interval_ms
        self._lock = threading.Lock()
        self._registrations: dict[BrokerKey, Registration] = {}
        self._liveness: dict[BrokerKey, _Liveness] = {}
        self._tombstones: dict[BrokerKey, _Tombstone] = {}
        self._missing: dict[str, Missing] = {}
        self._former_masters: dict[str, Registration] = {}
        """Of names that have only slaves now: a slave may register a moment later what its master had. See the module's docstring."""
        self._changed_topics: dict[BrokerKey, set[str]] = {}
        """Of a broker's topics those whose routes others have changed, and of which it has not heard."""
        self._hold_ids = count(1)
        self._last_scan_ms: int | None = None
        self._snapshot = RouteSnapshot()
        self.refusals = Refusals()
        self.on_change: Callable[[], None] | None = None
        """Called after a new snapshot was published, on the thread that changed it and without the lock."""
        self.on_doubt: Callable[[BrokerKey], None] = lambda key: None
        """Called without the lock: answer the holds of this broker, so that it holds again if it is there."""
        self.on_changed_topics: list[Callable[[BrokerKey], None]] = []
        """Called without the lock, after a new snapshot was published: `take_changed_topics` has something for this broker."""

    @property
    def snapshot(self) -> RouteSnapshot:
        """The newest picture of everything."""
        return self._snapshot

    def register(
        self, registration: Registration, now_ms: int, *, is_returning: bool = False, time_ms: int = 0
    ) -> bool:
        """Make a broker and its topics known, or replace what was known; whether the name was taken from another broker for it.

        `is_returning`: this process had its name here before, as far as it knows. Raises NAME_TAKEN, STALE_REGISTRATION or TOO_MANY, which
        `refusals` remembers.
        """
        doubts: list[BrokerKey] = []
        try:
            takes_over = self._register(registration, now_ms, doubts, is_returning=is_returning)
            self.refusals.settle(registration.broker)
            return takes_over
        except ServiceError as error:
            self.refusals.note(registration.broker, error, now_ms, time_ms)
            raise
        finally:
            for key in doubts:
                self.on_doubt(key)

    def _register(
        self, registration: Registration, now_ms: int, doubts: list[BrokerKey], *, is_returning: bool
    ) -> bool:
        key = registration.key
        incarnation, store_id = registration.broker.incarnation, registration.broker.store_id
        with self._lock:
            # After a pause it is chance whether a scan comes first, or one that wants the name of a broker that could not be heard.
            self._forgive_own_pause(now_ms)
            known = self._registrations.get(key)
            if not is_returning and (known is None or known.broker.cluster != registration.broker.cluster):
                self._check_cluster(registration.broker, now_ms)
            self._check_election(registration.broker, now_ms, doubts, is_returning=is_returning)
            self._check_other_keys(registration, now_ms, doubts, is_returning=is_returning)
            liveness, known = self._liveness.get(key), self._registrations.get(key)
            is_other = liveness is not None and liveness.store_id != store_id
            may_be_copy = (
                liveness is not None
                and known is not None
                and liveness.store_id == store_id != 0
                and liveness.incarnation != incarnation
                and _addresses(known) != _addresses(registration)
            )
            takes_over = (
                liveness is not None
                and (is_other or may_be_copy)
                and self._goes_before(registration, liveness, now_ms, is_returning=is_returning)
            )
            if takes_over and liveness is not None:
                self._remove(key, liveness.incarnation, now_ms)
                doubts.append(key)  # It takes sends until it holds again.
                liveness = None
            elif may_be_copy and liveness is not None:
                self._check_copy(key, liveness, incarnation, now_ms, doubts)
            self._check_start(key, incarnation, store_id, now_ms, _addresses(registration))
            known = self._registrations.get(key)
            if liveness is None and len(self._liveness) >= self._limits.broker_count_max:
                raise too_many(
                    "brokers",
                    self._limits.broker_count_max,
                    f"{len(self._liveness)} brokers are registered here, the most this name server takes; "
                    "raise limits.broker_count_max",
                )
            if liveness is None or liveness.incarnation < incarnation:
                self._liveness[key] = _Liveness(
                    incarnation,
                    store_id,
                    expires_ms=now_ms + self._config.expiry_ms,
                    newcomer_until_ms=now_ms
                    if is_returning
                    else now_ms + self._config.newcomer_ms,
                )
                self._tombstones.pop(key, None)
            else:
                self._heard(liveness, now_ms)
                assert known is not None
                if known.version > registration.version:
                    return False
            changed = known != registration
            if changed:
                self._note_change(known, registration)
                self._registrations[key] = registration
                gone = self._missing.pop(key.broker_name, None)
                if key.broker_id == MASTER_ID:
                    self._former_masters.pop(key.broker_name, None)
                elif gone is not None:
                    self._former_masters[key.broker_name] = gone.registration
                self._publish()
        if changed:
            self._notify()
        return takes_over

    def unregister(
        self,
        key: BrokerKey,
        incarnation: int,
        now_ms: int,
        *,
        store_id: int = 0,
        time_ms: int = 0,
    ) -> bool:
        """Remove a broker that stops; False if it is unknown, or a newer incarnation or another store is in place."""
        with self._lock:
            liveness = self._liveness.get(key)
            if (
                liveness is None
                or liveness.store_id != store_id
                or liveness.incarnation > incarnation
            ):
                return False
            self._miss(key, time_ms, STOPPED)
            self._remove(key, incarnation + 1, now_ms)
            self._publish()
        self._notify()
        return True

    def forget(self, broker_name: str) -> None:
        """A broker that is missing will not come back: miss it no more. Raises BROKER_NOT_FOUND if it is not missing."""
        with self._lock:
            if self._missing.pop(broker_name, None) is None:
                is_there = any(key.broker_name == broker_name for key in self._registrations)
                raise ServiceError(
                    Code.NOT_FOUND,
                    "BROKER_NOT_FOUND",
                    f"broker {broker_name} is registered; stop it first"
                    if is_there
                    else f"no broker {broker_name} is missing here",
                    metadata={"broker_name": broker_name},
                )
            self._publish()

    def heartbeat(
        self, key: BrokerKey, incarnation: int, version: Version, now_ms: int, *, store_id: int = 0
    ) -> bool:
        """Keep a registration alive; True if the broker has to register (again). Raises NAME_TAKEN or STALE_REGISTRATION."""
        with self._lock:
            self._check_start(key, incarnation, store_id, now_ms)
            liveness = self._liveness.get(key)
            if liveness is None or liveness.incarnation != incarnation:
                return True
            self._heard(liveness, now_ms)
            return self._registrations[key].version != version

    def open_hold(
        self, key: BrokerKey, incarnation: int, now_ms: int, *, store_id: int = 0
    ) -> int:
        """Tie a broker's life to a call; answers the id of the hold. Raises NAME_TAKEN, STALE_REGISTRATION or BROKER_NOT_FOUND."""
        with self._lock:
            self._check_start(key, incarnation, store_id, now_ms)
            liveness = self._liveness.get(key)
            if liveness is None or liveness.incarnation != incarnation:
                raise ServiceError(
                    Code.NOT_FOUND,
                    "BROKER_NOT_FOUND",
                    f"broker {key.broker_name} with id {key.broker_id} is not registered here; register it first",
                    metadata={"broker_name": key.broker_name, "broker_id": str(key.broker_id)},
                )
            hold_id = next(self._hold_ids)
            liveness.holds.add(hold_id)
            liveness.newest_hold_id = hold_id
            liveness.hold_due_ms = None
            liveness.has_answered = True
            return hold_id

    def end_hold(self, key: BrokerKey, hold_id: int, now_ms: int, *, broken: bool) -> bool:
        """A hold was answered, or (`broken`) its connection is gone; whether the broker has none left and must hold again.

        The hold of an earlier incarnation, or of a broker that is not registered any more, means nothing.
        """
        with self._lock:
            liveness = self._liveness.get(key)
            if liveness is None or hold_id not in liveness.holds:
                return False
            liveness.holds.remove(hold_id)
            if liveness.holds:
                return False
            cause = RemovalCause.CONNECTION_BROKEN if broken else RemovalCause.HOLD_NOT_RENEWED
            liveness.hold_due_ms = now_ms + self._grace_ms(cause)
            liveness.hold_due_cause = cause
            if broken:
                liveness.doubted_until_ms = None
            return True

    def has_changed_topics(self, key: BrokerKey) -> bool:
        """Whether `take_changed_topics` has something."""
        return key in self._changed_topics

    def is_newest_hold(self, key: BrokerKey, hold_id: int) -> bool:
        """Whether the broker has opened no hold after this one."""
        liveness = self._liveness.get(key)
        return liveness is not None and liveness.newest_hold_id == hold_id

    def take_changed_topics(self, key: BrokerKey, hold_id: int | None = None) -> list[str]:
        """Of the broker's topics those whose routes others have changed since it was asked last; a large number comes in parts.

        `hold_id`: what asks; a hold that is not the newest gets nothing. None: a broker that needs no holds.
        """
        with self._lock:
            if hold_id is not None and not self.is_newest_hold(key, hold_id):
                return []
            topics = self._changed_topics.pop(key, set())
            taken = sorted(topics)[:CHANGED_TOPICS_MAX]
            if len(taken) < len(topics):
                self._changed_topics[key] = topics.difference(taken)
            return taken

    def remove_silent(self, now_ms: int, *, time_ms: int = 0) -> Sequence[Removal]:
        """The scan: remove the brokers whose time is up."""
        with self._lock:
            self._forgive_own_pause(now_ms)
            self._last_scan_ms = now_ms
            removals = [
                Removal(key, cause)
                for key, liveness in self._liveness.items()
                if (cause := _overdue(liveness, now_ms)) is not None
            ]
            for removal in removals:
                self._miss(removal.key, time_ms, removal.cause.value)
                self._remove(removal.key, self._liveness[removal.key].incarnation, now_ms)
            for key in [key for key, stone in self._tombstones.items() if stone.until_ms <= now_ms]:
                del self._tombstones[key]
            if removals:
                self._publish()
        if removals:
            self._notify()
        return removals

    def _check_cluster(self, broker: Broker, now_ms: int) -> None:
        """Raises NAME_TAKEN if another store has the name, in another cluster."""
        for key, other in self._registrations.items():
            holder = self._liveness[key]
            is_stray = key.broker_name == broker.broker_name and other.broker.cluster != broker.cluster
            if not is_stray or holder.store_id == broker.store_id != 0:
                continue
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "NAME_TAKEN",
                f"broker {key.broker_name} of cluster {other.broker.cluster!r} is registered here, at {other.broker.grpc_address}, "
                f"and this one has cluster {broker.cluster!r}. Give it the same cluster, or a broker_name of its own",
                metadata={
                    "broker_name": key.broker_name,
                    "broker_id": str(key.broker_id),
                    "grpc_address": other.broker.grpc_address,
                },
                retry_delay_ms=_gone_ms(holder, now_ms),
            )

    def _check_election(self, broker: Broker, now_ms: int, doubts: list[BrokerKey], *, is_returning: bool) -> None:
        """Raises NAME_TAKEN if other stores have the name, by another election. Newcomers among them give way to who had it before."""
        own = self._liveness.get(BrokerKey(broker.broker_name, broker.broker_id))
        if own is not None and (own.store_id, own.incarnation) == (broker.store_id, broker.incarnation):
            known = self._registrations[BrokerKey(broker.broker_name, broker.broker_id)].broker
            if _election_of(known) is not None:
                return  # it has the name
            is_returning = False  # nobody knew its election then
        strays = {
            key: self._liveness[key]
            for key, other in self._registrations.items()
            if key.broker_name == broker.broker_name
            and None is not _election_of(other.broker) != _election_of(broker) is not None
            and not self._liveness[key].store_id == broker.store_id != 0
        }
        if is_returning and all(now_ms < each.newcomer_until_ms for each in strays.values()):
            for key, stray in strays.items():
                self._remove(key, stray.incarnation, now_ms)
                doubts.append(key)
            return
        if not strays:
            return
        # The one that lasts longest decides how long to wait; None, so one that is there, lasts longest of all.
        gone_ms = {key: _gone_ms(stray, now_ms) for key, stray in strays.items()}
        key = min(gone_ms, key=lambda each: (gone_ms[each] is not None, -(gone_ms[each] or 0), each))
        other, left_ms = self._registrations[key].broker, gone_ms[key]
        address = other.grpc_address
        is_there = "is alive" if left_ms is None else f"is given up in {left_ms} ms unless it is heard of"
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "NAME_TAKEN",
            f"the name {key.broker_name} belongs to {_whose(other, broker)} (id {key.broker_id}) is at {address}, and {is_there}."
            f" {_MISTAKE if other.election_id and broker.election_id else _MIXTURE} If this is another cluster, give it another"
            " broker_name, or name servers of its own",
            metadata={
                "broker_name": key.broker_name,
                "broker_id": str(key.broker_id),
                "grpc_address": address,
            },
            retry_delay_ms=left_ms,
        )

    def _check_other_keys(
        self, registration: Registration, now_ms: int, doubts: list[BrokerKey], *, is_returning: bool
    ) -> None:
        """Raises NAME_TAKEN while a broker with another name or id is there, or may be, that has the same store at another address."""
        broker, own = registration.broker, self._liveness.get(registration.key)
        if own is not None and (own.store_id, own.incarnation) == (broker.store_id, broker.incarnation):
            return  # it has the name
        for key, holder in list(self._liveness.items()):
            # A member that begins to lead, or to follow, gets another id at the same address.
            is_elsewhere = key != registration.key and _addresses(self._registrations[key]) != _addresses(registration)
            if holder.store_id != broker.store_id or not broker.store_id or not is_elsewhere:
                continue
            if is_returning and now_ms < holder.newcomer_until_ms:
                self._remove(key, holder.incarnation, now_ms)
                doubts.append(key)
            else:
                self._check_copy(key, holder, broker.incarnation, now_ms, doubts)

    def _check_copy(
        self, key: BrokerKey, holder: _Liveness, incarnation: int, now_ms: int, doubts: list[BrokerKey]
    ) -> None:
        """Raises NAME_TAKEN while the holder of a name is there, or may be: the same store registers from another address."""
        if incarnation > holder.incarnation:
            is_over = holder.doubted_until_ms is not None and now_ms >= holder.doubted_until_ms
            if is_over and not holder.has_answered:
                return
            if holder.doubted_until_ms is None or is_over:
                is_due = holder.hold_due_ms is not None and holder.hold_due_cause is RemovalCause.HOLD_NOT_RENEWED
                if not holder.holds and not is_due:  # its connection broke, or it never held
                    return
                holder.doubted_until_ms = now_ms + self._config.broken_grace_ms
                holder.has_answered = False
                doubts.append(key)
        raise self._name_taken(key, holder, now_ms, is_copy=True)

    def _check_start(
        self,
        key: BrokerKey,
        incarnation: int,
        store_id: int,
        now_ms: int,
        addresses: tuple[str, str] | None = None,
    ) -> None:
        """Raises NAME_TAKEN for another store than the registered one, STALE_REGISTRATION for an earlier start of the same.

        `addresses`: where the broker is, if it says so.
        """
        liveness = self._liveness.get(key)
        if liveness is not None:
            if liveness.store_id != store_id:
                raise self._name_taken(key, liveness, now_ms)
            incarnation_min, remedy = (
                liveness.incarnation,
                "stop one of the two, or give them different names or ids",
            )
        else:
            tombstone = self._tombstones.get(key)
            if (
                tombstone is None
                or tombstone.until_ms <= now_ms
                or tombstone.store_id != store_id
                # At another address it is no late word of a process that was stopped.
                or (addresses is not None and store_id and tombstone.addresses != addresses)
            ):
                return
            incarnation_min, remedy = (
                tombstone.incarnation_min,
                f"try again in {tombstone.until_ms - now_ms} ms",
            )
        if incarnation < incarnation_min:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "STALE_REGISTRATION",
                f"a later start of broker {key.broker_name} with id {key.broker_id} is or was registered here; {remedy}",
                metadata={
                    "broker_name": key.broker_name,
                    "broker_id": str(key.broker_id),
                    "incarnation": str(incarnation),
                    "incarnation_min": str(incarnation_min),
                },
            )

    def _goes_before(
        self, registration: Registration, holder: _Liveness, now_ms: int, *, is_returning: bool
    ) -> bool:
        """Whether a broker gets the name that another store has."""
        broker, known = registration.broker, self._registrations[registration.key].broker
        epoch, known_epoch = broker.epoch, known.epoch
        is_one_election = broker.election_id == known.election_id or not (broker.election_id and known.election_id)
        if is_one_election and epoch and known_epoch and epoch != known_epoch:
            return epoch > known_epoch
        return is_returning and now_ms < holder.newcomer_until_ms

    def _name_taken(
        self, key: BrokerKey, holder: _Liveness, now_ms: int, *, is_copy: bool = False
    ) -> ServiceError:
        """`is_copy`: who asks has a store of the same number, and another address."""
        address = self._registrations[key].broker.grpc_address
        # One that holds is there; of any other it is known when it would be given up.
        gone_ms = None
        if is_copy and holder.doubted_until_ms is not None and not holder.has_answered:
            gone_ms = max(0, holder.doubted_until_ms - now_ms)
        else:
            gone_ms = _gone_ms(holder, now_ms)
        store = "a store of the same number (one is a copy of the other)" if is_copy else "another store"
        remedy = "Give this broker a broker_name of its own, or stop the other one"
        if is_copy:
            remedy = "Stop one of the two. A copy that is to be a broker of its own needs a broker_name, and no file config/storeId"
        is_there = "is alive" if gone_ms is None else f"is given up in {gone_ms} ms unless it is heard of"
        return ServiceError(
            Code.FAILED_PRECONDITION,
            "NAME_TAKEN",
            f"the name {key.broker_name} (id {key.broker_id}) belongs to the broker at {address}, which has {store} and {is_there}. "
            + remedy,
            metadata={
                "broker_name": key.broker_name,
                "broker_id": str(key.broker_id),
                "grpc_address": address,
            },
            retry_delay_ms=gone_ms,
        )

    def _heard(self, liveness: _Liveness, now_ms: int) -> None:
        liveness.expires_ms = now_ms + self._config.expiry_ms
        if liveness.hold_due_ms is not None:
            # It speaks, so it may well be about to hold again.
            due_ms = now_ms + self._grace_ms(liveness.hold_due_cause)
            liveness.hold_due_ms = max(liveness.hold_due_ms, due_ms)

    def _grace_ms(self, cause: RemovalCause) -> int:
        config = self._config
        return (
            config.broken_grace_ms
            if cause is RemovalCause.CONNECTION_BROKEN
            else config.renewal_grace_ms
        )

    def _forgive_own_pause(self, now_ms: int) -> None:
        gap_ms = 0 if self._last_scan_ms is None else now_ms - self._last_scan_ms
        if gap_ms <= self._pause_ms:
            return
        self._last_scan_ms = now_ms
        for liveness in self._liveness.values():
            liveness.expires_ms += gap_ms
            liveness.newcomer_until_ms += gap_ms
            if liveness.hold_due_ms is not None:
                liveness.hold_due_ms += gap_ms
            if liveness.doubted_until_ms is not None:
                liveness.doubted_until_ms += gap_ms

    def _miss(self, key: BrokerKey, time_ms: int, cause: str) -> None:
        """The broker is about to be removed. Nothing is missing while another one of its name is there: a slave has what its master has.

        Nor is anything with a slave that has never had a topic, and whose master nobody knew. With the last of a name goes what its former
        master had, too.
        """
        registration = self._registrations[key]
        if sum(other.broker_name == key.broker_name for other in self._registrations) > 1:
            if key.broker_id == MASTER_ID:
                self._former_masters[key.broker_name] = registration
            return
        former = self._former_masters.pop(key.broker_name, None)
        if former is not None:
            registration = replace(registration, topics={**former.topics, **registration.topics})
        elif key.broker_id and not registration.topics:
            return
        self._missing.pop(key.broker_name, None)
        self._missing[key.broker_name] = Missing(registration, time_ms, cause)
        if len(self._missing) > self._limits.broker_count_max:
            del self._missing[next(iter(self._missing))]

    def _remove(self, key: BrokerKey, incarnation_min: int, now_ms: int) -> None:
        registration = self._registrations.pop(key)
        self._note_change(registration, None)
        self._changed_topics.pop(key, None)
        addresses = _addresses(registration)
        store_id = self._liveness.pop(key).store_id
        self._tombstones.pop(key, None)
        self._tombstones[key] = _Tombstone(
            incarnation_min, store_id, addresses, now_ms + self._config.expiry_ms
        )
        if len(self._tombstones) > self._limits.broker_count_max:
            del self._tombstones[next(iter(self._tombstones))]

    def _note_change(self, before: Registration | None, after: Registration | None) -> None:
        """A broker has come, has changed or goes: others that have topics of its are to hear of it. Its slaves and its master need not."""
        changed = after or before
        assert changed is not None
        others = [other for key, other in self._registrations.items() if key.broker_name != changed.key.broker_name]
        if not others:
            return
        if before is None or after is None:
            topics = set(changed.topics)
        elif before.broker != after.broker:
            topics = before.topics.keys() | after.topics.keys()
        else:
            topics = {topic for topic, _ in before.topics.items() ^ after.topics.items()}
        for other in others:
            common = other.topics.keys() & topics
            if common:
                self._changed_topics.setdefault(other.key, set()).update(common)

    def _publish(self) -> None:
        self._snapshot = RouteSnapshot(
            self._registrations.values(), self._missing.values(), self._former_masters.values()
        )

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()
        for key in tuple(self._changed_topics):
            for listener in tuple(self.on_changed_topics):
                listener(key)


_MISTAKE: Final = "Is etcd.endpoints or etcd.prefix wrong, here or there? Brokers of one name need the same."
_MIXTURE: Final = "Either all brokers of a name have the etcd setting, or none."


def _whose(other: Broker, broker: Broker) -> str:
    """Whose a name is that a broker of another election wants; ends with the one that is named."""
    if not other.election_id:
        return "a master with a fixed role, and this broker elects its master in etcd. That one"
    if not broker.election_id:
        return "brokers that elect their master in etcd, and this one has a fixed role. One of them"
    return "brokers that elect their master in another part of etcd, or in another etcd. One of them"


def _election_of(broker: Broker) -> int | None:
    """The number of its election; 0: its role is fixed. None: nobody knows, as of a slave that names none, or one of an earlier version."""
    if broker.election_id or (broker.broker_id == MASTER_ID and not broker.epoch):
        return broker.election_id
    return None


def _addresses(registration: Registration) -> tuple[str, str]:
    return registration.broker.grpc_address, registration.broker.remoting_address


def _gone_ms(holder: _Liveness, now_ms: int) -> int | None:
    """Returns when a broker would be given up. None: it holds, so it is there."""
    if holder.holds:
        return None
    due_ms = holder.expires_ms if holder.hold_due_ms is None else holder.hold_due_ms
    return max(0, min(due_ms, holder.expires_ms) - now_ms)


def _overdue(liveness: _Liveness, now_ms: int) -> RemovalCause | None:
    if liveness.hold_due_ms is not None and liveness.hold_due_ms <= now_ms:
        return liveness.hold_due_cause
    if liveness.expires_ms <= now_ms:
        return RemovalCause.EXPIRED
    return None
