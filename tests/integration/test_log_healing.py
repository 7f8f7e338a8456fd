"""Damage of the log of a broker that runs is healed from its replica: of the master from the slave, of the slave from the master."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import grpc
import pytest

from protomq import Admin
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.send_service_pb2_grpc import SendServiceStub
from tests.support.ha_brokers import SEGMENT_SIZE_BYTES, TOPIC, HaBroker, pair, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

from .test_backup import bodies


def flip(broker: HaBroker, position: int) -> Path:
    """Changes one octet of the log on the disk. Returns the file."""
    path = broker.folder / "commitlog" / f"{position - position % SEGMENT_SIZE_BYTES:020d}"
    with path.open("r+b") as file:
        file.seek(position % SEGMENT_SIZE_BYTES)
        octet = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([octet ^ 0x10]))
    return path


@pytest.mark.long
@pytest.mark.parametrize("damaged", ["master", "slave"])
def test_damage_is_healed_from_the_other_one_while_both_serve(damaged: str, tmp_path: Path) -> None:
    with running_namesrv() as namesrv:
        master, slave = pair(tmp_path, namesrv=[str(namesrv.remoting)])
        with running(master, slave):
            sent = [b"%05d" % number + bytes(20_000) for number in range(300)]
            for first in range(0, len(sent), 60):
                master.send_ok(*sent[first : first + 60])
            slave.wait_for_all_of(master)
            broker = master if damaged == "master" else slave
            # From here on the first segment is nobody's to write to, and who does is noticed.
            assert bodies(broker) == sent
            flip(broker, 1 << 20)
            flip(broker, 3 << 20)

            def is_healed() -> bool:
                with contextlib.suppress(grpc.RpcError):  # CORRUPT_LOG, until it is healed
                    found = bodies(broker)
                    return found == sent and broker.log_text().count("are healed from a") == 2
                return False

            wait_for(is_healed, PATIENCE_S)
            assert "are in quarantine" in broker.log_text()
            end = master.status().end_position
            assert master.log_bytes(end) == slave.log_bytes(end)
            with Admin(namesrv=str(namesrv.remoting)) as admin:
                states = admin.broker_status()
            if damaged == "master":
                (state,) = states
                assert (state.healed_log_ranges, state.log_damages) == (2, ())


def test_a_delayed_message_that_is_damaged_when_it_falls_due_is_delivered_after_the_healing(tmp_path: Path) -> None:
    with running_namesrv() as namesrv:
        master, slave = pair(tmp_path, namesrv=[str(namesrv.remoting)], store={"scrub_bytes_per_s": 0})
        with running(master, slave):
            master.send_ok(b"before")
            slave.wait_for_all_of(master)
            later = SendRequest(topic=TOPIC, queue_id=0, records=[Record(body=b"later")], delay_ms=5_000)
            with grpc.insecure_channel(master.address.grpc_address) as channel:
                position = SendServiceStub(channel).Send(later, timeout=PATIENCE_S).physical_offset
            # Then nobody writes to its segment any more, and the file's time says that somebody did. Nobody but the timer reads there.
            for _ in range(2):
                master.send_ok(*[bytes(20_000)] * 120)
            slave.wait_for_all_of(master)
            segment = flip(master, position + 4)
            soon_s = segment.stat().st_mtime + 60
            os.utime(segment, (soon_s, soon_s))
            wait_for(lambda: "1 delayed messages cannot be read" in master.log_text(), PATIENCE_S)
            wait_for(lambda: "are healed from a" in master.log_text(), PATIENCE_S)
            wait_for(lambda: b"later" in bodies(master), PATIENCE_S)
            assert bodies(master).count(b"later") == 1
            end = master.status().end_position
            slave.wait_for_all_of(master)
            assert master.log_bytes(end) == slave.log_bytes(end)
