from __future__ import annotations

from pathlib import Path

import pytest

from protomq.errors import ConfigurationError
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.settings import config_path, find_namesrv
from protomq_cli.standalone import DESK_DISK_RATIOS, desk_disk_ratios
from protomq_cli.worker import process_environment


def nobody(address: str) -> bool:
    return False


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('namesrv = "file:1"\n')
    return path


def test_the_flag_wins_over_the_environment_and_that_over_the_file(config: Path) -> None:
    environment = {"PROTOMQ_CONFIG": str(config), "PROTOMQ_NAMESRV_ADDR": "environment:1"}
    assert find_namesrv("flag:1", environment, nobody) == "flag:1"
    assert find_namesrv(None, environment, nobody) == "environment:1"
    del environment["PROTOMQ_NAMESRV_ADDR"]
    assert find_namesrv(None, environment, nobody) == "file:1"


def test_processes_of_a_worker_get_the_name_server_that_commands_find(config: Path, tmp_path: Path) -> None:
    environment = {"PROTOMQ_CONFIG": str(config), "HOME": "/x"}
    assert process_environment(None, environment) == {**environment, "PROTOMQ_NAMESRV_ADDR": "file:1"}
    assert process_environment("flag:1", environment) == {**environment, "PROTOMQ_NAMESRV_ADDR": "flag:1"}
    environment["PROTOMQ_NAMESRV_ADDR"] = "environment:1"
    assert process_environment(None, environment) == environment
    nothing = {"XDG_CONFIG_HOME": str(tmp_path / "none"), "PROTOMQ_NAMESRV": "h:1"}
    assert process_environment(None, nothing) == nothing, "a consumer may have one of its own"
    with pytest.raises(ConfigurationError, match="an address has the form host:port, with a port from 1 to 65535; this is 'localhost'"):
        process_environment("localhost", environment)


def test_a_variable_wins_over_the_disk_ratios_of_a_desk() -> None:
    assert desk_disk_ratios({}) == DESK_DISK_RATIOS
    assert desk_disk_ratios({"PROTOMQ_STORE_DISK_FORCE_RATIO": "0.5"}) == {}


def test_without_any_of_them_the_usual_ports_are_tried_in_turn(tmp_path: Path) -> None:
    tried: list[str] = []

    def standalone(address: str) -> bool:
        tried.append(address)
        return address.endswith(":10911")

    assert find_namesrv(None, {"XDG_CONFIG_HOME": str(tmp_path)}, standalone) == "127.0.0.1:10911"
    assert tried == ["127.0.0.1:9876", "127.0.0.1:10911"]


def test_the_remoting_port_is_passed_over_where_grpc_alone_is_wanted(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    found = find_namesrv(
        None, environment, lambda address: not address.endswith("9876"), grpc_only=True
    )
    assert found == "127.0.0.1:8081"


def test_if_nobody_listens_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="protomq standalone") as caught:
        find_namesrv(None, {"XDG_CONFIG_HOME": str(tmp_path)}, nobody)
    assert caught.value.exit_code is ExitCode.UNREACHABLE


def test_the_brokers_setting_is_not_taken_for_the_commands_variable_in_silence(config: Path) -> None:
    environment = {"PROTOMQ_CONFIG": str(config), "PROTOMQ_NAMESRV": "h:1"}
    with pytest.raises(CliError, match="set PROTOMQ_NAMESRV_ADDR") as caught:
        find_namesrv(None, environment, nobody)
    assert caught.value.exit_code is ExitCode.USAGE
    assert find_namesrv("flag:1", environment, nobody) == "flag:1"
    environment["PROTOMQ_NAMESRV_ADDR"] = "h:2"
    assert find_namesrv(None, environment, nobody) == "h:2"


def test_a_file_that_the_variable_names_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="there is no such file; PROTOMQ_CONFIG names it") as caught:
        find_namesrv(None, {"PROTOMQ_CONFIG": str(tmp_path / "none")}, nobody)
    assert caught.value.exit_code is ExitCode.NOT_FOUND
    named = {"PROTOMQ_CONFIG": str(tmp_path / "none"), "PROTOMQ_NAMESRV_ADDR": "environment:1"}
    with pytest.raises(CliError, match="there is no such file; PROTOMQ_CONFIG names it"):
        find_namesrv(None, named, nobody)
    assert find_namesrv("flag:1", named, nobody) == "flag:1"


@pytest.mark.parametrize(
    "content", ["namesrv = ", "namesrv = 9876", "\xff", 'namesrvv = "h:1"', 'namesrv = "h:1"\n[log]']
)
def test_a_damaged_file_is_named_in_the_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CliError, match=str(path)) as caught:
        find_namesrv(None, {"PROTOMQ_CONFIG": str(path)}, nobody)
    assert caught.value.exit_code is ExitCode.USAGE


def test_the_file_is_where_desktops_keep_such_files() -> None:
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/protomq/config.toml")
    assert config_path({}) == Path.home() / ".config/protomq/config.toml"
