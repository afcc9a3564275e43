"""Hostile files through every command: `python -m tests.hostile --files 2000 --seed 1 --out DIR`.

Every case of the campaign `files` damages one file of a valid set (seeds.py, mutations.py) and
gives it to one command (commands.py). Those of the campaign `names` are lists, class maps and
folders with hostile names (names.py). children.py has the rules for the end of a command; it must
not run code of a file either. Cases that break a rule are kept in DIR, with their output. They are
a function of the seed.
"""

import argparse
import importlib
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from . import commands, names
from .children import Outcome, compare, find_fault, run_command, snapshot
from .commands import OUTSIDE, Kind
from .mutations import damage
from .seeds import make_seeds

CAMPAIGNS = {"files": commands.KINDS, "names": names.KINDS}
# Draws of an undamaged file, for kinds with several files.
DRAWS = 8
# Refusals of valid files: a store may have the form that it is to be converted to, or a lossy one.
CONVERTED = "already; choose another --form", "is lossy; convert the store it was made from"


class Result(NamedTuple):
    """The result of a case."""

    kind: str
    command: str
    # The rule that was broken, or empty.
    fault: str
    outcome: Outcome


def make_folder(folder: Path) -> None:
    """Make the folder of a case, and remove what an earlier run kept."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)


def check_undamaged(kinds: dict[str, Kind], seeds: Path, out: Path) -> None:
    """Run every command on files without damage, which it must accept."""
    folder = out / "undamaged"
    for kind in kinds.values():
        for command in kind.commands:
            accepted = set()
            for draw in range(DRAWS):
                make_folder(folder)
                path, _ = kind.make(seeds, folder / "in", random.Random(draw), None)
                if path not in accepted:
                    outcome = run_command(command.words(seeds, path, folder / "out"), folder)
                    converted = any(text in outcome.output for text in CONVERTED)
                    assert outcome.code == 0 or converted, f"{command.text}\n{outcome.output}"
                    accepted.add(path)
    shutil.rmtree(folder)


def run_case(number: int, options: argparse.Namespace, seeds: Path, out: Path) -> Result:
    """Make case `number` and run its command."""
    rng, kinds = random.Random(f"{options.seed} {number}"), CAMPAIGNS[options.campaign]
    shares = [kind.share for kind in kinds.values()]
    name = options.only or rng.choices(list(kinds), shares)[0]
    folder = out / f"{number:05d}"
    make_folder(folder)
    path, mutation = kinds[name].make(seeds, folder / "in", rng, damage)
    command = rng.choice(kinds[name].commands)
    words = command.words(seeds, path, folder / "out")
    before = snapshot(folder) | snapshot(seeds)
    outcome = run_command(words, folder)
    own = command.outputs(path, folder / "out", outcome.code == 0)
    changed = [
        str(path.relative_to(out))
        for path in compare(before, snapshot(folder) | snapshot(seeds))
        if not own.intersection((path, *path.parents))
    ]
    fault = find_fault(outcome, changed)
    if not fault and outcome.code == 0 and mutation == OUTSIDE:
        fault = f"accepted a list that {OUTSIDE}"
    if fault:
        text = f"{fault}\n{mutation}\npython {' '.join(words)}\n\n{outcome.output}"
        (folder / "fault.txt").write_text(text, errors="backslashreplace")
    else:
        shutil.rmtree(folder)
    return Result(name, words[0].removeprefix("tools."), fault, outcome)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--campaign", choices=list(CAMPAIGNS), default="files")
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="the kind of all files")
    parser.add_argument("--case", type=int, help="run this case alone")
    options = parser.parse_args()
    kinds = list(CAMPAIGNS[options.campaign])
    if options.only and options.only not in kinds:
        parser.error(f"--only is one of {', '.join(kinds)}")
    return options


def main() -> None:
    options = read_options()
    kinds, out = CAMPAIGNS[options.campaign], options.out.absolute() / options.campaign
    # A forked process must not wait for threads that it does not have.
    torch.set_num_threads(1)
    # Imported once, and not by every forked process.
    for module in {command.module for kind in kinds.values() for command in kind.commands}:
        importlib.import_module(f"densefeed.{module}")
    seeds = out / "seeds"
    if options.campaign == "files" and not seeds.exists():
        make_seeds(seeds, run_command)
    # Else a campaign could pass because everything is refused.
    if options.case is None:
        check_undamaged(kinds, seeds, out)
    results = []
    for number in range(options.files) if options.case is None else [options.case]:
        results.append(result := run_case(number, options, seeds, out))
        if result.fault:
            print(f"{number:05d} {result.kind} {result.command}: {result.fault}", flush=True)
    print_summary(results)
    sys.exit(any(result.fault for result in results))


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
