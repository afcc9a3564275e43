"""Engines that start the workers of a labeling. What workers do is tested in tests/relabel."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import tyro
import yaml
from PIL import Image
from safetensors.torch import save_file

from densefeed.system.errors import UserError
from densefeed.tools.relabel_imagenet import Labeling, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 2}, "need --engine"),
        ({"engine": "ray", "shard": "0/2"}, "have no workers"),
        ({"engine": "ray", "device": "cuda:1"}, "is one device"),
        ({"gpus_per_worker": 0.5}, "need --engine"),
    ],
)
def test_options_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        main(Labeling(data=tmp_path, out=tmp_path / "maps", teacher=("t",), **options))


@pytest.mark.parametrize(
    ("dataset", "printed"),
    [("", 1), ("masks_of_mine:make", 1), ("masks", 0), ("instances", 0), ("coco/x.json", 0)],
)
def test_no_accuracy_is_printed_for_datasets_without_labels(
    tmp_path, monkeypatch, dataset, printed
):
    """With Ray the driver does not open the images."""
    store, seen = SimpleNamespace(header=SimpleNamespace(fingerprint="")), []
    for name, value in {
        "run_on_ray": lambda *_: None,
        "ScoreMapStore": lambda path: store,
        "summary": lambda store: "",
        "describe_training": lambda *_: "",
        "print_accuracy": lambda *arguments: seen.append(arguments),
    }.items():
        monkeypatch.setattr(f"densefeed.relabel.run.{name}", value)
    main(
        Labeling(
            data=tmp_path, out=tmp_path / "maps", teacher=("t",), engine="ray", dataset=dataset
        )
    )
    assert len(seen) == printed


# ------------------------------------------------------------------------- whole commands


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """The command that labels 160 images on a CPU, without --out; a shard takes a second."""
    home, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(160):
        path = home / "scenes" / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    weights = timm.create_model("resnet18", num_classes=2).state_dict()
    save_file(weights, home / "teacher.safetensors")
    words = ["--data", home / "scenes", "--teacher", home / "teacher.safetensors"]
    words += ["--model", "resnet18", "--input-size", 128, "--top-k", 2, "--batch", 4]
    words += ["--threads", 1, "--device", "cpu", "--shard-images", 16]
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory, command) -> dict[str, bytes]:
    """The files of one undisturbed worker."""
    out = tmp_path_factory.mktemp("whole") / "maps"
    done = command("tools/relabel_imagenet.py", *words, "--out", out)
    assert done.returncode == 0, done.stderr
    return files(out)


@pytest.mark.slow
def test_the_driver_prints_the_accuracy_when_its_workers_have_ended(
    words, tmp_path, monkeypatch, capsys
):
    """A worker that prints it may be cancelled: the others have ended long before."""

    def run(labeling, label, workers, gpus_each):
        assert (labeling.engine, workers, gpus_each) == ("none", 2, 0.5)
        for _ in range(workers):
            label(labeling)

    monkeypatch.setattr("densefeed.relabel.run.run_on_ray", run)
    engine = ["--engine", "ray", "--num-workers", "2", "--gpus-per-worker", "0.5"]
    main(tyro.cli(Labeling, args=[*words, "--out", str(tmp_path / "maps"), *engine]))
    assert capsys.readouterr().out.count("accuracy of the stored maps") == 1


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


# Nodes of a simulated cluster come and go while the command runs. Prints how many processes of Ray
# have labeled: three, and one more for each that was killed or lost its node.
CLUSTER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

def find_workers():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::label_on_ray"):
                yield int(path.parent.name)
        except OSError:
            pass

def find_holders():
    return {json.loads(path.read_bytes())["worker"] for path in out.glob("leases/*.1")}

out, words = Path(sys.argv[1]), sys.argv[2:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
environment = os.environ | {"RAY_ADDRESS": cluster.address}
run = subprocess.Popen([sys.executable, "tools/relabel_imagenet.py", *words], env=environment)
while run.poll() is None and len(find_holders()) < 3:
    time.sleep(0.05)
seen = set(find_workers())
os.kill(min(seen), signal.SIGKILL)
cluster.remove_node(nodes.pop(), allow_graceful=False)
cluster.add_node(num_cpus=1)
while run.poll() is None:
    seen |= set(find_workers())
    time.sleep(0.2)
print(len(seen), "processes", flush=True)
cluster.shutdown()
sys.exit(run.returncode)
"""


@pytest.mark.slow
def test_a_cluster_that_loses_and_gains_nodes_gives_the_same_bytes(words, whole, tmp_path):
    """Three nodes: a worker is killed, a node is removed, and another one joins."""
    pytest.importorskip("ray", reason="ray is not installed")
    script, out = tmp_path / "cluster.py", tmp_path / "maps"
    script.write_text(CLUSTER)
    words = [*words, "--out", out, "--engine", "ray", "--num-workers", "3"]
    done = subprocess.run(
        [sys.executable, script, out, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert files(out) == whole
    assert len(re.findall("^accuracy of the stored maps", done.stdout, re.M)) == 1
    count = int(re.search(r"^(\d+) processes$", done.stdout, re.M)[1])
    assert count >= 4, done.stdout[-3000:]


@pytest.mark.slow
def test_the_jobs_of_the_guide_label(words, whole, tmp_path):
    """Two tasks of the Slurm script at once, then the command of the Kubernetes job."""
    guide = (ROOT / "docs/guides/label-on-many-devices.md").read_text()
    slurm, kubernetes = (
        re.search(rf"^```{kind}\n(.*?)^```", guide, re.M | re.S)[1] for kind in ("bash", "yaml")
    )
    job = yaml.safe_load(kubernetes)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {entry["name"] for entry in container["env"]} == {"DATA", "TEACHER", "MAPS"}
    out = tmp_path / "maps"
    options = dict(zip(words[::2], words[1::2], strict=False))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DATA": options["--data"],
        # The other options of this teacher; of two values of an option the last counts.
        "TEACHER": " ".join(words[words.index("--teacher") + 1 :]),
        "MAPS": f"{out} --input-size {options['--input-size']}",
    }
    tasks = [
        subprocess.Popen(
            ["bash", "-c", slurm], cwd=ROOT, env=environment | {"SLURM_ARRAY_TASK_ID": task}
        )
        for task in "01"
    ]
    assert [task.wait(300) for task in tasks] == [0, 0]
    assert files(out) == whole
    done = subprocess.run(
        [*container["command"], *container["args"]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{out} is finished" in done.stdout
