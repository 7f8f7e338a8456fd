"""Damage of the log of a broker that runs is healed from its replica: of the master from the slave, of the slave from the master."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import pytest

from protomq import Admin
from tests.support.ha_brokers import SEGMENT_SIZE_BYTES, HaBroker, pair, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

from .test_backup import bodies


def flip(broker: HaBroker, position: int) -> None:
    """Changes one octet of the log on the disk."""
    path = broker.folder / "commitlog" / f"{position - position % SEGMENT_SIZE_BYTES:020d}"
    with path.open("r+b") as file:
        file.seek(position % SEGMENT_SIZE_BYTES)
        octet = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([octet ^ 0x10]))


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
