"""The launch recipes: what they pass on, that they are what their readers accept, and one that makes a cluster."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_support import TIMEOUT_SECONDS
from megatoken.cli.application import app
from megatoken.runs.run import Verdict, read_run
from megatoken.serve.options import ServeConfig, load_serve_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = ("ray_node.sh", "slurm.sbatch")
# Fields of KubeRay's API reference (ray.io/v1, KubeRay 1.6), and of Kubernetes' for what stands in a pod.
KUBERAY_FIELDS = {
    "RayJob.spec": {
        *("entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"),
        *("rayClusterSpec", "runtimeEnvYAML", "activeDeadlineSeconds", "jobId", "suspend", "submitterPodTemplate"),
    },
    "rayClusterSpec": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs", "autoscalerOptions"},
    "headGroupSpec": {"rayStartParams", "template", "serviceType", "headService", "enableIngress"},
    "workerGroupSpec": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "container": {"name", "image", "ports", "resources", "volumeMounts", "env", "envFrom", "command", "args"},
}

SRUN = """#!/bin/bash
printf '%s\\n' "$*" >> "$RECORDS/srun"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
RAY = """#!/bin/bash
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN $*" >> "$RECORDS/ray"
echo $$ >> "$RECORDS/processes"
exec sleep 300
"""
MEGATOKEN = """#!/bin/bash
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN $RAY_ADDRESS $*" >> "$RECORDS/megatoken"
pwd > "$RECORDS/folder"
exit 3
"""


