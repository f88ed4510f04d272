"""The RayJob: only fields that ray.io/v1 has, our pin of Ray, a token, no secret in it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from collectives.errors import ConfigError
from zenray.__main__ import app
from zenray.job_config import JobConfig
from zenray.kuberay import manifest

ROOT = Path(__file__).resolve().parents[2]
JOB = {
    "name": "My_Job.1", "entrypoint": "python -m jobs.train ranks=2", "deadline_s": 3600.0, "max_retries": 1,
    "entrypoint_resources": {"CPU": 1.0, "slot": 2.0}, "env_vars": {"A": "1"},
    "kuberay": {"image": "registry.example/zenray:1", "workers": 2, "gpus": 1, "memory_gib": 24},
}  # fmt: skip

# KubeRay's API reference (ray.io/v1), by the object that holds the fields.
FIELDS = {
    "RayJob": "apiVersion kind metadata spec",
    "spec": "activeDeadlineSeconds backoffLimit rayClusterSpec submitterPodTemplate metadata clusterSelector "
    "submitterConfig managedBy deletionStrategy entrypoint runtimeEnvYAML jobId submissionMode entrypointResources "
    "entrypointNumCpus entrypointNumGpus ttlSecondsAfterFinished preRunningDeadlineSeconds shutdownAfterJobFinishes suspend",
    "rayClusterSpec": "upgradeStrategy authOptions suspend managedBy autoscalerOptions headServiceAnnotations "
    "enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec rayVersion workerGroupSpecs",
    "authOptions": "mode secretName enableK8sTokenAuth",
    "headGroupSpec": "template headService enableIngress resources labels rayStartParams serviceType",
    "workerGroupSpecs": "suspend groupName replicas minReplicas maxReplicas idleTimeoutSeconds priority resources labels "
    "rayStartParams template scaleStrategy numOfHosts",
}


def unknown_fields(name: str, value: Any) -> list[str]:
    """Fields below `value` that KubeRay does not know; pods and free maps are left to Kubernetes."""
    found = []
    if isinstance(value, list):
        return [field for item in value for field in unknown_fields(name, item)]
    if isinstance(value, dict) and name in FIELDS:
        found = [f"{name}.{key}" for key in value if key not in FIELDS[name].split()]
        for key, item in value.items():
            found += unknown_fields(key, item)
    return found


def test_the_manifest_has_known_fields_and_the_pinned_ray() -> None:
    made = yaml.safe_load(manifest(JobConfig.model_validate(JOB)))
    assert unknown_fields("RayJob", made) == []
    assert unknown_fields("RayJob", {"spec": {"entryPoint": 1}}) == ["spec.entryPoint"]
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("ray.io/v1", "RayJob", "my-job-1")
    spec = made["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["activeDeadlineSeconds"], spec["preRunningDeadlineSeconds"], spec["backoffLimit"]) == (3600, 120, 1)
    assert (spec["entrypointNumCpus"], spec["entrypointResources"]) == (1.0, '{"slot": 2.0}')
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"A": "1"}}
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    (group,) = cluster["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "24Gi", "nvidia.com/gpu": "1"}
    assert "nvidia.com/gpu" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kuberay": None}, "kuberay"),
        ({"entrypoint": None}, "entrypoint"),
        ({"env_vars": {"MY_TOKEN": "x"}}, "hold a secret"),
        ({"entrypoint": "run --password=x"}, "hold a secret"),
    ],
)
def test_what_cannot_become_a_manifest_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        manifest(JobConfig.model_validate({**JOB, **change}))


def test_the_command_writes_it_and_submits_nothing(tmp_path: Path) -> None:
    job = ROOT / "jobs" / "k8s" / "job.yaml"
    result = CliRunner().invoke(app, ["submit", str(job), "--kuberay", str(tmp_path / "rayjob.yaml")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "rayjob.yaml").read_text() == (ROOT / "jobs" / "k8s" / "rayjob.yaml").read_text()
