"""The compose file, the Dockerfile, the proxy's configuration and the topology are one.

The systemd unit and the Kubernetes example run the same commands.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from app.ab_tests import service as trials
from app.cli.graceful_shutdown import LAST_REQUEST_SECONDS
from app.cli.main import app
from app.core.monitoring import SHUTDOWN_SECONDS
from app.core.settings import Settings
from app.inference import batcher
from app.main import REQUEUE_SECONDS, WORKER_STOP_SECONDS
from tests.cluster.process import HOST
from tests.cluster.servers import NCR_ENVIRONMENT, PORT, SERVICES
from tests.cluster.topology import Topology

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "docker-compose.yml"
NGINX = ROOT / "deploy" / "nginx.conf"
UNIT = ROOT / "deploy" / "ncr.service"
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"
PROMETHEUS = ROOT / "deploy" / "prometheus"
SCHEMA = json.loads((ROOT / "tests" / "data" / "kubernetes.schema.json").read_text())
LONGEST_STOP = (
    float(Settings.model_fields["drain_seconds"].default)
    + LAST_REQUEST_SECONDS
    + batcher.CLOSE_SECONDS
    + WORKER_STOP_SECONDS
    + REQUEUE_SECONDS
    + 2 * trials.CLOSE_SECONDS
    + 1  # Redis
    + SHUTDOWN_SECONDS
)
SETTINGS = {f"NCR_{name.upper()}" for name in Settings.model_fields}


def without(tool: str) -> None:
    """Skips what needs a tool that is not here, except before a release: see CONTRIBUTING.md."""
    if os.environ.get("NCR_TEST_TOOLS") == "true":
        pytest.fail(f"{tool} is not installed")
    pytest.skip(f"{tool} is not installed")


@pytest.fixture
def compose() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def test_the_compose_file_has_the_services_of_the_table(compose: dict[str, Any]) -> None:
    assert set(compose) == set(SERVICES)
    program, option, password, *flags = compose["redis"]["command"]
    assert (option, password[:18]) == ("--requirepass", "${REDIS_PASSWORD:?")
    compose["redis"]["command"] = [program, *flags]
    assert {name: s["command"] for name, s in compose.items() if "command" in s} == {
        name: list(service.command_line()) for name, service in SERVICES.items() if service.command
    }
    assert {name: s["deploy"]["replicas"] for name, s in compose.items() if "deploy" in s} == {
        name: service.replicas for name, service in SERVICES.items() if service.replicas > 1
    }


def test_the_compose_file_sets_what_the_table_says(compose: dict[str, Any]) -> None:
    for name, service in SERVICES.items():
        assert set(compose[name].get("environment", {})) == set(service.environment), name
    assert set(NCR_ENVIRONMENT) <= SETTINGS
    text = COMPOSE.read_text()
    assert set(re.findall(r"\bNCR_[A-Z_]+", text)) <= SETTINGS
    for secret in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "NCR_ADMIN_KEY"):
        uses = re.findall(rf"\$\{{?{secret}\b.", text)
        assert uses, secret
        assert {how[-1] for how in uses} == {":"}, "there is a default, or none is asked for"
        assert len(re.findall(rf"\$\{{{secret}:\?", text)) == len(uses)


def test_only_the_proxy_is_published(compose: dict[str, Any]) -> None:
    for name, service in SERVICES.items():
        ports = [f"{HOST}:{service.port}:{service.port}"] if service.published else []
        assert compose[name].get("ports", []) == ports
    assert compose["api"]["expose"] == [str(SERVICES["api"].port)]


def test_servers_and_workers_have_the_time_to_drain(compose: dict[str, Any]) -> None:
    for name in ("api", "worker"):
        grace = re.fullmatch(r"(\d+)s", compose[name]["stop_grace_period"])
        assert grace
        assert int(grace[1]) > LONGEST_STOP


def test_the_image_runs_the_server_of_the_table(dockerfile: str) -> None:
    api = SERVICES["api"]
    assert [json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", dockerfile, re.M)] == [
        list(api.command_line())
    ]
    assert re.findall(r"^EXPOSE (\d+)$", dockerfile, re.M) == [str(api.port)]
    assert f"http://127.0.0.1:{api.port}/health/ready" in dockerfile
    assert {"app", "ncr_core", "migrations"} <= set(
        re.findall(r"^COPY (\w+) \1$", dockerfile, re.M)
    )
    assert re.search(r"^USER ncr$", dockerfile, re.M)  # not root
    assert set(re.findall(r"\b(NCR_[A-Z_]+)=", dockerfile)) <= SETTINGS


def test_the_compose_file_and_the_image_run_commands_that_there_are(
    compose: dict[str, Any], dockerfile: str
) -> None:
    commands = [json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", dockerfile, re.M)]
    commands += [s["command"] for s in compose.values() if s.get("command", [""])[0] == "ncr"]
    assert len(commands) == 4
    for _, *arguments in commands:
        command: Any = get_command(app)
        while arguments and arguments[0] in getattr(command, "commands", {}):
            command = command.commands[arguments.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {a for a in arguments if a.startswith("--")} <= options


def test_the_image_and_the_compose_file_share_one_data_folder(
    compose: dict[str, Any], dockerfile: str
) -> None:
    folder = compose["api"]["environment"]["NCR_DATA_DIR"]
    assert f"NCR_DATA_DIR={folder}" in dockerfile
    assert f"VOLUME {folder}\n" in dockerfile
    for name in ("migrate", "api", "worker"):
        assert compose[name]["volumes"] == [f"checkpoints:{folder}"]


def test_the_proxy_passes_on_what_the_service_needs(compose: dict[str, Any]) -> None:
    text = NGINX.read_text()
    assert f"listen {SERVICES['proxy'].port};" in text
    assert f"http://api:{SERVICES['api'].port};" in text
    assert "./deploy/nginx.conf:/etc/nginx/nginx.conf:ro" in compose["proxy"]["volumes"]
    for directive in (
        "proxy_request_buffering off",
        "proxy_http_version 1.1",
        "proxy_set_header Host $http_host",
        "proxy_set_header X-API-Key $http_x_api_key",
        "proxy_set_header X-Request-ID $request_name",
        "proxy_next_upstream error timeout",
        "client_max_body_size 0",
    ):
        assert f"{directive};" in text
    assert "non_idempotent" not in text


def test_the_containers_can_do_no_more_than_they_need(compose: dict[str, Any]) -> None:
    for name in ("migrate", "api", "worker", "proxy", "redis"):
        service = compose[name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    assert compose["postgres"]["healthcheck"]["test"][1:4] == ["pg_isready", "-h", "127.0.0.1"]
    assert compose["api"]["env_file"] == [{"path": "ncr.env", "required": False}]


def test_the_image_compiles_every_kernel_where_a_start_looks_for_it(dockerfile: str) -> None:
    sources = (path.read_text() for path in (ROOT / "ncr_core").rglob("*.py"))
    kernels = {name for text in sources for name in re.findall(r'numba_kernel\("([\w.]+)"\)', text)}
    assert set(re.findall(r"kernel\('([\w.]+)'\)", dockerfile)) == kernels != set()
    (cache,) = re.findall(r"NUMBA_CACHE_DIR=(\S+)", dockerfile)
    assert f"\nVOLUME {cache}\n" in dockerfile
    assert dockerfile.index("import numba_kernel") < dockerfile.index(f"VOLUME {cache}")
    (extras,) = re.findall(r"EXTRAS=([\w,]+)$", dockerfile, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_health_of_a_worker_is_the_file_that_it_touches(
    compose: dict[str, Any], dockerfile: str, tmp_path: Path
) -> None:
    (file,) = re.findall(r"NCR_WORKER_ALIVE_FILE=(\S+)", dockerfile)
    _, check = compose["worker"]["healthcheck"]["test"]
    probe = [
        container["livenessProbe"]["exec"]["command"]
        for o in yaml.safe_load_all(KUBERNETES.read_text())
        if o["metadata"]["name"] == "ncr-worker"
        for container in o["spec"]["template"]["spec"]["containers"]
    ]
    head = manifests("raycluster.yaml")[1]["spec"]["headGroupSpec"]["template"]["spec"]
    probe.append(head["containers"][1]["livenessProbe"]["exec"]["command"])
    assert probe == [["sh", "-c", check.replace("$$", "$")]] * 2
    alive = tmp_path / "alive"
    command = ["sh", "-c", probe[0][2].replace(file, str(alive))]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0
    alive.touch()
    assert subprocess.run(command).returncode == 0
    os.utime(alive, (time.time() - 90,) * 2)
    assert subprocess.run(command).returncode != 0


def test_prometheus_scrapes_with_a_key(compose: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert list(job["http_headers"]) == ["X-API-Key"]
    (discovery,) = job["dns_sd_configs"]
    assert (discovery["names"], discovery["port"]) == (["api"], SERVICES["api"].port)
    if shutil.which("promtool") is None:
        without("promtool")
    command = ["promtool", "check", "config", "--syntax-only", str(PROMETHEUS / "prometheus.yml")]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_the_systemd_unit_stops_the_service_in_order() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert set(re.findall(r"\b(NCR_[A-Z_]+)\b", UNIT.read_text())) <= SETTINGS
    assert service["ExecStart"].split()[1:] == ["serve", "--with-worker"]
    assert float(service["TimeoutStopSec"]) > LONGEST_STOP
    assert service["KillMode"] == "mixed"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        without("systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/ncr/bin/ncr", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_kubernetes_example_runs_the_processes_of_the_table() -> None:
    objects = list(yaml.safe_load_all(KUBERNETES.read_text()))
    assert set(re.findall(r"\b(NCR_[A-Z_]+)\b", KUBERNETES.read_text())) <= SETTINGS
    pods = {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in objects
        if "template" in o["spec"]
    }
    replicas = {o["metadata"]["name"]: o["spec"].get("replicas", 1) for o in objects}
    for name in ("migrate", "api", "worker"):
        (container,) = pods[f"ncr-{name}"]["containers"]
        assert container["command"] == list(SERVICES[name].command_line())
        assert replicas[f"ncr-{name}"] == SERVICES[name].replicas
    for name in ("api", "worker"):
        assert pods[f"ncr-{name}"]["terminationGracePeriodSeconds"] > LONGEST_STOP
    probes = {k: v for k, v in pods["ncr-api"]["containers"][0].items() if k.endswith("Probe")}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {PORT}
    assert probes["readinessProbe"]["httpGet"]["path"] == "/health/ready"


def problems(instance: Any, kind: str) -> list[str]:
    """What Kubernetes would say of an object of a kind, by its schema: no field is unknown."""
    schema = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{SCHEMA['kinds'][kind]}"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(instance)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


def manifests(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / file).read_text()))


@pytest.mark.parametrize("file", ["kubernetes.yaml", "scaling.yaml", "raycluster.yaml"])
def test_kubernetes_takes_the_manifests(file: str) -> None:
    objects = manifests(file)
    for instance in objects:
        if instance["kind"] != "RayCluster":
            assert problems(instance, instance["kind"]) == []
    assert problems(objects[-1] | {"specs": {}}, objects[-1]["kind"]) != []
    text = (ROOT / "deploy" / file).read_text()
    assert set(re.findall(r"\b(NCR_[A-Z_]+)\b", text)) <= SETTINGS


RAY_GROUP = {"rayStartParams", "template"}


def test_the_ray_cluster_asks_for_a_token_and_its_pods_are_kubernetes_pods() -> None:
    _, cluster, policy = manifests("raycluster.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert set(spec["headGroupSpec"]) == RAY_GROUP | {"serviceType"}
    for group in spec["workerGroupSpecs"]:
        assert set(group) == RAY_GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert problems(group["template"], "PodTemplateSpec") == []
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > LONGEST_STOP
        # KubeRay's own probes need a part of Ray that the image does not have.
        start = group["rayStartParams"]
        port = 6379 if group is spec["headGroupSpec"] else int(start["node-manager-port"])
        for kind in ("readinessProbe", "livenessProbe"):
            assert pod["containers"][0][kind]["tcpSocket"] == {"port": port}
        for container in group["template"]["spec"]["containers"]:
            environment = {each["name"]: each for each in container["env"]}
            assert environment["RAY_AUTH_MODE"]["value"] == "token"
            assert "secretKeyRef" in environment["RAY_AUTH_TOKEN"]["valueFrom"]
    # No port of the cluster is reached from outside.
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    (rule,) = policy["spec"]["ingress"]
    assert all("podSelector" in peer for peer in rule["from"])


def closed(schema: Any) -> Any:
    """A schema of a CustomResourceDefinition whose objects have no unknown fields."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        result["additionalProperties"] = False
    return result


