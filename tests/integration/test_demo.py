"""The demo on a few made-up flights: what it proves, what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq_cli import demo
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.flights import RoundTripCheck
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
COUNT = 3000


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flights") / "flights.csv"
    lines = ["year,month,dep_time,carrier,flight,tailnum,time_hour"]
    for number in range(COUNT):
        tail = "NA" if number % 50 == 0 else "N14228" if number % 50 == 1 else f"N{number % 97}"
        lines.append(
            f"2013,1,{number},{'UA' if number % 3 else 'AA'},{number},{tail},2013-01-01T10:00:00Z"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def run_demo(flights: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "protomq_cli.demo",
        "--flights",
        str(flights),
        "--data-dir",
        "store",
        *arguments,
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def finished(flights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, output) of a demo that has run twice: the second rebuilds the store."""
    folder = tmp_path_factory.mktemp("demo")
    run_demo(flights, folder, "--count", str(COUNT))
    done = run_demo(flights, folder, "--count", str(COUNT))
    assert done.returncode == 0, done.stderr
    assert "another member" not in done.stderr
    return folder, done.stdout


def test_the_demo_checks_everything_and_prints_a_table(finished: tuple[Path, str]) -> None:
    output = finished[1]
    assert (
        "checked: 3,000 of 3,000 messages came back, each once, 98 tail numbers in order" in output
    )
    assert "60 messages without a key, every CRC-32C right" in output
    assert len(re.findall(r"^(send|consume).* \d[\d,.]* ", output, re.MULTILINE)) == 3
    killed = re.search(
        r"one was killed \(-9\) after ([\d,]+) messages, the other took its (\d) queues", output
    )
    assert killed is not None
    assert 0 < int(killed[1].replace(",", "")) < COUNT
    assert 0 < int(killed[2]) < 8
    repeats = re.search(r"3,000 messages handled, none lost, ([\d,]+) of them twice", output)
    assert repeats is not None
    assert 0 < int(repeats[1]) < COUNT


@pytest.fixture(scope="module")
def restarted(finished: tuple[Path, str]) -> Iterator[tuple[Path, str, list[str]]]:
    """(folder, name server, commands): the broker runs again as the demo says; the other commands are still to be typed."""
    folder, output = finished
    start, *others = [line.strip() for line in output.splitlines() if line.startswith("  ")]
    # Another broker may have the default ports of this machine.
    command = [*shlex.split(start), "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as broker:
        assert broker.stdout is not None
        ready = broker.stdout.readline()
        yield folder, ready.split("remoting=")[1].split()[0], others
        broker.terminate()


def test_the_next_commands_work_as_printed(restarted: tuple[Path, str, list[str]]) -> None:
    folder, namesrv, commands = restarted
    environment = {**os.environ, "PROTOMQ_NAMESRV_ADDR": namesrv}
    assert len(commands) == 3
    outputs = []
    for command in commands:
        done = subprocess.run(
            shlex.split(command),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        outputs.append(done.stdout)
    pulled, queried, offsets = outputs
    assert len(pulled.splitlines()) == 3
    assert '"tailnum":"N14228"' in queried
    lags = [line.split()[-1] for line in offsets.splitlines()[1:]]
    assert lags == ["0"] * 8


def test_the_store_holds_exactly_one_copy_of_the_flights(
    restarted: tuple[Path, str, list[str]],
) -> None:
    _, namesrv, _ = restarted
    environment = {**os.environ, "PROTOMQ_NAMESRV_ADDR": namesrv}
    command = [sys.executable, "-m", "protomq_cli"]
    listed = subprocess.run(
        [*command, "topic", "list", "-o", "jsonl"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split('"')[3] for line in listed.stdout.splitlines()] == ["flights"]
    pulled = subprocess.run(
        [*command, "pull", "flights", "-c", "0", "-f", r"%v\n"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    numbers = sorted(json.loads(line)["flight"] for line in pulled.stdout.splitlines())
    assert numbers == list(range(COUNT))


def test_a_file_with_too_few_flights_fails_with_one_line(flights: Path, tmp_path: Path) -> None:
    done = run_demo(flights, tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith("flights.csv holds 3,000 flights, not 336,776")


def test_a_folder_that_the_demo_did_not_make_is_left_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "precious").touch()
    with pytest.raises(CliError, match="did not make") as caught:
        demo.prepare_store(store)
    assert caught.value.exit_code is ExitCode.REFUSED
    assert (store / "precious").exists()


def test_missing_flights_are_said_with_the_command_that_fetches_them(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "none.csv", tmp_path)
    assert done.returncode == 4
    assert "tools/fetch_flights.py" in done.stderr


def test_a_message_that_comes_back_changed_fails_the_check() -> None:
    check = RoundTripCheck()
    check.sent("a", 1)
    check.received("a", 2)
    assert check.problems()


def test_a_master_killed_on_the_way_costs_no_flight(flights: Path, tmp_path: Path) -> None:
    # `make demo-failover`, on few flights.
    tool = ROOT / "tools/demo_failover.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--flights", str(flights), "--count", str(COUNT), "--folder", str(tmp_path / "cluster")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    begin, killed, leads, count, without_service = done.stdout.splitlines()
    assert begin.startswith("4 brokers in sync, the masters at ")
    assert killed.startswith("1,000 flights are on their way: kill -9 of the master at ")
    assert leads.startswith("the new master of broker-a is at ")
    assert killed.rpartition(" ")[2] not in leads
    assert count == "sent 3,000, received 3,000: each once, in order"
    assert re.match(r"time without service: \d+\.\d\d s ", without_service)


def test_a_demo_that_is_ended_by_sigterm_ends_its_cluster(flights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    command = [sys.executable, str(ROOT / "tools/demo_failover.py"), "--flights", str(flights), "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("4 brokers in sync")
        pids = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if runs_in(pid, folder)}
        assert len(pids) >= 7, "etcd, two name servers, four brokers"
        demo.terminate()
        assert demo.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not [pid for pid in pids if runs_in(pid, folder)]


def runs_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()
    except OSError:
        return False
