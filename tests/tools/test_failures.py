"""Commands with bad input and full disks: one sentence, exit code 2, no incomplete files."""

import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(command):
    """Run a command of the checkout in another folder, `text` split at spaces, then `words`.

    A file cannot grow above `limit` bytes, which stands for a full disk.
    """

    def run(text, *words, **how):
        program, *options = text.split()
        return command(ROOT / program, *options, *words, **how)

    return run


def assert_refused(done, *fragments):
    """Check that the command printed one sentence that contains all `fragments`."""
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for words in fragments:
        assert words in errors[0], errors[0]


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory, run):
    """A run folder of one epoch."""
    out = tmp_path_factory.mktemp("runs") / "teacher"
    text = "train.py nfnet_micro_ce --loader folder --epochs 1 --batch 4 --data"
    done = run(text, folder, "--val", folder, "--out", out, cwd=out.parent)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_a_full_disk_ends_every_command_in_one_sentence(folder, teacher, tmp_path, run):
    text = "tools/make_digit_scenes.py --out scenes --train 10 --val 10"
    scenes = run(text, cwd=tmp_path, limit=500)
    assert_refused(scenes, "scenes: ")
    text = "tools/pack_dataset.py --out x.beton --data"
    pack = run(text, folder, cwd=tmp_path, limit=2**23 + 5_000)
    assert_refused(pack, "x.beton: ")
    # Half of the images fit. They are kept, and with space again the same command continues.
    assert re.search(r"x\.beton\.part keeps [1-9] of 11 images; run the same command", pack.stderr)
    assert sorted(os.listdir(tmp_path)) == ["x.beton.part", "x.beton.part.rows"]
    pack = run(text, folder, cwd=tmp_path)
    assert pack.returncode == 0, pack.stderr
    assert "of 11 images are packed already" in pack.stdout
    assert os.listdir(tmp_path) == ["x.beton"]
    (tmp_path / "x.beton").unlink()
    text = "tools/relabel_imagenet.py --input-size 64 --top-k 2 --out maps.h5 --data"
    relabel = run(text, folder, "--teacher", teacher, cwd=tmp_path, limit=1_000)
    assert_refused(relabel, "maps.h5")
    assert os.listdir(tmp_path) == ["maps.h5.shards"]
    relabel = run(text, folder, "--teacher", teacher, cwd=tmp_path)
    assert relabel.returncode == 0, relabel.stderr
    assert os.listdir(tmp_path) == ["maps.h5"]
    (tmp_path / "maps.h5").unlink()
    text = "train.py lvvit_micro_ce --loader folder --out run --epochs 1 --batch 4 --data"
    train = run(text, folder, "--val", folder, cwd=tmp_path, limit=200_000)
    assert_refused(train, "run/checkpoints/step-00000003.pt: the file grew past the limit")
    assert not (tmp_path / "run" / "last.pt").exists()
    assert not list((tmp_path / "run").glob("*.part"))


def test_places_that_cannot_be_written_are_refused(folder, tmp_path, run):
    (tmp_path / "file").write_text("")
    done = run("tools/pack_dataset.py --out file/x.beton --data", folder, cwd=tmp_path)
    assert_refused(done, "file: a file stands where a folder is needed")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        done = run("tools/pack_dataset.py --out closed/x.beton --data", folder, cwd=tmp_path)
        assert_refused(done, "no permission")


@pytest.mark.parametrize(
    ("teacher_words", "fragments"),
    [
        (["no_such_model"], ["no_such_model is neither a file nor a timm model"]),
        (["nowhere.pt"], ["nowhere.pt: there is no such file"]),
        (["text.pt"], ["text.pt is not a checkpoint that loads safely"]),
        (["evil.pt"], ["evil.pt is not a checkpoint that loads safely"]),
        (["list.pt"], ["list.pt holds a list"]),
    ],
)
def test_invalid_teachers_are_refused(folder, tmp_path, teacher_words, fragments, run):
    (tmp_path / "text.pt").write_text("hello")
    import torch

    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(
        {"model": {}, "run": print}, tmp_path / "evil.pt"
    )  # a pickle that refers to a function
    text = "tools/relabel_imagenet.py --out maps.h5 --data"
    done = run(text, folder, "--teacher", *teacher_words, cwd=tmp_path)
    assert_refused(done, *fragments)
    assert not (tmp_path / "maps.h5").exists()


def test_an_unreadable_image_stops_the_labeling_by_name(folder, teacher, tmp_path, run):
    root = shutil.copytree(folder, tmp_path / "broken")
    victim = sorted((root / "train").glob("*/*.jpg"))[5]
    victim.write_bytes(victim.read_bytes()[:150])
    text = "tools/relabel_imagenet.py --input-size 64 --top-k 2 --batch 2 --out maps.h5 --data"
    done = run(text, root, "--teacher", teacher, cwd=tmp_path)
    assert_refused(done, victim.name, "cannot be decoded", "replace or remove")
    assert not (tmp_path / "maps.h5").exists()


@pytest.mark.slow
def test_empty_and_missing_folders_are_refused(tmp_path, run):
    (tmp_path / "empty").mkdir()
    text = "tools/pack_dataset.py --out x.beton --data"
    assert_refused(run(text, "empty", cwd=tmp_path), "empty", "no images")
    assert_refused(run(text, "nowhere", cwd=tmp_path), "nowhere is not a folder")
    done = run("tools/report.py nowhere", cwd=tmp_path)
    assert_refused(done, "nowhere is not a run folder")


@pytest.mark.slow
def test_truncated_files_stop_a_training_before_it_starts(folder, maps, tmp_path, run):
    text = "tools/pack_dataset.py --out x.beton --data"
    done = run(text, folder, "--maps", maps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    os.truncate(tmp_path / "x.beton", 9_000_000)
    text = "train.py lvvit_micro_ce --loader ffcv --data x.beton --out run --epochs 1 --val"
    done = run(text, folder, cwd=tmp_path)
    assert_refused(done, "x.beton is truncated or corrupt", "pack or copy")
    shutil.copy(maps, tmp_path / "maps.h5")
    os.truncate(tmp_path / "maps.h5", 2_000)
    text = "train.py lvvit_micro_relabel --loader folder --score-maps maps.h5 --out run --data"
    done = run(text, folder, "--val", folder, "--epochs", 1, cwd=tmp_path)
    assert_refused(done, "maps.h5 is not a complete file of score maps", "relabel")
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_other_classes_is_refused(folder, teacher, tmp_path, run):
    root = shutil.copytree(folder, tmp_path / "others")
    (root / "train" / "dog").rename(root / "train" / "wolf")
    text = "tools/relabel_imagenet.py --top-k 2 --out maps.h5 --data"
    done = run(text, root, "--teacher", teacher, cwd=tmp_path)
    assert_refused(done, "was trained on other classes than")
    assert not list(tmp_path.glob("maps.h5*"))