def own_address() -> str:
    found = subprocess.run([LAUNCH / "ray_node.sh", "address"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"this machine has no address for a cluster: {found.stderr.strip()}")
    return found.stdout.strip()


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def allocation(tmp_path: Path, nodes: int) -> dict[str, str]:
    """The environment of a batch script; ``srun`` runs every step here."""
    write_program(tmp_path / "slurm" / "srun", SRUN)
    (tmp_path / "records").mkdir()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "MEGATOKEN_"))},
        "PATH": f"{tmp_path / 'slurm'}:{os.environ['PATH']}",
        "RECORDS": str(tmp_path / "records"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURMD_NODENAME": "rack-0",
        "MEGATOKEN_VENV": str(tmp_path / "venv"),
        "MEGATOKEN_LAUNCH": str(LAUNCH),
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    assert os.access(LAUNCH / script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_pass_shellcheck(script: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", LAUNCH / script], check=True)


def test_a_dockerfile_passes_hadolint() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    subprocess.run(["hadolint", LAUNCH / "Dockerfile"], check=True)


def test_the_image_copies_what_the_package_is_built_from() -> None:
    copied = re.findall(r"^COPY (.*) \./?\S*$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    project = (ROOT / "pyproject.toml").read_text()
    assert {"pyproject.toml", "src", *re.findall(r'"(README\.md|LICENSE)"', project)} <= names
    assert all((ROOT / name).exists() for name in names)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ((), "run"),
        (("soak", "--duration", "80m", "--model", "a b"), "soak"),
        (("soak", "--resume", "runs/x"), "soak"),  # which takes no --out
        (("serve", "--host", "0.0.0.0"), "serve"),
        (("sweep", "--endpoint", "http://10.0.0.7:8000/v1"), "sweep"),
    ],
)
def test_a_slurm_job_starts_every_node_with_one_token_and_ends_as_the_run_does(
    tmp_path: Path, arguments: tuple[str, ...], command: str
) -> None:
    address, environment = own_address(), allocation(tmp_path, nodes=3)
    for name, text in (("ray", RAY), ("megatoken", MEGATOKEN)):
        write_program(tmp_path / "venv" / "bin" / name, text)
    write_program(tmp_path / "venv" / "bin" / "python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    shutil.copytree(LAUNCH, tmp_path / "launch")
    waiting = "import pathlib, os, time\nray = pathlib.Path(os.environ['RECORDS'], 'ray')\n"
    waiting += "while not ray.exists() or len(ray.read_text().splitlines()) < 2: time.sleep(0.05)\n"
    (tmp_path / "launch" / "wait_for_nodes.py").write_text(waiting)  # there are no three nodes to wait for
    environment["MEGATOKEN_LAUNCH"] = str(tmp_path / "launch")
    script = [LAUNCH / "slurm.sbatch", *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 3, done.stderr

    records = tmp_path / "records"
    steps = sorted((records / "srun").read_text().splitlines())
    node = tmp_path / "launch" / "ray_node.sh"
    assert steps == [
        f"--overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist=rack-0 {node} head",
        f"--overlap --cpu-bind=none --nodes=2 --ntasks=2 --exclude=rack-0 {node} {address}",
    ]
    started = [line.split(" ", 2) for line in (records / "ray").read_text().splitlines()]
    mode, token, ray_address, ran = (records / "megatoken").read_text().strip().split(" ", 3)
    assert {(one[0], one[1]) for one in started} == {(mode, token)}
    assert mode == "token"
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert not any(token in line for line in steps)
    assert ray_address == f"{address}:6379"
    cluster = "--endpoint.hosts" if "--endpoint" in arguments else "--rack"
    assert ran == " ".join([command, cluster, "auto", *arguments[1:]])
    assert (records / "folder").read_text().strip() == str(tmp_path)
    bound = f"--node-ip-address={address} --object-store-memory=83886080 --disable-usage-stats --block"
    assert {one[2] for one in started} == {
        f"start --head --port=6379 --include-dashboard=false {bound}",
        f"start --address={address}:6379 {bound}",
    }
    for process in (records / "processes").read_text().split():
        assert not Path(f"/proc/{process}").exists()  # nothing outlives the job


def test_a_slurm_job_that_still_waits_for_nodes_ends_when_it_is_told_to(tmp_path: Path) -> None:
    own_address()
    environment = allocation(tmp_path, nodes=3)
    for name, text in (("ray", RAY), ("megatoken", MEGATOKEN)):
        write_program(tmp_path / "venv" / "bin" / name, text)
    write_program(tmp_path / "venv" / "bin" / "python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    shutil.copytree(LAUNCH, tmp_path / "launch")
    waiting = "import os, pathlib, time\nprocesses = pathlib.Path(os.environ['RECORDS'], 'processes')\n"
    waiting += "while not processes.exists() or len(processes.read_text().splitlines()) < 2: time.sleep(0.05)\n"
    waiting += "print(os.getpid(), flush=True)\ntime.sleep(2 * float(os.environ['TIMEOUT_SECONDS']))\n"
    (tmp_path / "launch" / "wait_for_nodes.py").write_text(waiting)
    environment |= {"MEGATOKEN_LAUNCH": str(tmp_path / "launch"), "TIMEOUT_SECONDS": str(TIMEOUT_SECONDS)}
    with subprocess.Popen([LAUNCH / "slurm.sbatch"], env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        waiter = int(job.stdout.readline())
        job.terminate()
        try:
            assert job.wait(TIMEOUT_SECONDS) == 143
        except subprocess.TimeoutExpired:
            os.kill(waiter, signal.SIGTERM)
            raise
    records = tmp_path / "records"
    assert not (records / "megatoken").exists()
    for process in (str(waiter), *(records / "processes").read_text().split()):
        assert not Path(f"/proc/{process}").exists()


def test_a_node_without_a_token_does_not_start() -> None:
    own_address()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    refused = subprocess.run([LAUNCH / "ray_node.sh", "head"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "RAY_AUTH_TOKEN" in refused.stderr


def test_a_job_whose_nodes_end_does_not_wait_for_them() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    waiting = [sys.executable, LAUNCH / "wait_for_nodes.py", "2", str(ended.pid)]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(waiting, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stderr.count("0 of 2 nodes joined 127.0.0.1:1")) == (1, 1)


def test_ray_accepts_the_cluster_of_machines_reached_by_ssh() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    cluster = yaml.safe_load((LAUNCH / "ray-up.yaml").read_text())
    addresses = [cluster["provider"]["head_ip"], *cluster["provider"]["worker_ips"]]
    assert cluster["min_workers"] == cluster["max_workers"] == len(addresses) - 1
    starts = [cluster["head_start_ray_commands"][-1], cluster["worker_start_ray_commands"][-1]]
    assert all("RAY_AUTH_MODE=token" in start and "--node-ip-address=" in start for start in starts)
    util.validate_config(util.prepare_config(cluster))


def test_the_kuberay_manifest_has_documented_fields_and_hangs_together() -> None:
    job, policy = yaml.safe_load_all((LAUNCH / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(spec) <= KUBERAY_FIELDS["RayJob.spec"]
    assert set(cluster) <= KUBERAY_FIELDS["rayClusterSpec"]
    assert set(head) <= KUBERAY_FIELDS["headGroupSpec"]
    assert set(workers) <= KUBERAY_FIELDS["workerGroupSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    for group in (head, workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert set(container) <= KUBERAY_FIELDS["container"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
        for value in texts(group["rayStartParams"]):
            assert isinstance(value, str)  # KubeRay takes nothing else
    image = (LAUNCH / "Dockerfile").read_text()
    assert f"ray[default]=={cluster['rayVersion']}" in image
    assert container["image"] in image
    out = re.search(r"--out (\S+)", spec["entrypoint"])
    assert out is not None
    assert [mount["mountPath"] for mount in head["template"]["spec"]["containers"][0]["volumeMounts"]] == [out[1]]


def test_a_server_on_kubernetes_is_that_of_the_job_and_has_an_address() -> None:
    recipe = (LAUNCH / "kuberay-serve.yaml").read_text()
    service, policy = yaml.safe_load_all(recipe)
    found = re.search(r"^#   sed '(.*)' (\S+) \|$", recipe, re.MULTILINE)
    assert found is not None and found[2] == "launch/kuberay.yaml"
    changed = subprocess.run(["sed", found[1], LAUNCH / "kuberay.yaml"], check=True, capture_output=True, text=True)
    job, _ = yaml.safe_load_all(changed.stdout)
    assert job["spec"]["entrypoint"].split()[:4] == ["megatoken", "serve", "--rack", "auto"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    labels = {**head["metadata"]["labels"], "ray.io/node-type": "head"}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    (container,) = head["spec"]["containers"]
    served = {port["containerPort"] for port in container["ports"]}
    (address,), ((opened,),) = service["spec"]["ports"], [rule["ports"] for rule in policy["spec"]["ingress"]]
    assert address["targetPort"] == opened["port"] == ServeConfig().port and opened["port"] in served
    assert container["envFrom"] == [{"secretRef": {"name": service["metadata"]["name"], "optional": True}}]


def test_systemd_accepts_the_service_and_waits_for_open_answers(tmp_path: Path) -> None:
    text = (LAUNCH / "megatoken-serve.service").read_text()
    (command,) = re.findall(r"^ExecStart=(\S+) ", text, re.MULTILINE)
    (drain,) = re.findall(r"--drain-seconds (\d+)", text)
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(patience) > int(drain)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "megatoken-serve.service"
    unit.write_text(text.replace(command, "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert checked.returncode == 0 and unit.name not in checked.stderr, checked.stderr


def texts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from texts(item)
    else:
        yield value


@pytest.mark.parametrize("recipe", sorted(path.name for path in LAUNCH.iterdir()))
def test_recipes_call_commands_that_there_are(recipe: str) -> None:
    known = {"soak", "run", "serve"} & {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    text = (LAUNCH / recipe).read_text()
    called = re.findall(r"megatoken (?:run|soak|serve|measure\w*|bench\w*)\b", text)
    assert {call.split()[1] for call in called} <= known
    for flags in re.findall(r"megatoken serve( --rack auto[^'|\n]*)", text):
        words = flags.split()
        assert load_serve_config(
            {n[2:]: v for n, v in zip(words[2::2], words[3::2], strict=False) if n != "--json"}, "auto"
        )
    assert "--rack auto" in text or recipe in ("Dockerfile", "grafana.json", "ray_node.sh", "wait_for_nodes.py")


@pytest.mark.skipif(os.environ.get("MEGATOKEN_TEST_RACK") != "1", reason="a whole rack: MEGATOKEN_TEST_RACK=1")
def test_a_slurm_job_measures_on_the_cluster_that_it_makes(tmp_path: Path) -> None:
    own_address()
    environment = allocation(tmp_path, nodes=1) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["MEGATOKEN_RAY_PORT"] = "26379"
    for name, module in (("python", ""), ("megatoken", "-m megatoken"), ("ray", "-m ray.scripts.scripts")):
        write_program(tmp_path / "venv" / "bin" / name, f'#!/bin/bash\nexec {sys.executable} {module} "$@"\n')
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "8,6\n" * 20)
    flags = ["--model", "tiny", "--lengths", lengths, "--samples", "20", "--warm-up", "0.1", "--engine.device", "cpu"]
    script = [LAUNCH / "slurm.sbatch", "run", *flags, "--rack.replicas", "1", "--engine.threads", "1"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").glob("2*")
    run = read_run(path)
    assert run.verdict is Verdict.MEASURED
    assert run.result["samples_completed"] == 20
    assert len(run.result["rack_nodes"]) == 1
