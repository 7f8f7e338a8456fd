"""A group with real processes: members are killed, stopped past their time and woken, come and go; its two brokers are killed, or the lead
of three changes.

A run has one kind of member, by its seed (`group_member.KINDS`): of pull and push consumers, of threads and tasks, in order or not. What
members did is judged at the end: checker/groups.py has the rules.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, Protocol

from protomq import Admin, MessageQueue, Producer
from protomq.errors import ProtomqError
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME
from tests.support.namesrv import running_namesrv

from .broker_places import ELECTION, ElectedName, is_acknowledged
from .checker import Violation
from .checker.groups import WORLD, GroupHistory, check_group, take_overs_s
from .group_member import COMMIT_INTERVAL_S, KINDS, TOPIC
from .pace import measured_pace

BROKERS: Final = ("a", "b")
QUEUES_EACH: Final = 4
MEMBERS_MIN: Final = 2
MEMBERS_MAX: Final = 4
GAP_S: Final = 3.0
SETTLE_S: Final = 3.0
QUIET_S: Final = SETTLE_S + 2.5
"""`take_overs_s` counts a kill if no broker was away for nearly that long before."""
PATIENCE_S: Final = 60.0
STOPS: Final = ("stop",)
KILLS: Final = ("kill", "kill alone", "broker", "broker and member")
FAULTS: Final = (*KILLS, *KILLS, "join", "leave")
FAILOVERS: Final = ("broker", "broker", "broker and member")
SEND_PAUSE_S: Final = 0.01


class BrokerProcess:
    """A broker that can be killed, and comes back at its place."""

    def __init__(self, name: str, folder: Path, namesrv: str, gap_s: float) -> None:
        self.name = name
        self._gap_s = gap_s
        self._folder = folder
        self._namesrv = namesrv
        self._ports = {"grpc": 0, "remoting": 0}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it is ready."""
        config = {
            "data_dir": str(self._folder / self.name),
            "broker_name": self.name,
            "namesrv": [self._namesrv],
            "listen": {f"{kind}_port": port for kind, port in self._ports.items()},
            "register_interval_ms": 500,
            "member_gap_ms": round(self._gap_s * 1000),
            "member_settle_ms": round(SETTLE_S * 1000),
            "store": {"segment_size_bytes": 16 << 20, "disk_delete_ratio": 0.97, "disk_force_ratio": 0.98, "disk_refuse_ratio": 0.99},
        }
        file = self._folder / f"{self.name}.yaml"
        file.write_text(json.dumps(config))  # which is YAML, too
        command = [sys.executable, "-m", "protomq_cli.main", "broker", "-c", str(file)]
        with open(self._folder / f"{self.name}.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"broker {self.name} did not start: {(self._folder / f'{self.name}.log').read_text()[-2000:]}")
        words = dict(word.split("=", 1) for word in line.split()[1:])
        self._ports = {kind: int(words[kind].rpartition(":")[2]) for kind in self._ports}

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class NamedBroker(Protocol):
    """Of a name that is away for a while. Attribute: name."""

    name: str

    def kill(self) -> None:
        """It is away from now on."""
        ...

    def start(self) -> None:
        """Returns when it is served again."""
        ...


class ElectedGroupBroker:
    """Three brokers that elect their master, seen as one that is away for a while: each time the lead changes in another way."""

    def __init__(self, cluster: ElectedCluster, rng: random.Random, counts: Counter[str]) -> None:
        self.name, self._elected, self._change = NAME, ElectedName(cluster, rng), ""
        self._counts = counts

    def kill(self) -> None:
        """The lead begins to change, unless it is given away: that waits for `start`."""
        self._change = self._elected.begin()
        self._counts[f"lead: {self._change}"] += 1

    def start(self) -> None:
        """Another one leads, and the old one is back."""
        self._elected.end(self._change)


class Member:
    """A member's process, and a thread that reads what it says."""

    def __init__(self, world: GroupWorld, name: str, kind: str = "", *arguments: str) -> None:
        """`kind`: other than the run's. `arguments`: of that kind."""
        self.name = name
        self._world = world
        command = [sys.executable, "-m", "tests.chaos.group_member", kind or world.kind, world.namesrv, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=world.log, cwd=Path(__file__).parents[2]
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._world.note(self.name, line.decode())

    def kill(self) -> None:
        """SIGKILL."""
        self._world.tell("killed", time.monotonic(), self.name)
        self.process.kill()
        self._end()

    def leave(self) -> None:
        """SIGTERM: it says goodbye."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR2)
            time.sleep(0.5)
            self._world.say("I2", f"{self.name} does not end: {self._world.log_text()[-4_000:]}")
            self.process.kill()
        self._end()

    def is_stopped(self) -> bool:
        """Whether it is, by SIGSTOP."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def _end(self) -> None:
        self.process.wait()
        self._reader.join(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class GroupWorld:
    """A run: its processes, and what they did."""

    send_pause_s = SEND_PAUSE_S

    def __init__(self, seed: int, folder: Path, counts: Counter[str], gap_s: float) -> None:
        self.rng = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.counts = counts
        self.folder = folder
        self.lock = threading.Lock()
        self.found: list[Violation] = []
        is_orderly = self.kind.endswith("orderly")
        self.history = GroupHistory(
            gap_s,
            SETTLE_S,
            is_locked=is_orderly or self.kind == "locked",
            is_ordered=is_orderly or self.kind in ("pull", "locked"),
            is_held_up=is_orderly,
            commit_s=COMMIT_INTERVAL_S,
        )
        self.namesrv = ""
        self.members: dict[str, Member] = {}
        self.brokers: dict[str, NamedBroker] = {}
        self.log: IO[bytes]
        self.events: IO[str]
        self._member_number = 0
        self._stopping = threading.Event()

    def note(self, who: str, line: str) -> None:
        """A member says something, or the world around them. `events` has it, so that a red run can be judged again."""
        with self.lock:
            self.history.note(who, line)
            self.events.write(f"{who} {line}")

    def tell(self, *words: object) -> None:
        """Something happens to members or brokers."""
        self.note(WORLD, " ".join(map(str, words)) + "\n")

    def say(self, rule: str, text: str) -> None:
        """Something is wrong."""
        with self.lock:
            self.found.append(Violation(rule, text))

    def log_text(self) -> str:
        """What the members have written to stderr."""
        return (self.folder / "members.log").read_text(errors="replace")

    # -- what happens ----------------------------------------------------------------------------------------------------

    def round(self, fault: str) -> None:
        """One thing happens; often the next one comes before all has settled."""
        self.counts[f"rounds: {fault}"] += 1
        getattr(self, f"_{fault.replace(' ', '_')}")()
        while len(self.members) < MEMBERS_MIN:
            self._join()
        if self.rng.random() < 0.5:
            self.settle()
        else:
            self._stopping.wait(self.rng.uniform(0.05, 0.5))

    def settle(self, besides: str = "") -> None:
        """Waits until each queue is consumed again, by another one than `besides`."""
        since_s = time.monotonic()

        def is_consumed() -> bool:
            with self.lock:
                return all(
                    any(got.time_s > since_s and got.member != besides for got in reversed(self.history.got[queue][-50:]))
                    for queue in self.queues
                )

        if not self.wait(is_consumed):
            self.say("C6", f"not all queues are consumed within {PATIENCE_S:.0f} s")

    def share_out(self) -> None:
        """Waits until all members have queues, and none has changed hands for a while: who begins is still giving queues up before."""

        def owners() -> dict[str, str]:
            with self.lock:
                return {queue: self.history.got[queue][-1].member for queue in self.queues if self.history.got[queue]}

        def is_steady() -> bool:
            before = owners()
            self._stopping.wait(1.0)
            return set(before.values()) == self.members.keys() and owners() == before

        self.wait(is_steady)
        self.settle()

    def wait(self, is_done: Callable[[], bool]) -> bool:
        """Whether it becomes so within PATIENCE_S."""
        ends_s = time.monotonic() + PATIENCE_S
        while not is_done():
            if time.monotonic() > ends_s or self.found:
                return False
            time.sleep(0.01)
        return True

    def _join(self) -> None:
        self._member_number += 1
        name = f"m{self._member_number}"
        self.members[name] = Member(self, name)

    def _kill_alone(self) -> None:
        self.members.pop(self.rng.choice(sorted(self.members))).kill()

    def _kill(self) -> None:
        self._kill_alone()
        if len(self.members) < MEMBERS_MAX and self.rng.random() < 0.8:
            self._join()

    def kill_undisturbed(self) -> None:
        """A member is killed, and nothing else happens: how long it takes until its queues are consumed again."""
        while len(self.members) < MEMBERS_MIN + 1:
            self._join()
        self.settle()
        self._stopping.wait(QUIET_S)
        self.settle()
        self._kill_alone()
        self.settle()

    def _leave(self) -> None:
        self.members.pop(self.rng.choice(sorted(self.members))).leave()

    def _broker(self, *, between: Callable[[], None] = lambda: None) -> None:
        broker = self.brokers[self.rng.choice(sorted(self.brokers))]
        begin_s = time.monotonic()
        broker.kill()
        between()
        self._stopping.wait(self.rng.choice((0.0, 0.3, 1.0)))
        broker.start()
        self.tell("down", time.monotonic(), broker.name, begin_s)

    def _broker_and_member(self) -> None:
        self._broker(between=self._kill)

    def _stop(self) -> None:
        self._stop_member(in_commit=self.rng.random() < 0.5)

    def _stop_in_a_commit(self) -> None:
        self._stop_member(in_commit=True)

    def _stop_anywhere(self) -> None:
        self._stop_member(in_commit=False)

    def _stop_member(self, *, in_commit: bool) -> None:
        """Past its time. `in_commit`: between the checks of a commit and its way out."""
        while len(self.members) < MEMBERS_MIN + 1:
            self._join()
        self.settle()
        name = self.rng.choice(sorted(self.members))
        member = self.members[name]
        begin_s = time.monotonic()
        member.process.send_signal(signal.SIGUSR1 if in_commit else signal.SIGSTOP)
        if not self.wait(member.is_stopped):
            self.say("I2", f"{name} commits nothing")
            return
        if in_commit:
            self.wait(lambda: name in self.history.stopping_s)
            with self.lock:
                begin_s = self.history.stopping_s.pop(name)
        # Others take its queues once it counts as gone.
        self._stopping.wait(1.6 * self.history.gap_s + 0.5 - (time.monotonic() - begin_s))
        self.settle(besides=name)
        self.tell("stopped", time.monotonic(), name, begin_s)
        self.counts["stopped in a commit" if in_commit else "stopped anywhere"] += 1
        member.process.send_signal(signal.SIGCONT)

    # -- life ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """With brokers, members and a producer; at the end all that was sent is consumed."""
        with ExitStack() as stack:
            self.events = stack.enter_context(open(self.folder / "events", "a"))
            self.log = stack.enter_context(open(self.folder / "members.log", "ab"))
            self._start_brokers(stack)
            with Admin(namesrv=self.namesrv) as admin:
                admin.create_topic(TOPIC, write_queues=QUEUES_EACH, read_queues=QUEUES_EACH)
            self.queues = [f"{name}/{number}" for name in self.brokers for number in range(QUEUES_EACH)]
            producers = [threading.Thread(target=self._produce, args=(name,), daemon=True) for name in self.brokers]
            stack.callback(self._end_members)
            stack.enter_context(measured_pace(self._note_pace))
            for producer in producers:
                producer.start()
            for _ in range(MEMBERS_MIN + 1):
                self._join()
            self.settle()
            self.share_out()
            try:
                yield
                self.settle()
            finally:
                self._stopping.set()
                for producer in producers:
                    producer.join(PATIENCE_S)
            self.wait(self._is_all_done)

    def _start_brokers(self, stack: ExitStack) -> None:
        self.namesrv = str(stack.enter_context(running_namesrv()).remoting)
        for name in BROKERS:
            self.brokers[name] = BrokerProcess(name, self.folder, self.namesrv, self.history.gap_s)
            stack.callback(self.brokers[name].kill)
            self.brokers[name].start()
        with Admin(namesrv=self.namesrv) as admin:
            self.wait(lambda: len(admin.cluster_info()) == len(BROKERS))

    def _note_pace(self, time_s: float, pace: float) -> None:
        self.tell("pace", time_s, pace)

    def _is_all_done(self) -> bool:
        with self.lock:
            return all(offset in self.history.done[queue] for queue, offset in self.history.acked_s)

    def _end_members(self) -> None:
        for member in self.members.values():
            member.process.send_signal(signal.SIGCONT)
            member.leave()

    def _produce(self, broker_name: str) -> None:
        number = 0
        with Producer(namesrv=self.namesrv, send_timeout_s=1.0) as producer:
            while not self._stopping.wait(self.send_pause_s * len(self.brokers)):
                queue = MessageQueue(TOPIC, broker_name, number % QUEUES_EACH)
                number += 1
                sent_s = time.monotonic()
                try:
                    result = producer.send(TOPIC, b"%d" % number, queue=queue)
                except ProtomqError:
                    continue
                if not is_acknowledged(result):
                    continue
                self.tell("acked", time.monotonic(), f"{broker_name}/{queue.queue_id}", result.queue_offset, sent_s)


class ElectedGroupWorld(GroupWorld):
    """One name, whose three brokers elect their master."""

    def _start_brokers(self, stack: ExitStack) -> None:
        settings: dict[str, Any] = {"member_gap_ms": round(self.history.gap_s * 1000), "member_settle_ms": round(SETTLE_S * 1000)}
        cluster = stack.enter_context(elected_cluster(self.folder, election=ELECTION, **settings))
        self.namesrv, broker = cluster.namesrv, ElectedGroupBroker(cluster, self.rng, self.counts)
        self.brokers[broker.name] = broker


def group_rounds(
    seed: int,
    rounds: int,
    folder: Path,
    counts: Counter[str],
    faults: tuple[str, ...] = FAULTS,
    *,
    undisturbed_kills: int = 0,
    gap_s: float = GAP_S,
    make_world: type[GroupWorld] = GroupWorld,
) -> tuple[list[Violation], list[float]]:
    """What is wrong, and how long take-overs from killed members lasted, in seconds. `gap_s`: after which a silent member is given up."""
    world = make_world(seed, folder, counts, gap_s)
    counts[f"kind: {world.kind}"] += 1
    with world.running():
        for _ in range(rounds):
            world.round(world.rng.choice(faults))
            if world.found:
                break
        for _ in range(undisturbed_kills):
            world.kill_undisturbed()
    world.found += check_group(world.history, counts)
    (folder / "found").write_text("".join(f"{each}\n" for each in world.found))
    return world.found, take_overs_s(world.history)


def told(take_overs: list[float]) -> dict[str, int]:
    """For counts, in milliseconds."""
    if not take_overs:
        return {}
    return {
        "take-overs": len(take_overs),
        "take-over ms, median": round(statistics.median(take_overs) * 1000),
        "take-over ms, longest": round(max(take_overs) * 1000),
    }
