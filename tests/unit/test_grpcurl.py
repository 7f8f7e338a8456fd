"""The grpcurl commands of pages name methods, fields and values that the contract has."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import Default

import protomq.v1

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"grpcurl -plaintext -d '([^']+)'[\s\\]+\S+:\d+ ([\w.]+)/(\w+)")
PAGES = [path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "grpcurl -plaintext" in path.read_text()]

for module in pkgutil.iter_modules(protomq.v1.__path__):
    if module.name.endswith("_pb2"):
        importlib.import_module(f"protomq.v1.{module.name}")


def check(data: str, service: str, method: str) -> None:
    """Raises if a broker could not read that."""
    found = Default().FindServiceByName(service).FindMethodByName(method)
    json_format.Parse(data, message_factory.GetMessageClass(found.input_type)())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_broker_can_read_what_a_page_shows(page: Path) -> None:
    text = page.read_text()
    calls = CALL.findall(text)
    assert len(calls) == text.count("grpcurl -plaintext")
    for data, service, method in calls:
        check(data, service, method)


def test_all_pages_are_looked_at() -> None:
    assert len(PAGES) >= 7


@pytest.mark.parametrize(
    ("data", "service", "method", "error"),
    [
        ('{"topic": "a", "tpoic": "a"}', "protomq.v1.PullService", "Pull", json_format.ParseError),
        ('{"filter_type": "FILTER_TYPE_SQL"}', "protomq.v1.PullService", "Pull", json_format.ParseError),
        ("{}", "protomq.v1.PullService", "Pul", KeyError),
        ("{}", "protomq.v1.PullServices", "Pull", KeyError),
    ],
)
def test_what_the_contract_has_not_is_found(data: str, service: str, method: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check(data, service, method)
