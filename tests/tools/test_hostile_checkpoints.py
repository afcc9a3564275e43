"""Checkpoints from anywhere: altered dictionaries, flipped bytes, bombs.

Every command that loads one succeeds or ends in one sentence, quickly, in little memory, and runs
no code from it. Each attempt is a forked process with limits.
"""

import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import traceback
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import export, load_teacher
from densefeed.training.run_checkpoints import sha256

SECONDS, BYTES = 20, 3 * 2**30
# Attempts of the short form; SOAK_FILES=1000 for more.
FIRST = int(os.environ.get("SOAK_FIRST", 0))
COUNT = int(os.environ.get("SOAK_FILES", 16))


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> tuple[list, dict]:
    items, table = [], {}
    items.append(items)
    table["self"] = table
    return items, table


def values() -> list:
    return [
        *(None, True, -1, 0, 3, 10**9, 2**62, 1.5, -0.5, math.nan, math.inf, "", "x", "\x1b[2J"),
        *("hf-hub:timm/resnet18", "local-dir:/tmp", "../../etc", "resnet18.a/../b", "y" * 10**6),
        *([], {}, (), [1, 2], [0.5, 0.5], [0.5] * 3, [0.0] * 3, [math.nan] * 3, [1] * 10**5),
        *(nested(3), nested(150), *cyclic(), {"a": {"b": {}}}, {1: 2}, {(1, 2): 3}, {"x"}),
        *(torch.zeros(()), torch.full((3,), math.nan), torch.zeros(1).expand(2**34)),
        *(torch.zeros(2, dtype=torch.complex64), torch.zeros(0), torch.arange(5)),
    ]


# Of the arguments of a recipe.
ARGUMENTS = {
    **{"pretrained": True, "features_only": True, "act_layer": "gelu", "depth": 10**9},
    **{"embed_dim": 10**7, "num_classes": 10**9, "img_size": 10**6, "patch_size": 1},
    **{"num_heads": 0, "mlp_ratio": math.inf, "depths": [1000] * 64, "cache_dir": "cache"},
    **{"stem": [[3, 1]] * 60, "drop_path_rate": math.nan, "pretrained_cfg": {"file": "x.pt"}},
    **{"pretrained_cfg_overlay": {"url": "http://localhost/x"}, "scriptable": "yes"},
    **{"out_indices": 5, "norm_groups": -3, "global_pool": "x", "in_chans": 2**19},
}


def places(value: object, depth: int = 3) -> list[tuple]:
    """Paths of keys to all entries of nested dictionaries; a few where there are many."""
    if not isinstance(value, dict) or not depth:
        return []
    keys = list(value)
    keys = keys if len(keys) < 30 else random.Random(len(keys)).sample(keys, 4)
    return [
        path
        for key in keys
        for path in ((key,), *((key, *p) for p in places(value[key], depth - 1)))
    ]


def altered(checkpoint: dict, rng: random.Random, sentinel: Path) -> dict:
    """Return a checkpoint with one entry removed, replaced or added."""
    copied = pickle.loads(pickle.dumps(checkpoint))
    kind = rng.random()
    if kind < 0.25:
        name, value = rng.choice([*ARGUMENTS.items(), ("checkpoint_path", str(sentinel) + ".pt")])
        copied["recipe"]["kwargs"][name] = value
        return copied
    *parents, key = rng.choice(places(copied))
    target = copied
    for parent in parents:
        target = target[parent]
    if kind < 0.4:
        del target[key]
    elif kind < 0.45:
        target[key] = Trap(sentinel)
    else:
        target[key] = rng.choice(values())
    return copied


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Flip bytes of a file, half of the time in its pickle with the right CRC."""
    changed = bytearray(content)
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 5, 100))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed[: rng.choice((None, rng.randrange(len(changed))))])
    new = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(new, "w") as file:
        for name in old.namelist():
            member = bytearray(old.read(name))
            if name.endswith("data.pkl"):
                for _ in range(rng.choice((1, 3, 20))):
                    member[rng.randrange(len(member))] ^= 1 << rng.randrange(8)
            file.writestr(name, bytes(member))
    return new.getvalue()


def attempt(action) -> tuple[int, str]:
    """Run `action` in a limited process; return its status (2 for a UserError) and its error."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        status = 1
        try:
            # Processor time, and 15 times as much on a busy machine.
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(15 * SECONDS)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            torch.set_num_threads(1)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
            action()
            status = 0
        except UserError as error:
            text = str(error)
            status = 2 if len(text) < 2000 and text.isprintable() else 3
            os.write(writing, text[:3000].encode())
        except BaseException:
            os.write(writing, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text


@pytest.fixture(scope="module")
def run(micro, tmp_path_factory):
    """A finished run, and the config that resumes it."""
    out = tmp_path_factory.mktemp("hostile") / "run"
    config = micro(out, epochs=1, resume="auto")
    training.train(config)
    return config


def replace_newest(config, out: Path, content: bytes):
    """Copy a run with other bytes as its newest checkpoint, and their hash in its manifest."""
    shutil.copytree(config.run.out, out, symlinks=True)
    newest = out / "checkpoints" / os.readlink(out / "last.pt").rpartition("/")[2]
    newest.write_bytes(content)
    manifest = newest.with_name("manifest.json")
    entries = json.loads(manifest.read_text())
    manifest.write_text(
        json.dumps(
            [e | {"sha256": sha256(newest)} if e["file"] == newest.name else e for e in entries]
        )
    )
    return with_options(config, out=out)


def make_actions(out: Path, config) -> dict:
    """Commands that load the newest checkpoint of the run in `out`, by name."""
    new = with_options(config, out=out / "new", init=out / "last.pt", resume="never")
    return {
        "export": lambda: export.main(export.Export(checkpoint=out, out=out / "exported")),
        "teacher": lambda: load_teacher.load_network(str(out), "", 32),
        "resume": lambda: training.train(config),
        "init": lambda: training.train(new),
    }


def test_a_checkpoint_as_written_is_loaded_by_every_command(run, tmp_path):
    """Else the test below could pass because everything is refused."""
    content = (run.run.out / "last.pt").read_bytes()
    config = replace_newest(run, tmp_path / "run", content)
    for name, action in make_actions(tmp_path / "run", config).items():
        assert attempt(action) == (0, ""), name


def test_altered_checkpoints_end_in_one_sentence(run, tmp_path):
    original = checkpoints.load(run.run.out / "last.pt")
    content = (run.run.out / "last.pt").read_bytes()
    sentinel, seen = tmp_path / "sprung", set()
    torch.save(Trap(sentinel), f"{sentinel}.pt")
    for number in range(FIRST, FIRST + COUNT):
        rng = random.Random(number)
        file = BytesIO()
        torch.save(altered(original, rng, sentinel), file)
        changed = file.getvalue() if rng.random() < 0.7 else flipped(content, rng)
        out = tmp_path / str(number)
        config = replace_newest(run, out, changed)
        actions = make_actions(out, config)
        for name in rng.sample(list(actions), 2):
            status, text = attempt(actions[name])
            assert status in (0, 2), f"file {number}, {name}: status {status}\n{text}"
            assert (out / "exported").exists() <= (name == "export" and not status)
            assert not sentinel.exists(), f"file {number}, {name} ran code"
            shutil.rmtree(out / "exported", ignore_errors=True)
            seen.add((name, status))
        shutil.rmtree(out)
    assert {status for _, status in seen} == {0, 2}
