"""What deploy/ promises, judged without other tools: settings are those of the servers, probes and units fit to them.

`make deploy-check` does the rest.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from protomq_broker.config import BrokerConfig
from protomq_cli.environment import check_environment
from protomq_namesrv.config import NamesrvConfig
from protomq_runtime.config import load_config
from protomq_runtime.connection_limits import ConnectionLimits
from protomq_runtime.lifecycle import GRACE_S

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
SERVERS = {
    name: each for name, each in COMPOSE["services"].items() if name.startswith(("broker", "namesrv"))
}


def settings_of(service: dict[str, Any]) -> BrokerConfig | NamesrvConfig:
    """As the server in the container reads them."""
    verb, _, path = service["command"]
    mounted = {target: source for source, target, *_ in (each.split(":") for each in service["volumes"])}
    file = DEPLOY / "compose" / mounted[path]
    environment = service.get("environment", {})
    check_environment(environment)
    if verb == "namesrv":
        return load_config(NamesrvConfig, file, environment=environment)
    return load_config(BrokerConfig, file, environment=environment)


@pytest.mark.parametrize("name", SERVERS)
def test_a_service_of_the_compose_file_is_configured_and_probed_where_it_listens(name: str) -> None:
    service = SERVERS[name]
    config = settings_of(service)
    assert config.listen.host == "0.0.0.0"
    assert service["healthcheck"]["test"] == ["CMD", "protomq", "health", f"127.0.0.1:{config.listen.grpc_port}"]
    assert service["hostname"] == name


def test_what_the_compose_file_reads_from_the_environment_may_be_exported() -> None:
    names = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose/compose.yaml").read_text()))
    assert names == {"PROTOMQ_IMAGE"}
    check_environment(dict.fromkeys(names, "registry.example.com/protomq:2"))


def test_brokers_of_the_compose_file_find_what_they_need() -> None:
    brokers = [config for config in map(settings_of, SERVERS.values()) if isinstance(config, BrokerConfig)]
    names = set(COMPOSE["services"])
    assert sorted(each.broker_id for each in brokers) == [1, 2, 3]
    for each in brokers:
        assert each.listen.advertised_host == f"broker-{each.broker_id}"
        assert {address.host for address in each.name_server_addresses} <= names
        assert {re.sub("https?://|:.*", "", url) for url in each.etcd.urls} <= names
        volumes = SERVERS[each.listen.advertised_host]["volumes"]
        assert f"{each.listen.advertised_host}:{each.data_dir.parent}" in volumes


@pytest.mark.parametrize("name", ["protomq-broker@.service", "protomq-namesrv.service"])
def test_a_unit_waits_for_the_stop_and_has_descriptors_for_all_connections(name: str) -> None:
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and line[0].isalpha())
    assert settings["Type"] == "notify"
    assert float(settings["TimeoutStopSec"]) > GRACE_S + 5
    assert int(settings["LimitNOFILE"]) > 2 * ConnectionLimits().total_max
    assert settings["ExecStart"].split()[1] == name.removesuffix(".service").split("-")[1].rstrip("@")


def test_the_steps_of_systemd_install_what_their_units_need() -> None:
    text = (DEPLOY / "README.md").read_text()
    steps = text[text.index("## systemd") : text.index("## Containers")]
    files = dict(re.findall(r"install .*?(\S+\.yaml) (/etc/protomq/\S+)", steps))
    settings = {target: DEPLOY.parent / source for source, target in files.items()}
    (enabled,) = re.findall(r"systemctl enable --now (.+)", steps)
    for unit in enabled.split():
        name, _, instance = unit.partition("@")
        text = (DEPLOY / "systemd" / (f"{name}@.service" if instance else f"{name}.service")).read_text()
        (wanted,) = re.findall(r"^ExecStart=.* -c (\S+)$", text, re.MULTILINE)
        assert wanted.replace("%i", instance) in settings, unit
    namesrv = load_config(NamesrvConfig, settings.pop("/etc/protomq/namesrv.yaml"), environment={})
    (broker,) = (load_config(BrokerConfig, path, environment={}) for path in settings.values())
    assert [each.port for each in broker.name_server_addresses] == [namesrv.listen.grpc_port]
    assert broker.broker_role == "ASYNC_MASTER", "it has no slave"


def test_the_image_is_shown_with_ports_of_this_machine_alone() -> None:
    ports = re.findall(r"-p (\S+)", "".join(re.findall(r"docker run.*", (DEPLOY / "Dockerfile").read_text())))
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_chart_refuses_unknown_values_and_knows_all_of_its_own() -> None:
    chart = DEPLOY / "helm/protomq"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    templates = "\n".join(path.read_text() for path in (chart / "templates").iterdir())

    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        assert schema["additionalProperties"] is False, path
        assert set(values) <= set(schema["properties"]), path
        for key, value in values.items():
            assert f"Values{path}.{key}" in templates, "nothing reads it"
            if isinstance(value, dict) and "properties" in schema["properties"][key]:
                compare(value, schema["properties"][key], f"{path}.{key}")

    compare(values, schema, "")


def test_no_broker_of_the_chart_has_the_name_of_an_object_of_the_name_servers() -> None:
    chart = DEPLOY / "helm/protomq"
    schema = json.loads((chart / "values.schema.json").read_text())
    refused = schema["properties"]["broker"]["properties"]["names"]["items"]["not"]["enum"]
    names = re.findall(r"^  name: {{ \$full }}-(\S+)$", (chart / "templates/namesrv.yaml").read_text(), re.MULTILINE)
    assert set(names) == set(refused)


@pytest.mark.parametrize("path", ["worker.yaml", "keda/scaler.yaml"])
def test_clients_name_the_service_of_the_release_that_the_page_installs(path: str) -> None:
    (release,) = set(re.findall(r"helm install (\S+) ", (DEPLOY / "README.md").read_text()))
    chart = yaml.safe_load((DEPLOY / "helm/protomq/Chart.yaml").read_text())["name"]
    full_name = release if chart in release else f"{release}-{chart}"  # "protomq.fullname"
    (deployment, *_) = yaml.safe_load_all((DEPLOY / path).read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "PROTOMQ_NAMESRV_ADDR", "value": f"{full_name}-namesrv:9876"} in container["env"]


def test_the_image_runs_the_command_line_and_the_grace_periods_agree() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["protomq"]' in dockerfile
    values = yaml.safe_load((DEPLOY / "helm/protomq/values.yaml").read_text())
    unit = (DEPLOY / "systemd/protomq-broker@.service").read_text()
    grace_s = values["broker"]["terminationGracePeriodSeconds"]
    assert f"TimeoutStopSec={grace_s}\n" in unit
    assert {each["stop_grace_period"] for name, each in SERVERS.items() if name.startswith("broker")} == {f"{grace_s}s"}