@pytest.mark.skipif(
    "KUBERAY_CRD" not in os.environ,
    reason="KUBERAY_CRD names no file of KubeRay's definition, ray.io_rayclusters.yaml",
)
def test_the_ray_cluster_fits_the_schema_of_kuberay() -> None:
    _, cluster, _ = manifests("raycluster.yaml")
    definition = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text())
    versions = {each["name"]: each for each in definition["spec"]["versions"]}
    schema = versions["v1"]["schema"]["openAPIV3Schema"]
    own = schema["properties"].pop("metadata")  # Kubernetes' own
    assert own == {"type": "object"}
    validator = jsonschema.Draft202012Validator(closed(schema))
    del cluster["metadata"]
    assert [error.json_path for error in validator.iter_errors(cluster)] == []
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["container"] = []
    assert [error.json_path for error in validator.iter_errors(cluster)] == [
        "$.spec.headGroupSpec.template.spec"
    ]


def test_the_ray_cluster_has_a_worker_that_shares_a_folder_with_the_ranks() -> None:
    ranks, cluster, _ = manifests("raycluster.yaml")
    claims = [ranks, *manifests("kubernetes.yaml")]
    names = {o["metadata"]["name"] for o in claims if o["kind"] == "PersistentVolumeClaim"}
    head, group = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"][0]
    _, worker = head["template"]["spec"]["containers"]  # KubeRay takes the first for Ray's
    environment = {each["name"]: each.get("value") for each in worker["env"]}
    assert worker["command"] == list(SERVICES["worker"].command_line())
    assert environment["NCR_TRAIN_ENGINE"] == "ray"
    assert int(environment["NCR_TRAIN_RANKS"] or 0) == group["replicas"]
    for pod in (head["template"]["spec"], group["template"]["spec"]):
        volumes = {v["name"]: v.get("persistentVolumeClaim", {}) for v in pod["volumes"]}
        assert {v["claimName"] for v in volumes.values() if v} <= names
        for container in pod["containers"]:
            paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert paths["ranks"] == environment["NCR_TRAIN_FOLDER"]
            assert volumes["ranks"] == {"claimName": "ncr-ranks"}
            # Whoever breaks into a rank finds no password.
            assert container is worker or "envFrom" not in container


