"""Train a vision transformer from dense teacher score maps.

    densefeed train RECIPE --data train.beton --val val.beton --out runs/NAME
    torchrun --nproc-per-node 8 -m densefeed train RECIPE ...

`densefeed train RECIPE --help` shows every option (densefeed/training/config.py).
"""

if not __package__:
    import script_start  # noqa: F401

import time
from collections.abc import Callable
from contextlib import closing, nullcontext

import torch

from densefeed.recipes.command_line import read_config
from densefeed.step import Step
from densefeed.system import errors
from densefeed.system.devices import peak_memory, synchronize, warn_busy
from densefeed.system.malloc import tune_malloc
from densefeed.system.provenance import write_json
from densefeed.system.terminal import print, warn
from densefeed.training.build import flops_shares
from densefeed.training.captured_update import choose_update
from densefeed.training.compile import compile_step
from densefeed.training.config import Config
from densefeed.training.dry_run import dry_run
from densefeed.training.evaluation import describe_nonfinite, evaluate_sync, find_evaluation
from densefeed.training.guards import explain_oom, signal_handler
from densefeed.training.logs import (
    RunLog,
    describe_accuracy,
    describe_result,
    open_log,
    write_run_header,
)
from densefeed.training.monitor import TrainMonitor
from densefeed.training.ranks import StopVote, init_distributed, raise_on_rank0
from densefeed.training.run_folder import lock_run_folder
from densefeed.training.schedule import learning_rate
from densefeed.training.setup import Run, setup_run
from densefeed.training.speed import RunClock, mean_flops_share
from densefeed.training.student import update


def train(config: Config) -> dict:
    """Run or continue a training.

    Returns its result, which result.json holds too, or {} if a signal stopped it. Raises UserError
    for what does not fit together.
    """
    # A dry run has nothing to save: signals end it at once.
    handler = nullcontext(str) if config.run.dry_run else signal_handler()
    with init_distributed(config.run.device) as ranks, handler as signal_name:
        if ranks.is_first:
            warn_busy()
        if ranks.device.type == "cpu":
            tune_malloc()
        with lock_run_folder(config.run, ranks), explain_oom(0, str(config.run.out)):
            run = setup_run(config, ranks)
            with closing(run.loader), closing(run.val):
                if config.run.dry_run:
                    dry_run(run)
                    return {}
                return train_loop(run, signal_name)


