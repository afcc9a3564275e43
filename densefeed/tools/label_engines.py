"""Start the workers of a labeling: on the devices of this machine, or on a Ray cluster.

A worker is the command that labels with --workers-join (relabel/workers.py). Workers divide the
shards by leases, so an engine only places processes: one that is lost costs the shards that it had
in flight, and workers that were started in another way may take part.

Ray gets a task per worker and not per shard: a shard would load the teacher each time, and leases
already give shards to whoever is free.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from densefeed.relabel.workers import WORK
from densefeed.storage.shard_plan import Status, measure_status
from densefeed.system.devices import count_cores
from densefeed.system.errors import UserError
from densefeed.system.object_store import ObjectURL
from densefeed.system.progress import tally
from densefeed.system.terminal import print

Engine = Literal["none", "local", "ray"]
MODULE = "densefeed.tools.relabel_imagenet"
# Seconds between looks at the progress, and for which workers may end once all shards are done:
# one that waits for the others looks every 5 s at the most.
POLL_SECONDS, END_SECONDS = 1.0, 20.0
# Times that Ray starts a worker again which was killed or lost its machine.
RESTARTS = 10


def run_engine(
    engine: Engine, words: Sequence[str], out: Path | ObjectURL, workers: int, share: float
) -> None:
    """Run workers until all shards of `out` are finished.

    Args:
        words: of the command line; each worker gets them, and --workers-join.
        workers: 0 for one per GPU (per machine of Ray, or one here, if there are no GPUs).
        share: the part of a GPU that a worker takes, above 0 and at most 1.

    UserError if workers failed; what they labeled is kept.
    """
    if workers < 0 or not 0 < share <= 1:
        raise UserError("--num-workers must not be negative, and --gpus-per-worker in (0, 1]")
    # The last word of an option counts.
    words = [*words, "--engine", "none", "--num-workers", "0", "--gpus-per-worker", "1"]
    run = run_local if engine == "local" else run_on_ray
    if failed := run([*words, "--workers-join"], out, workers, share):
        raise UserError(
            f"workers failed ({failed}), for the reasons above; without these the same command "
            "labels what is left"
        )


def show_progress(out: Path | ObjectURL, running: Callable[[], bool]) -> None:
    """Show the progress of all workers at `out` until none is running."""
    while (status := find_status(out)) is None:
        if not running():
            return
        time.sleep(POLL_SECONDS)
    # Where class folders are listed one by one, the number of images is not known yet.
    total = None if status.unlisted else status.images
    with tally(WORK, total, status.images_done) as update:
        while running():
            time.sleep(POLL_SECONDS)
            if status := find_status(out):
                update(status.images_done)


def find_status(out: Path | ObjectURL) -> Status | None:
    """Return the progress of all workers; None if none has begun, or it cannot be read now."""
    try:
        return measure_status(out)
    except (UserError, OSError):
        return None


# ------------------------------------------------------------------------- this machine


def run_local(words: list[str], out: Path | ObjectURL, workers: int, share: float) -> int:
    """Start a process per worker; return how many failed.

    One that is killed is not started again: the others take its shards after a minute.
    """
    gpus = torch.cuda.device_count()
    workers = workers or max(1, int(gpus / share))
    started = [start(words, number, workers, gpus) for number in range(workers)]
    printing = [threading.Thread(target=forward, args=pair) for pair in enumerate(started)]
    try:
        for thread in printing:
            thread.start()
        show_progress(out, lambda: any(process.poll() is None for process in started))
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
        for thread in printing:
            thread.join()
    codes = [process.wait() for process in started]
    for number, code in enumerate(codes):
        if code < 0:
            print(f"worker {number} was killed by signal {-code}")
    # After one that ended well all shards are finished, whoever was killed.
    return 0 if 0 in codes and max(codes) == 0 else len(codes) - codes.count(0)


def start(words: list[str], number: int, workers: int, gpus: int) -> subprocess.Popen:
    """Start worker `number` of `workers`, on one of the GPUs if there are any."""
    # With this variable of torchrun a worker takes its part of the cores.
    environment = os.environ | {"LOCAL_WORLD_SIZE": str(workers)}
    if gpus:
        # Of those that this process sees, by number or UUID.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        seen = seen if len(seen) == gpus and seen[0] else [str(n) for n in range(gpus)]
        environment["CUDA_VISIBLE_DEVICES"] = seen[number % gpus]
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def forward(number: int, process: subprocess.Popen) -> None:
    """Print the lines of a worker, but for its bar, which shows the progress of all."""
    for line in process.stdout:
        if line.strip() and not line.startswith(WORK):
            print(f"worker {number}: {line.rstrip()}", flush=True)


# ------------------------------------------------------------------------- Ray


def run_on_ray(words: list[str], out: Path | ObjectURL, workers: int, share: float) -> int:
    """Run a task of Ray per worker; return how many failed.

    Tasks that do not fit wait for machines that join. A task whose process or machine is lost is
    started again, elsewhere if need be.
    """
    ray = open_cluster()
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0) / share)
    # Without GPUs a worker has a machine for itself.
    workers = workers or gpus or len(ray.nodes())
    needs = {"num_gpus": share} if gpus else {"num_cpus": parse(words).threads}
    task = ray.remote(label_on_ray).options(max_retries=RESTARTS, **needs)
    tasks = [task.remote(words, os.getcwd(), share) for _ in range(workers)]
    failed, ended = 0, None

    def running() -> bool:
        nonlocal failed, ended, tasks
        done, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=0)
        for one in done:
            if fault := find_fault(ray, one):
                print(f"error: {fault}")
                failed += 1
            else:
                # All shards are finished. Tasks that have not begun are not needed.
                ended = ended or time.monotonic()
        return bool(tasks) and (ended is None or time.monotonic() - ended < END_SECONDS)

    try:
        show_progress(out, running)
        while running():
            time.sleep(POLL_SECONDS)
    finally:
        for one in tasks:
            ray.cancel(one)
        ray.shutdown()
    return failed


def open_cluster() -> Any:
    """Return the module ray, connected to a running cluster, or to one on this machine.

    Ray looks at RAY_ADDRESS, then for a cluster that `ray start` began here.
    """
    # Statistics are not sent.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UserError(
            '--engine ray needs the package ray; run `pip install "densefeed[ray]"`'
        ) from None
    try:
        ray.init(logging_level="warning")
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            f"there is no Ray cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} "
            f"({type(error).__name__}); start one with `ray start --head`, or unset RAY_ADDRESS"
        ) from None
    return ray


def parse(words: list[str]) -> Any:
    """Return the options of a worker, a Labeling."""
    # By name, as in `start`: the command imports this module.
    return tyro.cli(import_module(MODULE).Labeling, args=words)


def label_on_ray(words: list[str], folder: str, share: float) -> None:
    """Label as a worker, in a process of Ray; paths are relative to `folder`."""
    import ray

    try:
        os.chdir(folder)
    except OSError:
        raise UserError(
            f"the machine {ray.util.get_node_ip_address()} has no folder {folder}; start the "
            "command in one that all machines share"
        ) from None
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    beside = max(1, int(node["Resources"].get("GPU", 0) / share))
    labeling = parse(words)
    import_module(MODULE).main(
        replace(labeling, threads=min(labeling.threads, max(1, count_cores() // beside)))
    )


def find_fault(ray: Any, task: Any) -> str | None:
    """Return why a finished task failed; None if it did not."""
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            return str(error.cause)
        return f"a worker failed: {error}"
    except ray.exceptions.RayError as error:
        return f"a worker was lost, also after {RESTARTS} restarts: {error}"
    return None