def test_servers_are_scaled_that_there_are() -> None:
    names = {o["metadata"]["name"]: o for o in manifests("kubernetes.yaml")}
    scaler, budget = manifests("scaling.yaml")
    target = names[scaler["spec"]["scaleTargetRef"]["name"]]
    assert target["kind"] == "Deployment"
    assert scaler["spec"]["minReplicas"] == target["spec"]["replicas"]
    assert budget["spec"]["selector"] == target["spec"]["selector"]


def test_the_topology_starts_what_the_table_says(tmp_path: Path) -> None:
    topology = Topology(tmp_path, admin_key="k" * 16)
    expected = {
        f"{name}-{n}" for name in ("api", "worker") for n in range(1, SERVICES[name].replicas + 1)
    }
    assert set(topology.processes) == expected | {"postgres", "redis", "proxy"}
    for server in topology.servers:
        assert server.command[-5:] == [*SERVICES["api"].command_line(HOST, server.port)][1:]
        assert set(server.env) == set(SERVICES["api"].environment)
    for worker in topology.workers:
        assert worker.command[-1:] == [*SERVICES["worker"].command][1:]
        assert worker.env == topology.servers[0].env
    assert topology.redis is not None
    flags = SERVICES["redis"].command[1:]
    assert tuple(topology.redis.command[-len(flags) :]) == flags
    ports = {server.port for server in topology.servers}
    assert len(ports | {topology.proxy.port, topology.redis.port, topology.postgres.port}) == 5
    for server in topology.servers:
        assert str(server.port) in topology.proxy.command


