"""Deployment files are valid: Kubernetes objects by KubeRay's own schemas, `ray up` by Ray's, ours by our config."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from common import config, config_file

ROOT = Path(__file__).parents[2]
CRDS = ROOT.parent / "shared" / "kuberay-crds"


def documents(path: Path) -> list[dict[str, Any]]:
    # The C loader: KubeRay's definitions have a megabyte each.
    return [document for document in yaml.load_all(path.read_text(), yaml.CSafeLoader) if document]


def closed(schema: Any) -> Any:
    """Return a CRD's schema that refuses unknown fields, which the API server would drop in silence."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items() if not key.startswith("x-")}
    if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


def test_kuberay_accepts_the_manifest() -> None:
    if not CRDS.is_dir():
        pytest.skip("KubeRay's CRDs are not beside this checkout")
    jobs = [d for d in documents(ROOT / "deploy/kuberay.yaml") if d["apiVersion"].startswith("ray.io/")]
    [definition] = documents(CRDS / "ray.io_rayjobs.yaml")
    schemas = {v["name"]: v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"]}

    assert jobs
    for job in jobs:
        assert job["kind"] == definition["spec"]["names"]["kind"]
        schema = closed(schemas[job["apiVersion"].removeprefix("ray.io/")])
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.validate(job, schema)


def test_the_config_inside_the_manifest_is_one_of_ours() -> None:
    [config_map] = [d for d in documents(ROOT / "deploy/kuberay.yaml") if d["kind"] == "ConfigMap"]

    config.ClusterConfig.model_validate(yaml.safe_load(config_map["data"]["cluster.yaml"]))


def test_the_multi_host_config_is_one_of_ours() -> None:
    assert config_file.load(ROOT / "deploy/cluster.yaml", []).ray.address == "auto"


def test_ray_up_accepts_its_file() -> None:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    ours = yaml.safe_load((ROOT / "deploy/ray-up.yaml").read_text())

    jsonschema.validate(ours, schema)
    # Ray makes these itself for the local provider, and refuses ours.
    assert ours.keys().isdisjoint({"head_node", "worker_nodes", "available_node_types", "head_node_type"})


@pytest.mark.parametrize(
    "script", sorted((ROOT / "deploy").glob("*.sh")) + sorted((ROOT / "tools").glob("*.sh")), ids=str
)
def test_shell_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_deploy_holds_no_python() -> None:
    assert list((ROOT / "deploy").rglob("*.py")) == []
