# SPDX-License-Identifier: Apache-2.0
"""What the environment says of a launcher, and the job files that say it."""

import re
from pathlib import Path

import pytest
import yaml

from jaxgpt.errors import ConfigError
from jaxgpt.train.launched import VARIABLES, Place, find_place

JOBS = Path(__file__).resolve().parents[1] / "examples" / "clusters"
BY_HAND = dict(zip(VARIABLES, ("host:123", "4", "1"), strict=True))
BATCH = {  # the script of sbatch itself
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
STEP = BATCH | {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_PROCID": "9",
}


@pytest.mark.parametrize(
    ("env", "asked", "place"),
    [
        ({}, "auto", None),
        (BATCH, "auto", None),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "auto", None),
        (STEP, "auto", Place(None, 16, 9, "slurm")),
        (STEP, "off", None),
        (STEP | {VARIABLES[0]: "node01:5"}, "auto", Place("node01:5", 16, 9, "slurm")),
        (BY_HAND, "auto", Place("host:123", 4, 1, "deactivate")),
        (BY_HAND, "off", None),
        (BY_HAND | {VARIABLES[1]: "1", VARIABLES[2]: "0"}, "auto", None),
        ({}, "on", Place()),
        ({VARIABLES[0]: "host:123"}, "on", Place("host:123")),
    ],
)
def test_the_place_of_a_process(env, asked, place):
    assert find_place(env, asked) == place


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {VARIABLES[0]: "host:1"},
            "JAX_COORDINATOR_ADDRESS without JAX_NUM_PROCESSES, JAX_PR",
        ),
        ({VARIABLES[1]: "2"}, "set all three, or none"),
        (BY_HAND | {VARIABLES[2]: "4"}, "process 4 of 4"),
        (BY_HAND | {VARIABLES[2]: "-1"}, "process -1 of 4"),
        (BY_HAND | {VARIABLES[1]: "two"}, "JAX_NUM_PROCESSES=two is no number"),
        (BY_HAND | {VARIABLES[0]: "host"}, "host has no port"),
        (STEP | BY_HAND, "JAX_NUM_PROCESSES=4, JAX_PROCESS_ID=1, but Slurm's step has 16 tasks"),
    ],
)
def test_contradictions(env, message):
    with pytest.raises(ConfigError, match=message):
        find_place(env, "auto")


def test_the_job_of_kubernetes_gives_each_pod_its_place():
    service, job = yaml.safe_load_all((JOBS / "job.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    env = {each["name"]: each.get("value", "1") for each in container["env"]}
    assert find_place(env, "auto") == Place(f"{name}-0.jaxgpt:12345", 2, 1, "deactivate")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env[VARIABLES[1]])
    gpus = spec["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--mesh.fsdp={gpus}" in container["command"]


def test_the_job_of_slurm_has_a_task_for_each_gpu():
    text = (JOBS / "job.sbatch").read_text()
    tasks, gpus = (re.search(rf"#SBATCH --{x}-per-node=(\d+)", text) for x in ("ntasks", "gpus"))
    assert tasks and gpus and tasks[1] == gpus[1]
    assert "--requeue" in text and "--signal=TERM@" in text and "$code -eq 143" in text
