"""A plain Ray job as a KubeRay RayJob: a cluster of Kubernetes that is made for the job and removed after it.

Field names are those of ray.io/v1 in KubeRay's API reference; the code is part of the image, since
a RayJob uploads nothing. The token comes from a Secret: the delegated Kubernetes mode does not cover RayJob.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

import yaml

from collectives.errors import ConfigError
from zenray.findings import Health
from zenray.job_config import JobConfig, KubeRaySection
from zenray.preflight import check_entrypoint
from zenray.redact import redact

TTL_S = 600
DEFAULT_DEADLINE_S = 24 * 3600


def ray_job(config: JobConfig) -> dict[str, Any]:
    """The manifest. Raises ConfigError without `entrypoint` or `kuberay`, or if a secret would be written into it."""
    if config.entrypoint is None or config.kuberay is None:
        raise ConfigError(f"job '{config.name}': a RayJob needs the keys entrypoint and kuberay (at least its image)")
    if (
        any(f.health is Health.BROKEN for f in check_entrypoint(config.entrypoint, {}))
        or redact(config.env_vars) != config.env_vars
    ):
        raise ConfigError(
            f"job '{config.name}': the entrypoint or env_vars hold a secret, which would stand in the manifest; make it a "
            f"Secret of Kubernetes and name that in the pods"
        )
    need, wanted = dict(config.entrypoint_resources), config.kuberay
    spec: dict[str, Any] = {
        "entrypoint": config.entrypoint,
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": dict(config.env_vars)}),
        "entrypointNumCpus": need.pop("CPU", 0),
        "entrypointNumGpus": need.pop("GPU", 0),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": TTL_S,
        "activeDeadlineSeconds": int(config.deadline_s or DEFAULT_DEADLINE_S),
        "preRunningDeadlineSeconds": int(config.start_timeout_s),
        "backoffLimit": config.max_retries,
        "rayClusterSpec": _cluster(wanted),
    }
    if need:
        spec["entrypointResources"] = json.dumps(need)
    name = re.sub(r"[^a-z0-9-]+", "-", config.name.lower()).strip("-")
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}


def _cluster(wanted: KubeRaySection) -> dict[str, Any]:
    return {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token", "secretName": wanted.token_secret},
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _pod(wanted, "ray-head", 0)},
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": wanted.workers,
                "minReplicas": wanted.workers,
                "maxReplicas": wanted.workers,
                "rayStartParams": {},
                "template": _pod(wanted, "ray-worker", wanted.gpus),
            }
        ],
    }


def _pod(wanted: KubeRaySection, name: str, gpus: int) -> dict[str, Any]:
    """Requests equal to limits, so that Ray and Kubernetes see the same machine; /dev/shm as large as the object store."""
    amounts: dict[str, Any] = {"cpu": str(wanted.cpus), "memory": f"{wanted.memory_gib}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    container = {
        "name": name,
        "image": wanted.image,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, wanted.memory_gib // 3)}Gi"}}
    return {"spec": {"containers": [container], "volumes": [shm]}}


def manifest(config: JobConfig) -> str:
    """The YAML text, with how to use it."""
    made = ray_job(config)
    secret = made["spec"]["rayClusterSpec"]["authOptions"]["secretName"]
    head = (
        f"# kubectl create secret generic {secret} --from-literal=auth_token=$(openssl rand -hex 32)\n"
        f"# kubectl apply -f THIS_FILE; made by: zenray submit JOB.yaml --kuberay THIS_FILE\n"
    )
    text: str = yaml.safe_dump(made, sort_keys=False, width=120)
    return head + text