def test_the_topology_says_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.topology", "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--port" in done.stdout
    assert str(PORT) in COMPOSE.read_text()


def test_nginx_takes_the_configuration() -> None:
    if shutil.which("nginx") is None:
        without("nginx")
    done = subprocess.run(
        ["nginx", "-t", "-c", str(NGINX)], capture_output=True, text=True, timeout=60
    )
    # It may still miss folders that only its own installation makes.
    assert "syntax is ok" in done.stderr, done.stderr


def test_docker_compose_takes_the_file() -> None:
    def run(**env: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.endswith(("_PASSWORD", "_ADMIN_KEY"))}
        return subprocess.run(
            ["docker", "compose", "-f", str(COMPOSE), "config", "--format", "json"],
            env=kept | env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    if (
        shutil.which("docker") is None
        or subprocess.run(
            ["docker", "compose", "version"], capture_output=True, timeout=60
        ).returncode
    ):
        without("docker compose")
    secrets = {"POSTGRES_PASSWORD": "sesame", "REDIS_PASSWORD": "open"}
    done = run(**secrets, NCR_ADMIN_KEY="0123456789abcdef")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert services["redis"]["command"][1:3] == ["--requirepass", "open"]
    del services["redis"]["command"][1:3]
    assert {name: s["command"] for name, s in services.items() if s.get("command")} == {
        name: list(service.command_line()) for name, service in SERVICES.items() if service.command
    }
    missing = run(REDIS_PASSWORD="open", NCR_ADMIN_KEY="0123456789abcdef")
    assert missing.returncode != 0
    assert "POSTGRES_PASSWORD" in missing.stderr
