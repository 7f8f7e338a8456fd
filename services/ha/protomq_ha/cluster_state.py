"""What etcd stores about one broker name, and its encoding. Values only.

    <prefix>/master     who leads: member, epoch, address; bound to a lease, so it goes away with its holder
    <prefix>/in_sync    epoch, members that have all that was acknowledged, who is to lead next; bound to nothing
    <prefix>/order      what an operator wants: a switch, or an unclean promotion
    <prefix>/withdrawn  which order was withdrawn last, and by which request, which may ask again
    <prefix>/election   a random number that tells this election from any other; the first member writes it, and nobody changes it. Name
                        servers compare epochs of one election only
    <prefix>/end/<member>   where the log of a member ends that has not heard its master for a while; bound to the member's lease
    <prefix>/full/<member>  the disk of a member is full; bound to the member's lease
    <prefix>/name/<member>  the broker of a store that is a member of the in-sync set, or was: its id, and where it runs. For people: bound
                            to nothing, so that it is there when the member is not
    <prefix>/start/<member>  which process stands for a store: the number of its start, which its folder has too; bound to nothing. A folder
                            with a lower number is an older copy
    <prefix>/alive/<id>     which process has a broker_id; bound to its lease. So two stores that live have two ids, and of a store and its
                            copy one process lives

A member is a store, not an address: an empty store that replaces one is another member. Values are JSON. A revision is etcd's mod_revision
of a key; 0 means that there is no such key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MASTER: Final = "master"
IN_SYNC: Final = "in_sync"
ORDER: Final = "order"
WITHDRAWN: Final = "withdrawn"
ELECTION: Final = "election"
KEYS: Final = (MASTER, IN_SYNC, ORDER, WITHDRAWN, ELECTION)
END_PREFIX: Final = "end/"
FULL_PREFIX: Final = "full/"
NAME_PREFIX: Final = "name/"
START_PREFIX: Final = "start/"
ALIVE_PREFIX: Final = "alive/"
PREFIXES_OF_MEMBERS: Final = (END_PREFIX, FULL_PREFIX, NAME_PREFIX, START_PREFIX, ALIVE_PREFIX)
"""Of the keys that each member has of its own."""

SWITCH: Final = "switch"
PROMOTE_UNCLEAN: Final = "promote_unclean"


class Row(NamedTuple):
    """A key's value; the revision that wrote it; the lease it is bound to, 0 if none."""

    value: bytes
    revision: int
    lease: int = 0


class Master(NamedTuple):
    """Who leads. `lease` tells one process of a member from the next."""

    member: str
    epoch: int
    address: str
    revision: int
    lease: int

    @property
    def named(self) -> str:
        """For an operator."""
        return f"store {self.member} at {self.address} as the master of epoch {self.epoch}"


class InSync(NamedTuple):
    """Attributes:
    epoch: of the last election.
    successor: the member to which the master has handed over, "" if none.
    is_given_back: whoever was elected last could not lead, and has given the lead back.
    unclean_epoch: the epoch of the last unclean promotion, 0 if there was none. Logs of earlier epochs may lose by an operator's order.
    """

    epoch: int
    members: frozenset[str]
    successor: str
    revision: int
    is_given_back: bool = False
    unclean_epoch: int = 0


class Order(NamedTuple):
    """Attributes: kind: SWITCH or PROMOTE_UNCLEAN; target: a member; "" leaves the choice of a switch to the master."""

    kind: str
    target: str
    revision: int


class Withdrawn(NamedTuple):
    """Attributes: request_id: of the request that took the order away; order: which one it was, in words."""

    request_id: str
    order: str


class LogEnd(NamedTuple):
    """Where a log ends; the higher of two is that of the log that has more.

    Attributes: epoch: of the last append; is_cut: a start has cut what stood behind, which it took for a torn write.
    """

    epoch: int
    position: int
    is_cut: bool = False


class MemberName(NamedTuple):
    """Of the broker whose store is a member, or was. Attributes: broker_id: while it follows; address: of its remoting port."""

    broker_id: int
    address: str


class MemberStart(NamedTuple):
    """Which process stands for a store. Attributes: number: rises with each start, and now and then; process: a random text."""

    number: int
    process: str


class Alive(NamedTuple):
    """A process that has a broker_id while its lease lasts. Attributes: place: which folder of which machine it has locked."""

    member: str
    process: str
    place: str
    address: str


class Compare(NamedTuple):
    """The transaction needs the key to be last written by this revision; 0: the key must not exist."""

    key: str
    revision: int


