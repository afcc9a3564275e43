"""Hostile files through every command: `python -m tests.hostile --files 2000 --seed 1 --out DIR`.

Every case damages one file of a valid set (seeds.py, mutations.py) and gives it to one command. The
command runs in a forked process and must end in exit code 0, or in one sentence with exit code 2,
without a traceback or a signal, within MOST_SECONDS of processor time and MOST_BYTES of memory. It
must change nothing but its --out, print no control characters, and run no code of the file. Cases
that break a rule are kept in DIR, with their output.
"""

import argparse
import contextlib
import importlib
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from .commands import KINDS, Command
from .mutations import damage
from .seeds import make_seeds

MOST_SECONDS = 10
MOST_BYTES = 2**30
# Seconds of wall time, for machines that run other processes too.
HANG = 90
# Address space of a command beyond that of this process: enough to find what takes too much
# memory, without taking the machine's.
HEADROOM = 4 * 2**30
# Tabs and line breaks are no control characters here.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Modules of the commands, imported once.
MODULES = "train", *(f"tools.{name}" for name in Command.TOOLS)


class Outcome(NamedTuple):
    """How a command ended."""

    code: int  # negative: the signal
    output: str
    seconds: float  # of processor time
    peak: int  # bytes of memory


def run(words: list[str], folder: Path) -> Outcome:
    """Run a command in a forked process, with `folder` as its working directory."""
    log = folder / "output.txt"
    sys.stdout.flush()
    process = os.fork()
    if not process:
        run_forked(words, folder, log)
    ended = os.pidfd_open(process)
    if not select.select([ended], [], [], HANG)[0]:
        os.kill(process, signal.SIGKILL)
    os.close(ended)
    _, status, used = os.wait4(process, 0)
    text = log.read_bytes().decode(errors="backslashreplace")
    log.unlink()
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    return Outcome(os.waitstatus_to_exitcode(status), text, seconds, peak)


def run_forked(words: list[str], folder: Path, log: Path) -> None:
    """Become `python WORDS`; does not return."""
    code = 70
    try:
        with open(log, "wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + HEADROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        module, *sys.argv[1:] = words
        sys.argv[0] = f"{module}.py"
        importlib.import_module(f"densefeed.{module}").command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def find_fault(outcome: Outcome, new: list[str]) -> str:
    """Return the rule that a command broke, or an empty string; `new` are files outside --out."""
    output, sentences = outcome.output, re.findall("^error: ", outcome.output, re.MULTILINE)
    if outcome.code == -signal.SIGKILL:
        return "hang"
    if outcome.code < 0:
        return f"signal {signal.Signals(-outcome.code).name}"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    if outcome.code not in (0, 2):
        return f"exit code {outcome.code}"
    if outcome.code == 2 and len(sentences) != 1:
        return f"{len(sentences)} sentences"
    if new:
        return f"file outside --out: {new[0]}"
    if CONTROL.search(output):
        return "control character in the output"
    if outcome.seconds > MOST_SECONDS:
        return f"{outcome.seconds:.0f} s"
    if outcome.peak > MOST_BYTES:
        return f"{outcome.peak / 2**20:,.0f} MiB"
    return ""


class Result(NamedTuple):
    """What became of a case."""

    kind: str
    command: str
    fault: str  # the rule that was broken, or empty
    outcome: Outcome


def check_undamaged(seeds: Path, out: Path) -> None:
    """Run every command on a file without damage, which it must accept."""
    for kind in KINDS.values():
        for command in kind.commands:
            folder = out / "undamaged"
            (folder / "out").mkdir(parents=True)
            path, _ = kind.make(seeds, folder / "in", random.Random(0), lambda *_: "")
            outcome = run(command.words(seeds, path, folder / "out"), folder)
            # A store may have the form already that it is to be converted to.
            accepted = outcome.code == 0 or "already; choose another --form" in outcome.output
            assert accepted, f"{command.text}\n{outcome.output}"
            shutil.rmtree(folder)


def run_case(number: int, seed: int, seeds: Path, out: Path, only: str) -> Result:
    """Make case `number` and run its command."""
    rng = random.Random(f"{seed} {number}")
    name = only or rng.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
    folder = out / f"{number:05d}"
    (folder / "out").mkdir(parents=True)
    path, mutation = KINDS[name].make(seeds, folder / "in", rng, damage)
    command = rng.choice(KINDS[name].commands)
    words = command.words(seeds, path, folder / "out")
    before = set(folder.rglob("*"))
    outcome = run(words, folder)
    # Merging writes the file that it is given, and keeps its `.part` to go on from; training goes
    # on in the folder that it is given.
    own = str(folder / "out"), str(path)
    new = {entry for entry in folder.rglob("*") if not str(entry).startswith(own)} - before
    fault = find_fault(outcome, sorted(str(entry.relative_to(folder)) for entry in new))
    if fault:
        text = f"{fault}\n{mutation}\npython {' '.join(words)}\n\n{outcome.output}"
        (folder / "fault.txt").write_text(text, errors="backslashreplace")
    else:
        shutil.rmtree(folder)
    return Result(name, words[0].removeprefix("tools."), fault, outcome)


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(KINDS), default="")
    parser.add_argument("--case", type=int, help="run this case alone")
    options = parser.parse_args()
    # A forked process must not wait for threads that it does not have.
    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(f"densefeed.{module}")
    seeds = options.out.absolute() / "seeds"
    if not seeds.exists():
        make_seeds(seeds, run)
        check_undamaged(seeds, options.out.absolute())
    before, results = snapshot(seeds), []
    numbers = range(options.files) if options.case is None else [options.case]
    for number in numbers:
        result = run_case(number, options.seed, seeds, options.out.absolute(), options.only)
        results.append(result)
        if result.fault:
            print(f"{number:05d} {result.kind} {result.command}: {result.fault}", flush=True)
    print_summary(results)
    changed = snapshot(seeds) != before
    if changed:
        print("a command changed files of other cases")
    sys.exit(changed or any(result.fault for result in results))


def print_summary(results: list[Result]) -> None:
    """Print how many files of each kind ran, and the worst of each command."""
    for (kind, command), count in sorted(Counter(result[:2] for result in results).items()):
        outcomes = [result.outcome for result in results if result[:2] == (kind, command)]
        refused = sum(outcome.code == 2 for outcome in outcomes)
        seconds, peak = max(o.seconds for o in outcomes), max(o.peak for o in outcomes) >> 20
        print(f"{kind}, {command}: {count}, {refused} refused; {seconds:.1f} s, {peak:,} MiB")
    faults = Counter(result.fault for result in results if result.fault)
    print(f"{len(results):,} files, {faults.total()} faults: {dict(faults)}")


if __name__ == "__main__":
    main()