def train_loop(run: Run, signal_name: Callable[[], str]) -> dict:
    """Do the remaining steps on this rank; `signal_name` names the signal that asks it to stop."""
    config, student, done, per_epoch = run.config, run.student, run.done, len(run.loader)
    options, optim, result = config.run, config.optim, {}
    compute = compile_step(options.compile, student.trainable)
    sections = config.data, config.augment
    step = Step(run.loader, student.trainable, run.objective, *sections, run.dtype, compute)
    monitor = TrainMonitor(student, step, run.ranks, options.out, run.seen, run.skips)
    do_update = choose_update(options.compile, run.ranks, update)
    opened = nullcontext(RunLog())
    if run.ranks.is_first:
        write_run_header(run)
        resumed = done, run.steps, not run.evaluate_first
        opened = open_log(options, config.to_dict(), *resumed)
    classes, passes = run.loader.num_classes, 2 if optim.sam_rho else 1
    shares = flops_shares(run.spec, run.objective, classes, passes, run.ranks, run.dtype)
    clock, vote = RunClock(done, run.spent, run.ranks.device), StopVote(run.ranks)
    with opened as log, explain_oom(optim.microbatch, str(options.out)):
        if run.evaluate_first:
            result = evaluate(run, step, log, done)
        for epoch in range(done // per_epoch, optim.total_epochs):
            # The evaluation leaves the model in evaluation mode.
            student.train()
            for batch in step.batches(epoch, done % per_epoch, clock.time_data):
                student.set_rate(learning_rate(optim, done, per_epoch))
                losses = step.losses(student.network, batch)
                loss, norm = do_update(student, run.ranks, done, losses)
                monitor.add(loss)
                done += 1
                if done == run.done + 1 and options.compile != "never":
                    report_compilation_sync(run, clock)
                if run.is_logged(done):
                    log_interval(run, monitor, clock, log, done, norm, shares)
                log.advance(1)
                # Several ranks learn of a signal a step late, but all after the same step.
                stop = vote(bool(signal_name()))
                if done % per_epoch and (stop or done % per_epoch % options.save_every == 0):
                    save(run, monitor, clock, done)
                if stop:
                    break
            if done % per_epoch:
                break
            # Saving comes before the evaluation, so that a run killed in it has lost nothing.
            save(run, monitor, clock, done)
            if run.is_evaluated(epoch + 1):
                result = evaluate(run, step, log, done)
            # Saving and evaluating do not count in the next rate.
            clock.restart(done)
            if vote(bool(signal_name())):
                break
        if done == run.steps:
            return finish(run, result, clock)
        if run.ranks.is_first:
            print(
                f"{options.out}: stopped after step {done} of {run.steps}, all saved; the same "
                "command with --resume auto continues"
            )
        return {}


def report_compilation_sync(run: Run, clock: RunClock) -> None:
    """Print the time of the first step; rank 0 waits for the device."""
    if run.ranks.is_first:
        synchronize(run.ranks.device)
        seconds = clock.total()[0] - run.spent[0]
        print(f"first step, compilation included: {seconds:.1f} s", flush=True)


def log_interval(
    run: Run,
    monitor: TrainMonitor,
    clock: RunClock,
    log: RunLog,
    step: int,
    norm: torch.Tensor,
    shares: dict,
) -> None:
    """Write a log line of the steps since the last one; waits for the device.

    `shares` are the operations of an image over those that all devices do in a second, for each
    shape of the input; empty where no peak rate is known.
    """
    mean = monitor.mean_loss_sync(step)
    steps, seconds, waited = clock.interval(step)
    # Padding takes time and operations, and does not count as images.
    rate = run.loader.plan.count_images(step - steps, step) / seconds
    computed = steps * run.config.optim.batch / seconds
    flops_share = mean_flops_share(shares, run.loader.plan, step, steps)
    speed = {
        "images_per_s": rate,
        **({"mfu": computed * flops_share} if flops_share else {}),
        "data_wait_share": waited / seconds,
    }
    values = {
        "loss": mean,
        "lr": run.student.optimizer.param_groups[0]["lr"],
        "grad_norm": norm.item(),
        # The first step compiles and allocates.
        **(speed if step > 1 else {}),
        "peak_memory_gb": peak_memory(run.ranks.device) / 1e9,
    }
    log.write("train", step, step / len(run.loader), values)
    monitor.next_interval(step, mean)
    clock.restart(step)
    log.text = f"loss {mean:.3f}  {rate:.0f} img/s"


def save(run: Run, monitor: TrainMonitor, clock: RunClock, step: int) -> None:
    """Save a checkpoint. Numbers that are not finite never replace a good one."""
    monitor.mean_loss_sync(step)
    # Until here every rank has running statistics of its own images.
    run.ranks.average(run.student.averaged)
    # The mean over ranks, so that any number of ranks can resume.
    seen = run.ranks.sum(monitor.seen.clone()) / run.ranks.size
    skipped = count_skipped(run)
    if not run.ranks.is_first:
        return
    preprocessing = run.student.model.pretrained_cfg
    about = {
        "seen": seen,
        "skips": monitor.skips,
        "skipped": skipped,
        "spent": clock.total().tolist(),
        "step": step,
        "config": run.config.to_dict(),
        "recipe": run.spec._asdict(),
        "microbatch": run.config.optim.microbatch,
        "class_names": run.loader.class_names,
        "fingerprint": run.loader.fingerprint,
        "division": run.loader.source.division,
        "maps": run.maps,
        "mean": list(preprocessing["mean"]),
        "std": list(preprocessing["std"]),
    }
    run.kept.save(run.student.state() | about, step)


def evaluate(run: Run, step: Step, log: RunLog, done: int) -> dict:
    """Evaluate all networks of the student on the validation set; return and log their metrics."""
    normalize, result, nonfinite = step.augmentation.normalize, {}, {}
    evaluation, seen = find_evaluation(run.objective), (run.ranks, run.dtype, log.show_progress)
    rated = evaluation.rated
    run.ranks.average(run.student.averaged)
    for suffix, model in run.student.evaluated.items():
        metrics = evaluate_sync(evaluation, model, run.val, normalize, *seen)
        result |= metrics.named(suffix)
        nonfinite[f"{rated}{suffix}"] = metrics.nonfinite
        if run.ranks.is_first and (fault := describe_nonfinite(metrics)):
            warn(f"{rated}{suffix} after step {done:,}: {fault}")
    count = run.val.plan.num_samples
    result |= {"images": metrics.images, "unreadable": count - metrics.images}
    log.write("val", done, done / len(run.loader), result)
    log.text = describe_accuracy(result, rated)
    log.advance(0)
    # By the weights that commands load from it by default.
    rated = f"{rated}_ema" if f"{rated}_ema" in result else rated
    # A model that has diverged never becomes best.pt.
    if run.ranks.is_first and not nonfinite[rated]:
        run.kept.rate(done, result[rated])
    return result


def count_skipped(run: Run) -> int:
    """Count the unreadable samples of the training set, of which every rank has read a part."""
    return int(run.ranks.sum(torch.tensor(run.loader.skipped)).item())


def finish(run: Run, result: dict, clock: RunClock) -> dict:
    """Write result.json; return the result."""
    config, (seconds, waited) = run.config, clock.total()
    result = result | {
        "date": time.strftime("%Y-%m-%d"),
        "seed": config.run.seed,
        "objective": config.objective.name,
        "model": config.model.name,
        "epochs": config.optim.total_epochs,
        "seconds": round(float(seconds), 1),
        "data_wait_share": round(float(waited / seconds), 4),
        "skipped": count_skipped(run),
    }
    if run.ranks.is_first:
        write_json(config.run.out / "result.json", result)
        rated = find_evaluation(run.objective).rated
        print(f"{config.run.out}: {describe_result(result, rated)}")
    return result


def main() -> None:
    """Train as the command line says."""
    with raise_on_rank0():
        train(read_config(__doc__))


def command() -> None:
    """Run `densefeed train`."""
    errors.run(main)


if __name__ == "__main__":
    command()