class Put(NamedTuple):
    """Writes a key."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Transaction:
    """Makes all changes if all comparisons are true; otherwise none."""

    compares: tuple[Compare, ...]
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()


class ClusterView:
    """All keys of the name at one revision of etcd. Raises ValueError for a value that no broker has written."""

    def __init__(self, revision: int, rows: Mapping[str, Row]) -> None:
        self.revision = revision
        self.rows = dict(rows)
        self.master = _master(self.rows.get(MASTER))
        self.in_sync = _in_sync(self.rows.get(IN_SYNC))
        self.order = _order(self.rows.get(ORDER))
        self.withdrawn = _withdrawn(self.rows.get(WITHDRAWN))
        self.election = _election(self.rows.get(ELECTION))
        """The number of this election; 0: there is none, or nobody can read it."""
        ends = {
            key.removeprefix(END_PREFIX): _end(row, key)
            for key, row in self.rows.items()
            if key.startswith(END_PREFIX)
        }
        self.ends = {member: end for member, end in ends.items() if end is not None}
        self.full = frozenset(key.removeprefix(FULL_PREFIX) for key in self.rows if key.startswith(FULL_PREFIX))
        """Members whose disks are full, as far as they know."""
        names = {
            key.removeprefix(NAME_PREFIX): _name(row, key) for key, row in self.rows.items() if key.startswith(NAME_PREFIX)
        }
        self.names = {member: name for member, name in names.items() if name is not None}
        starts = {
            key.removeprefix(START_PREFIX): _start(row, key) for key, row in self.rows.items() if key.startswith(START_PREFIX)
        }
        self.starts = {member: start for member, start in starts.items() if start is not None}
        alive = {key.removeprefix(ALIVE_PREFIX): _alive(row, key) for key, row in self.rows.items() if key.startswith(ALIVE_PREFIX)}
        self.alive = {broker_id: each for broker_id, each in alive.items() if each is not None}
        """By the text of the broker_id."""

    def in_the_way(self, member: str, broker_id: int, process: str, place: str) -> Alive | None:
        """Another process that lives with this store or this broker_id; None: there is none.

        One of the same place is over: who asks has locked its folder.
        """
        for key, each in sorted(self.alive.items()):
            is_other = each.process != process and each.place != place
            if is_other and (key == str(broker_id) or each.member == member):
                return each
        return None

    def named_in_vain(self, broker_id: int) -> frozenset[str]:
        """Stores outside the in-sync set that are named as those of this broker."""
        in_sync = self.in_sync.members if self.in_sync is not None else frozenset()
        return frozenset(each for each, name in self.names.items() if name.broker_id == broker_id and each not in in_sync)

    def named(self, members: frozenset[str]) -> str:
        """These members as an operator knows them, as far as etcd has it. An empty folder is another member of the same broker."""
        names = self.names
        return ", ".join(
            f"broker_id {names[each].broker_id} at {names[each].address} (store {each})" if each in names else f"store {each}"
            for each in sorted(members)
        )

    def key_revision(self, key: str) -> int:
        """Returns the revision that wrote a key; 0 if the key does not exist."""
        row = self.rows.get(key)
        return row.revision if row is not None else 0

    def after(self, transaction: Transaction, revision: int) -> ClusterView:
        """Returns the view after a transaction with this revision."""
        rows = {key: row for key, row in self.rows.items() if key not in transaction.deletes}
        rows.update(
            (put.key, Row(put.value, revision, put.lease)) for put in transaction.puts
        )
        return ClusterView(revision, rows)


def encode_master(member: str, epoch: int, address: str) -> bytes:
    """The value of the key."""
    return _encode(member=member, epoch=epoch, address=address)


def encode_in_sync(
    epoch: int,
    members: frozenset[str],
    successor: str = "",
    *,
    unclean_epoch: int,
    is_given_back: bool = False,
) -> bytes:
    """The value of the key."""
    return _encode(
        epoch=epoch,
        members=sorted(members),
        successor=successor,
        is_given_back=is_given_back,
        unclean_epoch=unclean_epoch,
    )


def encode_end(end: LogEnd) -> bytes:
    """The value of a key below END_PREFIX."""
    return _encode(epoch=end.epoch, position=end.position, is_cut=end.is_cut)


def encode_election(number: int) -> bytes:
    """The value of the key."""
    return _encode(number=number)


def encode_full() -> bytes:
    """The value of a key below FULL_PREFIX: that it is there says all."""
    return _encode()


def encode_name(name: MemberName) -> bytes:
    """The value of a key below NAME_PREFIX."""
    return _encode(broker_id=name.broker_id, address=name.address)


def encode_start(start: MemberStart) -> bytes:
    """The value of a key below START_PREFIX."""
    return _encode(number=start.number, process=start.process)


def encode_alive(alive: Alive) -> bytes:
    """The value of a key below ALIVE_PREFIX."""
    return _encode(**alive._asdict())


def encode_order(kind: str, target: str) -> bytes:
    """Encodes the value of the key. Raises ValueError for an invalid order."""
    if kind not in (SWITCH, PROMOTE_UNCLEAN):
        raise ValueError(f"an order is {SWITCH} or {PROMOTE_UNCLEAN}, not {kind!r}")
    if kind == PROMOTE_UNCLEAN and not target:
        raise ValueError("an unclean promotion names its member")
    return _encode(kind=kind, target=target)


def encode_withdrawn(withdrawn: Withdrawn) -> bytes:
    """The value of the key."""
    return _encode(**withdrawn._asdict())


def _encode(**fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _decode(
    row: Row, key: str, later: Mapping[str, object] | None = None, **types: type
) -> dict[str, Any]:
    """`later`: fields that brokers of earlier versions do not write, with what is meant then."""
    try:
        fields = json.loads(row.value)
    except ValueError:
        fields = None
    if isinstance(fields, dict) and later:
        fields = {**later, **fields}
        types |= {name: type(value) for name, value in later.items()}
    if not isinstance(fields, dict) or any(
        type(fields.get(name)) is not wanted for name, wanted in types.items()
    ):
        raise ValueError(f"key {key!r} in etcd has {row.value[:200]!r}, which no broker has written")
    return fields


def _master(row: Row | None) -> Master | None:
    if row is None:
        return None
    fields = _decode(row, MASTER, member=str, epoch=int, address=str)
    return Master(fields["member"], fields["epoch"], fields["address"], row.revision, row.lease)


def _in_sync(row: Row | None) -> InSync | None:
    if row is None:
        return None
    later = {"is_given_back": False, "unclean_epoch": 0}
    fields = _decode(row, IN_SYNC, later, epoch=int, members=list, successor=str)
    if not all(isinstance(member, str) for member in fields["members"]):
        raise ValueError(f"key {IN_SYNC!r} in etcd has members that are no names")
    return InSync(
        fields["epoch"],
        frozenset(fields["members"]),
        fields["successor"],
        row.revision,
        fields["is_given_back"],
        fields["unclean_epoch"],
    )


def _end(row: Row, key: str) -> LogEnd | None:
    """None for a value that nobody can read: it only says whom to prefer, and must not keep anybody from leading."""
    try:
        fields = _decode(row, key, {"is_cut": False}, epoch=int, position=int)
    except ValueError:
        return None
    return LogEnd(fields["epoch"], fields["position"], fields["is_cut"])


def _name(row: Row, key: str) -> MemberName | None:
    """None for a value that nobody can read: it is for people only."""
    try:
        fields = _decode(row, key, broker_id=int, address=str)
    except ValueError:
        return None
    return MemberName(fields["broker_id"], fields["address"])


def _start(row: Row, key: str) -> MemberStart | None:
    """None for a value that nobody can read: the next start writes another one."""
    try:
        fields = _decode(row, key, number=int, process=str)
    except ValueError:
        return None
    return MemberStart(fields["number"], fields["process"])


def _alive(row: Row, key: str) -> Alive | None:
    """None for a value that nobody can read: it must not keep a broker from its id."""
    try:
        fields = _decode(row, key, member=str, process=str, place=str, address=str)
    except ValueError:
        return None
    return Alive(fields["member"], fields["process"], fields["place"], fields["address"])


def _election(row: Row | None) -> int:
    """0 for a value that nobody can read: it must not keep anybody from leading."""
    try:
        return int(_decode(row, ELECTION, number=int)["number"]) if row is not None else 0
    except ValueError:
        return 0


def _withdrawn(row: Row | None) -> Withdrawn | None:
    """None for a value that nobody can read: it must not keep anybody from leading."""
    try:
        fields = _decode(row, WITHDRAWN, request_id=str, order=str) if row is not None else None
    except ValueError:
        return None
    return Withdrawn(fields["request_id"], fields["order"]) if fields is not None else None


def _order(row: Row | None) -> Order | None:
    if row is None:
        return None
    fields = _decode(row, ORDER, kind=str, target=str)
    return Order(fields["kind"], fields["target"], row.revision)
