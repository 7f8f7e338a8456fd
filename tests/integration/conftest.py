"""Servers that start fast, and fixtures of the tests with a real Spark (`test_spark_*.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_servers import warm_servers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from protomq.testing import Broker


@pytest.fixture(scope="session", autouse=True)
def _warm_servers() -> Iterator[None]:
    """For all tests of this worker."""
    with warm_servers():
        yield


@pytest.fixture(scope="session")
def running_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark, started once: a start costs more than most tests."""
    from tests.support.spark import spark_session
    from tests.support.warm_python import warm_python

    with (
        warm_python(tmp_path_factory.mktemp("python")) as python,
        spark_session(tmp_path_factory.mktemp("warehouse"), python=python) as session,
    ):
        yield session


@pytest.fixture(scope="module")
def spark(running_spark: SparkSession) -> Iterator[SparkSession]:
    """A session for each file, with settings and views of its own."""
    from tests.support.spark import collect_sockets

    session = running_spark.newSession()
    session.createDataFrame([], "id INT")  # Makes it the one of this thread: see docs/spark.md.
    yield session
    for query in session.streams.active:
        query.stop()
    collect_sockets()


@pytest.fixture
def read(spark: SparkSession, protomq_server: Broker) -> Callable[..., DataFrame]:
    """read(topic, **options): a batch read."""

    def load(topic: str, **options: str) -> DataFrame:
        reader = spark.read.format("protomq").option("protomq.namesrv", protomq_server.namesrv)
        return reader.options(**({"subscribe": topic} | options)).load()

    return load


@pytest.fixture
def write(protomq_server: Broker) -> Callable[..., None]:
    """write(frame, topic, **options): a batch write."""

    def save(frame: DataFrame, topic: str, **options: str) -> None:
        writer = frame.write.format("protomq").option("protomq.namesrv", protomq_server.namesrv)
        writer.options(**({"topic": topic} | options)).mode("append").save()

    return save
