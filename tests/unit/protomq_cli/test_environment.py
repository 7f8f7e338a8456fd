"""A variable that nothing reads is said, instead of being skipped."""

from __future__ import annotations

import sys

import pytest

from protomq_broker.config import BrokerConfig
from protomq_cli.environment import check_environment
from protomq_cli.exits import CliError, ExitCode
from protomq_namesrv.config import NamesrvConfig
from protomq_runtime.config import load_config, variables_of


def complaint(**environment: str) -> str:
    with pytest.raises(CliError) as caught:
        check_environment({"PATH": "/bin", **environment})
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.reason == "UNKNOWN_VARIABLE"
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PROTOMQ_NAMESRV_ADR", "PROTOMQ_NAMESRV_ADDR"),
        ("PROTOMQ_STORE_SYNC_FLUSCH", "PROTOMQ_STORE_SYNC_FLUSH"),
        ("PROTOMQ_BROKERNAME", "PROTOMQ_BROKER_NAME"),
        ("PROTOMQ_LISTEN_GPRC_PORT", "PROTOMQ_LISTEN_GRPC_PORT"),
        ("PROTOMQ_LIVENESS_HOLDMS", "PROTOMQ_LIVENESS_HOLD_MS"),
    ],
)
def test_a_misspelled_variable_is_named_with_what_is_like_it(name: str, meant: str) -> None:
    told = complaint(**{name: "1"})
    assert told.startswith(f"environment: nothing reads {name}; do you mean ")
    assert meant in told


@pytest.mark.parametrize("name", ["protomq_namesrv_addr", "Protomq_Namesrv_Addr"])
def test_a_variable_in_small_letters_is_named_too(name: str) -> None:
    assert complaint(**{name: "1"}).startswith(f"environment: nothing reads {name}; do you mean PROTOMQ_NAMESRV_ADDR?")
    check_environment({"protomq_home": "/src"})


def test_a_variable_that_is_like_no_other_is_to_be_unset() -> None:
    assert complaint(PROTOMQ_XYZ="1") == "environment: nothing reads PROTOMQ_XYZ; unset it"


def test_every_variable_that_is_read_is_fine_with_every_command() -> None:
    names = [*variables_of(BrokerConfig), *variables_of(NamesrvConfig)]
    names += ["PROTOMQ_NAMESRV_ADDR", "PROTOMQ_CONFIG", "PROTOMQ_SHARD", "PROTOMQ_CHAOS_SEEDS"]
    check_environment(dict.fromkeys(names, "1"))
    check_environment({"PROTOMQX": "1", "OTEL_SERVICE_NAME": "x"})


def test_what_containers_get_for_a_service_of_that_name_is_let_pass() -> None:
    check_environment(
        {
            "PROTOMQ_SERVICE_HOST": "10.0.0.1",
            "PROTOMQ_SERVICE_PORT": "8081",
            "PROTOMQ_SERVICE_PORT_GRPC": "8081",
            "PROTOMQ_PORT": "tcp://10.0.0.1:8081",
            "PROTOMQ_PORT_8081_TCP": "tcp://10.0.0.1:8081",
            "PROTOMQ_NAMESRV_PORT_9876_TCP_ADDR": "10.0.0.1",
        }
    )
    complaint(PROTOMQ_LISTN_REMOTING_PORT="10911")


def test_the_variables_are_those_that_are_read() -> None:
    name = "PROTOMQ_STORE_SYNC_FLUSH"
    assert name in variables_of(BrokerConfig)
    assert load_config(BrokerConfig, environment={name: "yes"}).store.sync_flush


def test_a_client_alone_knows_no_servers_variables_and_leaves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "protomq_broker.config", None)
    check_environment({"PROTOMQ_STORE_SYNC_FLUSCH": "1"})
    assert "PROTOMQ_NAMESRV_ADDR" in complaint(PROTOMQ_NAMESRV_ADDRESS="1")
