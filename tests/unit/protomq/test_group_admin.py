"""Settings of a group, as a program changes them at all brokers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protomq import Admin, _methods
from protomq.v1 import group_service_pb2 as pb
from protomq.v1.group_pb2 import GroupSettings

MOST = (1 << 63) - 1


class Brokers:
    """Those of a cluster, by address. Attribute: held, the settings that each has."""

    def __init__(self, *versions: int) -> None:
        self.held = {
            str(number): GroupSettings(consumer_group="g", retry_count_max=number, version=version)
            for number, version in enumerate(versions)
        }

    def _ask_each(self, names: Any, ask: Callable[[Any], None], **_: Any) -> dict[str, Any]:
        for address in self.held:
            ask(SimpleNamespace(address=address, broker_name=address))
        return {}

    def _answers(self, names: Any, ask: Callable[[Any], Any], **_: Any) -> Any:
        return [(address, ask(SimpleNamespace(address=address))) for address in self.held], {}

    def _call(self, address: str, method: Any, request: Any, response: Any) -> Any:
        known = self.held[address]
        if method == _methods.GET_GROUP:
            return pb.GetGroupResponse(settings=known)
        wanted = request.settings
        assert wanted.version <= 1 << 62, "a broker refuses it"
        if wanted.version > known.version or not wanted.version:
            self.held[address] = held = GroupSettings.FromString(wanted.SerializeToString())
            held.version = wanted.version or min(known.version + 1, MOST)
        return pb.PutGroupResponse(settings=self.held[address])


@pytest.mark.parametrize("versions", [(0, 0), (1 << 60, 7), (1 << 62, 7), (7, MOST), (MOST, MOST)])
def test_a_group_is_set_up_whatever_version_it_has(versions: tuple[int, ...]) -> None:
    brokers = Brokers(*versions)
    for count in (5, 6):
        found = Admin.set_group(brokers, "g", retry_count_max=count)  # type: ignore[arg-type]
        assert found.retry_count_max == count
        assert [settings.retry_count_max for settings in brokers.held.values()] == [count, count]
