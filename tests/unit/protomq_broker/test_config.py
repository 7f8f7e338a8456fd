"""A broker's configuration is judged before anything is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protomq.v1 import (
    consumer_service_pb2,
    group_service_pb2,
    membership_service_pb2,
    queue_lock_service_pb2,
    reply_service_pb2,
)
from protomq_broker.broker import Broker
from protomq_broker.config import BrokerConfig, DecidedElection, EtcdConfig, LaneSizes
from protomq_broker.consumer_service import ConsumerService
from protomq_broker.group_service import GroupService
from protomq_broker.membership_service import MembershipService
from protomq_broker.queue_lock_service import QueueLockService
from protomq_broker.reply_service import ReplyService
from protomq_runtime.addresses import Address
from protomq_runtime.config import ConfigError, load_config
from protomq_runtime.dispatch import DispatchTable


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"namesrv": ("localhost",)}, "namesrv: 'localhost' has no port"),
        ({"namesrv": ("a:1;b",)}, "namesrv: 'b' has no port"),
        ({"namesrv": ("http://h:1",)}, "namesrv: 'http://h:1' is a URL"),
        ({"namesrv": ("h:0",)}, "namesrv: "),
        ({"broker_name": "ä b"}, "broker_name is 'ä b'; it must be 1 to 127 characters"),
        ({"cluster": ""}, "cluster is ''"),
    ],
)
def test_what_no_name_server_would_take_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BrokerConfig(**values)


@pytest.mark.parametrize("folder", ["C:\\data\\mq", "data\\mq", "C:/data"])
def test_a_folder_as_windows_writes_it_is_not_made_in_the_current_one(folder: str) -> None:
    with pytest.raises(ValueError, match=r"^data_dir is '.*'; it is written with slashes, as in /data/mq"):
        BrokerConfig(data_dir=Path(folder))
    assert BrokerConfig(data_dir=Path("a:b/c")).data_dir == Path("a:b/c")


@pytest.mark.parametrize("name", ["pull_threads", "admin_depth_max"])
def test_a_lane_has_threads_and_room(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 to"):
        LaneSizes(**{name: 0})


def test_several_name_servers_may_stand_in_one_text() -> None:
    config = BrokerConfig(namesrv=("a:1;b:2", "a:1"))
    assert config.name_server_addresses == (Address("a", 1), Address("b", 2))


ETCD = EtcdConfig(endpoints=("http://a:2379;https://b:2379", "http://a:2379"))
ELECTED = {"etcd": ETCD, "broker_name": "n", "broker_role": "SYNC_MASTER", "broker_id": 1}


def test_brokers_that_elect_their_master_are_sync_masters_with_ids_of_their_own() -> None:
    assert BrokerConfig(**ELECTED).etcd.urls == ("http://a:2379", "https://b:2379")  # type: ignore[arg-type]
    for changes, message in (
        ({"broker_role": "ASYNC_MASTER"}, "it must be SYNC_MASTER"),
        ({"broker_role": "SLAVE"}, "it must be SYNC_MASTER"),
        ({"broker_id": 0}, "a broker_id above 0 of its own"),
        ({"broker_name": ""}, "the same broker_name"),
    ):
        with pytest.raises(ValueError, match=message):
            BrokerConfig(**(ELECTED | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoints": ("a:2379",)}, "each must be http://host:port"),
        ({"endpoints": ("http://a:2379/v3",)}, "each must be http://host:port"),
        ({"endpoints": ("http://a:99999",)}, "endpoints has 'http://a:99999', with no port between 1 and 65535"),
        ({"endpoints": ("http://a:0",)}, "endpoints has 'http://a:0', with no port between 1 and 65535"),
        ({"prefix": "protomq"}, "it must begin with a slash"),
        ({"prefix": "/protomq/"}, "and end without one"),
        ({"lease_ttl_ms": 1_000}, "it must be 2000 to 60000"),
        ({"lease_ttl_ms": 2_500}, "whole seconds"),
        ({"renew_interval_ms": 1_001}, "it must be 1 to 1000, a third"),
        ({"read_interval_ms": 0}, "read_interval_ms must be above 0"),
    ],
)
def test_what_etcd_or_a_lease_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EtcdConfig(**values)


def test_settings_of_an_election_without_an_etcd_are_refused() -> None:
    with pytest.raises(ValueError, match=r"etcd\.prefix and etcd\.lease_ttl_ms are set, and etcd\.endpoints is not: nobody"):
        BrokerConfig(etcd=EtcdConfig(lease_ttl_ms=5_000, prefix="/mq"))


def test_an_elected_broker_has_the_settings_of_its_election_and_no_endpoints() -> None:
    etcd = EtcdConfig(endpoints=("http://127.0.0.1:2379",), lease_ttl_ms=5_000, prefix="/mq")
    decided = BrokerConfig(etcd=DecidedElection.of(etcd)).etcd
    assert (decided.urls, decided.lease_ttl_ms, decided.prefix) == ((), 5_000, "/mq")


def test_a_ratio_of_the_disk_in_percent_is_named_with_its_section_and_value() -> None:
    said = "store.disk_delete_ratio is 75.0, disk_force_ratio 0.85 and disk_refuse_ratio 0.9; each must be above 0 and at most 1"
    with pytest.raises(ConfigError, match=said):
        load_config(BrokerConfig, None, environment={"PROTOMQ_STORE_DISK_DELETE_RATIO": "75"})


@pytest.mark.parametrize("values", [ELECTED, {"broker_name": "n", "broker_role": "SLAVE"}])
def test_an_id_that_no_answer_can_hold_is_refused(values: dict[str, Any]) -> None:
    assert BrokerConfig(**(values | {"broker_id": (1 << 31) - 1})).broker_id == (1 << 31) - 1
    for broker_id in (1 << 31, 1 << 63):
        with pytest.raises(ValueError, match=f"broker_id is {broker_id}; it must be 0 to 2147483647"):
            BrokerConfig(**(values | {"broker_id": broker_id}))


def test_each_setting_of_lanes_is_that_of_its_lane() -> None:
    lanes = LaneSizes(
        send_depth_max=11, pull_threads=2, pull_depth_max=12, pop_depth_max=13, consumer_threads=3, consumer_depth_max=14, admin_threads=4,
        admin_depth_max=15,
    )  # fmt: skip
    configs = Broker.lane_configs(SimpleNamespace(config=BrokerConfig(lanes=lanes)))  # type: ignore[arg-type]
    found = {name: (config.threads, config.admission.depth_max) for name, config in configs.items()}
    assert found == {"send": (1, 11), "pull": (2, 12), "pop": (1, 13), "consumer": (3, 14), "admin": (4, 15), "ha": (1, 10_000)}


def test_a_busy_machine_makes_no_lane_refuse_calls_that_does_not_wait_for_the_disk() -> None:
    configs = Broker.lane_configs(SimpleNamespace(config=BrokerConfig()))  # type: ignore[arg-type]
    judged = {name: config.admission.waits_for_disk for name, config in configs.items() if config.admission.queue_time_target_ms}
    assert judged == {"send": True, "pull": True, "pop": True, "consumer": False}


def test_an_overloaded_consumer_lane_still_takes_what_keeps_and_ends_the_work_that_is_done() -> None:
    table = DispatchTable()
    for module, service in (
        (consumer_service_pb2, ConsumerService),
        (group_service_pb2, GroupService),
        (membership_service_pb2, MembershipService),
        (queue_lock_service_pb2, QueueLockService),
        (reply_service_pb2, ReplyService),
    ):
        table.add_service(module.DESCRIPTOR.services_by_name[service.__name__], service)
    assert {bound.method.name for bound in table if not bound.may_be_shed} == {
        "CommitOffsets", "HoldMembership", "LeaveGroup", "LockQueues", "UnlockQueues",
    }  # fmt: skip
