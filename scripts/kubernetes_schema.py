"""Make the JSON schema of the Kubernetes objects in deploy/, for the tests, which have no network.

It takes what these kinds need of the strict schemas in the package kubernetes-validate:

    pip install --target /tmp/schemas kubernetes-validate
    python scripts/kubernetes_schema.py \\
        /tmp/schemas/kubernetes_validate/kubernetes-json-schema/v1.33.0-local-strict
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "tests" / "data" / "kubernetes.schema.json"
PREFIX = "#/$defs/"
KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "HorizontalPodAutoscaler": "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PodTemplateSpec": "io.k8s.api.core.v1.PodTemplateSpec",
}


def stripped(schema: Any, *, named: bool = False) -> Any:
    """A schema without descriptions; ``named`` are the properties of an object, by their names."""
    if isinstance(schema, list):
        return [stripped(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: stripped(part, named=key in ("properties", "$defs") and not named)
        for key, part in schema.items()
        if named or (key != "description" and not key.startswith("x-"))
    }


def references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*map(references, schema.values()))


def main(folder: Path) -> None:
    every = json.loads((folder / "_definitions.json").read_text())["$defs"]
    wanted, found = set(KINDS.values()), {}
    while wanted:
        name = wanted.pop()
        found[name] = stripped(every[name])
        wanted |= references(found[name]) - found.keys()
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    text = text.replace('"/api/_definitions.json#/$defs/', f'"{PREFIX}')
    schema = {
        "$comment": f"Kubernetes {folder.name}, Apache-2.0; made by scripts/kubernetes_schema.py",
        "kinds": KINDS,
        "$defs": json.loads(text),
    }
    TARGET.write_text(json.dumps(schema, sort_keys=True, separators=(",", ":")) + "\n")
    print(f"{TARGET}: {len(found)} definitions, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
