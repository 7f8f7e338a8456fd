"""A variable that is meant for the SDK and misspelled is told; those of others are not."""

from __future__ import annotations

import warnings

import pytest

from protomq import Producer, _environment
from protomq._environment import mistaken, namesrv_addresses
from protomq_cli.environment import _variables_of_servers


@pytest.mark.parametrize(
    "name",
    ["PROTOMQ_NAMESERVER_ADDR", "PROTOMQ_NAMESRV_ADDRESS", "PROTOMQ_NAMESVR_ADDR", "PROTOMQ_NAMESRVADDR",
     "PROTOMQ_NAME_SERVER_ADDR", "PROTOMQ_NAMESERVER", "protomq_namesrv_addr", "PROTOMQ_NAMESRV_URL"],
)  # fmt: skip
def test_a_misspelled_variable_is_told_with_the_right_one(name: str) -> None:
    assert mistaken({name: "ns:9876"}) == {
        name: f"environment: nothing reads {name}; do you mean PROTOMQ_NAMESRV_ADDR?"
    }


def test_variables_of_others_are_theirs() -> None:
    theirs = dict.fromkeys(_variables_of_servers() or (), "x")
    assert len(theirs) > 50
    theirs |= {"PROTOMQ_NAMESRV_ADDR": "ns:9876", "PROTOMQ_CONFIG": "x", "PATH": "/bin", "NAMESRV_ADDR": "x"}
    theirs |= {"PROTOMQ_NAMESRV_PORT": "tcp://10.0.0.1:9876", "PROTOMQ_NAMESRV_SERVICE_HOST": "10.0.0.1"}
    theirs |= {"PROTOMQ_NAMESRV_PORT_9876_TCP_ADDR": "10.0.0.1"}
    assert mistaken(theirs) == {}
    del theirs["PROTOMQ_NAMESRV_ADDR"]
    assert mistaken(theirs) == {
        "PROTOMQ_NAMESRV": "environment: PROTOMQ_NAMESRV is a setting of brokers; clients read PROTOMQ_NAMESRV_ADDR"
    }


def test_it_is_told_once_and_only_where_the_variable_would_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_environment, "_told", set())
    monkeypatch.setenv("PROTOMQ_NAMESERVER_ADDR", "127.0.0.1:1")
    monkeypatch.delenv("PROTOMQ_NAMESRV_ADDR", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Producer(namesrv="127.0.0.1:1").close()
    with pytest.warns(RuntimeWarning, match="nothing reads PROTOMQ_NAMESERVER_ADDR"):
        Producer().close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Producer().close()
    assert namesrv_addresses({"PROTOMQ_NAMESRV_ADDR": " a:1 "}) == "a:1"
