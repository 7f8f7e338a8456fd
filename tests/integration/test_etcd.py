"""The gateway with a real etcd: it keeps the contract that the model of the unit tests keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from protomq_broker.etcd_gateway import HttpEtcd
from protomq_ha.cluster_state import MASTER, ClusterView, Put, Transaction, encode_master
from protomq_ha.leadership_values import (
    Committed,
    GrantLease,
    Lease,
    ReadCluster,
    Refused,
    RenewLease,
)
from tests.support.etcd_contract import check_contract
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import PATIENCE_S, wait_for

PREFIX = "/protomq/DefaultCluster/a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    etcd = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield etcd
    etcd.kill()


def test_a_real_etcd_keeps_the_contract(server: EtcdServer) -> None:
    with closing(HttpEtcd([server.url], PREFIX)) as etcd:
        check_contract(etcd)


def test_the_master_key_goes_with_its_lease(server: EtcdServer) -> None:
    with closing(HttpEtcd([server.url], "/protomq/DefaultCluster/b")) as etcd:
        lease = etcd.ask(GrantLease(2_000))
        assert isinstance(lease, Lease)
        assert lease.ttl_ms == 2_000, "etcd grants no less than this by default"
        etcd.ask(Transaction((), (Put(MASTER, encode_master("7", 1, "a:1"), lease.lease),)))

        def is_gone() -> bool:
            view = etcd.ask(ReadCluster())
            assert isinstance(view, ClusterView)
            return view.master is None

        assert not is_gone()
        wait_for(is_gone, PATIENCE_S)
        assert etcd.ask(RenewLease(lease.lease)) == Lease(lease.lease, 0)


def test_an_etcd_that_is_silent_or_dead_is_no_answer_within_the_time_out(server: EtcdServer) -> None:
    with closing(HttpEtcd([server.url], PREFIX)) as etcd:
        server.pause()
        try:
            begun = time.monotonic()
            assert etcd.ask(ReadCluster()) is None
            assert 0.9 < time.monotonic() - begun < PATIENCE_S
        finally:
            server.resume()
        wait_for(lambda: etcd.ask(ReadCluster()) is not None, PATIENCE_S)
        server.kill()
        assert etcd.ask(ReadCluster()) is None
        assert etcd.problem
        server.start()
        wait_for(lambda: etcd.ask(ReadCluster()) is not None, PATIENCE_S)


def test_an_etcd_that_wants_a_password_refuses_all_but_renewals(server: EtcdServer) -> None:
    root = {"name": "root", "password": "x"}

    def admin(path: str, body: dict[str, str], token: str = "") -> dict[str, str]:
        headers = {"Authorization": token} if token else {}
        answer: dict[str, str] = httpx.post(f"{server.url}/v3/auth/{path}", json=body, headers=headers).raise_for_status().json()
        return answer

    with closing(HttpEtcd([server.url], "/protomq/DefaultCluster/c")) as etcd:
        lease = etcd.ask(GrantLease(60_000))
        assert isinstance(lease, Lease)
        put = Transaction((), (Put(MASTER, encode_master("7", 1, "a:1")),))
        for path, body in (("user/add", root), ("role/add", {"name": "root"}), ("user/grant", {"user": "root", "role": "root"})):
            admin(path, body)
        admin("enable", {})
        try:
            assert isinstance(etcd.ask(ReadCluster()), Refused)
            assert isinstance(etcd.ask(put), Refused)
            assert etcd.ask(RenewLease(lease.lease)) == lease
        finally:
            admin("disable", {}, admin("authenticate", root)["token"])
        assert isinstance(etcd.ask(put), Committed)
