"""Start the workers of a labeling on a Ray cluster.

Workers divide the shards by leases (relabel/workers.py), so this only places processes: one that is
lost costs the shards that it had in flight, and workers that were started in another way may take
part. Ray gets a task per worker and not per shard: a shard would load the teacher each time, and
leases already give shards to whoever is free.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from densefeed.relabel.workers import WORK
from densefeed.storage.shard_plan import Status, measure_status
from densefeed.system.devices import count_cores
from densefeed.system.errors import UserError, install_extra
from densefeed.system.object_url import ObjectURL
from densefeed.system.progress import tally
from densefeed.system.terminal import print

Engine = Literal["none", "ray"]
# Seconds between looks at the progress, and for which workers may end once all shards are done:
# one that waits for the others looks every 5 s at the most.
POLL_SECONDS, END_SECONDS = 1.0, 20.0
# Times that Ray starts a worker again which was killed or lost its machine.
RESTARTS = 10


def show_progress(out: Path | ObjectURL, running: Callable[[], bool]) -> None:
    """Show the progress of all workers at `out` until none is running."""
    while (status := find_status(out)) is None:
        if not running():
            return
        time.sleep(POLL_SECONDS)
    with tally(WORK, status.images, status.images_done) as update:
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


def run_on_ray(
    labeling: Any, label: Callable[[Any], object], workers: int, gpus_each: float
) -> None:
    """Call `label(labeling)` in a task of Ray per worker, until all shards are finished.

    Tasks that do not fit wait for machines that join. A task whose process or machine is lost is
    started again, elsewhere if need be.

    Args:
        labeling: options of the labeling: a dataclass with `out` and `threads`.
        workers: 0 for one per GPU, or per machine if there are no GPUs.
        gpus_each: the part of a GPU that a worker takes, above 0 and at most 1.

    UserError if workers failed; what they labeled is kept.
    """
    ray = open_cluster()
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0) / gpus_each)
    # Without GPUs a worker has a machine for itself.
    workers = workers or gpus or sum(node["Alive"] for node in ray.nodes())
    needs = {"num_gpus": gpus_each} if gpus else {"num_cpus": labeling.threads}
    task = ray.remote(label_on_ray).options(max_retries=RESTARTS, **needs)
    tasks = [task.remote(labeling, label, os.getcwd(), gpus_each) for _ in range(workers)]
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
        show_progress(labeling.out, running)
        while running():
            time.sleep(POLL_SECONDS)
    finally:
        for one in tasks:
            ray.cancel(one)
        ray.shutdown()
    if failed:
        raise UserError(
            f"workers failed ({failed}), for the reasons above; without these the same command "
            "labels what is left"
        )


def open_cluster() -> Any:
    """Return the module ray, connected to a running cluster, or to one on this machine.

    Ray looks at RAY_ADDRESS, then for a cluster that `ray start` began here.
    """
    # Statistics are not sent.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UserError(f"--engine ray needs the package ray; {install_extra('ray')}") from None
    try:
        ray.init(logging_level="warning")
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            f"there is no Ray cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} "
            f"({type(error).__name__}); start one with `ray start --head`, or unset RAY_ADDRESS"
        ) from None
    return ray


def label_on_ray(
    labeling: Any, label: Callable[[Any], object], folder: str, gpus_each: float
) -> None:
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
    beside = max(1, int(node["Resources"].get("GPU", 0) / gpus_each))
    label(replace(labeling, threads=min(labeling.threads, max(1, count_cores() // beside))))


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
