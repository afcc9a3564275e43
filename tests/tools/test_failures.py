"""Commands with bad input and full disks: one sentence, exit code 2, no incomplete files."""

import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(command):
    """Run a command of the checkout in another folder.

    A file cannot grow above `limit` bytes, which stands for a full disk.
    """
    return lambda program, *words, **how: command(ROOT / program, *words, **how)


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
    done = run(
        "train.py",
        "nfnet_micro_ce",
        "--loader",
        "folder",
        "--data",
        folder,
        "--val",
        folder,
        "--out",
        out,
        "--epochs",
        1,
        "--batch",
        4,
        cwd=out.parent,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_a_full_disk_ends_every_command_in_one_sentence(folder, teacher, tmp_path, run):
    scenes = run(
        "tools/make_digit_scenes.py",
        "--out",
        "scenes",
        "--train",
        10,
        "--val",
        10,
        cwd=tmp_path,
        limit=500,
    )
    assert_refused(scenes, "scenes: ")
    pack = run(
        "tools/pack_dataset.py",
        "--data",
        folder,
        "--out",
        "x.beton",
        cwd=tmp_path,
        limit=2**23 + 5_000,
    )
    assert_refused(pack, "x.beton: ")
    # Half of the images fit. They are kept, and with space again the same command continues.
    assert re.search(r"x\.beton\.part keeps [1-9] of 11 images; run the same command", pack.stderr)
    assert sorted(os.listdir(tmp_path)) == ["x.beton.part", "x.beton.part.rows"]
    pack = run("tools/pack_dataset.py", "--data", folder, "--out", "x.beton", cwd=tmp_path)
    assert pack.returncode == 0, pack.stderr
    assert "of 11 images are packed already" in pack.stdout
    assert os.listdir(tmp_path) == ["x.beton"]
    (tmp_path / "x.beton").unlink()
    relabel = run(
        "tools/relabel_imagenet.py",
        "--data",
        folder,
        "--teacher",
        teacher,
        "--input-size",
        64,
        "--top-k",
        2,
        "--out",
        "maps.h5",
        cwd=tmp_path,
        limit=1_000,
    )
    assert_refused(relabel, "maps.h5")
    assert list(tmp_path.iterdir()) == []
    train = run(
        "train.py",
        "lvvit_micro_ce",
        "--loader",
        "folder",
        "--data",
        folder,
        "--val",
        folder,
        "--out",
        "run",
        "--epochs",
        1,
        "--batch",
        4,
        cwd=tmp_path,
        limit=200_000,
    )
    assert_refused(train, "run/checkpoints/step-00000003.pt: the file grew past the limit")
    assert not (tmp_path / "run" / "last.pt").exists()
    assert not list((tmp_path / "run").glob("*.part"))


def test_places_that_cannot_be_written_are_refused(folder, tmp_path, run):
    (tmp_path / "file").write_text("")
    done = run("tools/pack_dataset.py", "--data", folder, "--out", "file/x.beton", cwd=tmp_path)
    assert_refused(done, "file: a file stands where a folder is needed")
    if os.geteuid():
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        assert_refused(
            run("tools/pack_dataset.py", "--data", folder, "--out", "closed/x.beton", cwd=tmp_path),
            "no permission",
        )


@pytest.mark.parametrize(
    ("teacher_words", "fragments"),
    [
        (["no_such_model"], ["no_such_model is neither a file nor a timm model"]),
        (["nowhere.pt"], ["nowhere.pt: there is no such checkpoint"]),
        (["text.pt"], ["text.pt is no checkpoint that loads safely"]),
        (["evil.pt"], ["evil.pt is no checkpoint that loads safely"]),
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
    done = run(
        "tools/relabel_imagenet.py",
        "--data",
        folder,
        "--teacher",
        *teacher_words,
        "--out",
        "maps.h5",
        cwd=tmp_path,
    )
    assert_refused(done, *fragments)
    assert not (tmp_path / "maps.h5").exists()


def test_an_unreadable_image_stops_the_labeling_by_name(folder, teacher, tmp_path, run):
    root = shutil.copytree(folder, tmp_path / "broken")
    victim = sorted((root / "train").glob("*/*.jpg"))[5]
    victim.write_bytes(victim.read_bytes()[:150])
    done = run(
        "tools/relabel_imagenet.py",
        "--data",
        root,
        "--teacher",
        teacher,
        "--input-size",
        64,
        "--top-k",
        2,
        "--batch",
        2,
        "--out",
        "maps.h5",
        cwd=tmp_path,
    )
    assert_refused(done, victim.name, "cannot be decoded", "replace or remove")
    assert not (tmp_path / "maps.h5").exists()


def test_empty_and_missing_folders_are_refused(tmp_path, run):
    (tmp_path / "empty").mkdir()
    assert_refused(
        run("tools/pack_dataset.py", "--data", "empty", "--out", "x.beton", cwd=tmp_path),
        "empty",
        "no images",
    )
    assert_refused(
        run("tools/pack_dataset.py", "--data", "nowhere", "--out", "x.beton", cwd=tmp_path),
        "nowhere is not a folder",
    )
    assert_refused(run("tools/report.py", "nowhere", cwd=tmp_path), "nowhere is not a run folder")


def test_truncated_files_stop_a_training_before_it_starts(folder, maps, tmp_path, run):
    done = run(
        "tools/pack_dataset.py", "--data", folder, "--maps", maps, "--out", "x.beton", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    os.truncate(tmp_path / "x.beton", 9_000_000)
    words = ["--val", folder, "--out", "run", "--epochs", 1]
    assert_refused(
        run(
            "train.py",
            "lvvit_micro_ce",
            "--loader",
            "ffcv",
            "--data",
            "x.beton",
            *words,
            cwd=tmp_path,
        ),
        "x.beton is cut or damaged",
        "pack or copy",
    )
    shutil.copy(maps, tmp_path / "maps.h5")
    os.truncate(tmp_path / "maps.h5", 2_000)
    done = run(
        "train.py",
        "lvvit_micro_relabel",
        "--loader",
        "folder",
        "--data",
        folder,
        "--labels",
        "maps.h5",
        *words,
        cwd=tmp_path,
    )
    assert_refused(done, "maps.h5 is not a whole HDF5 file", "relabel")
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_other_classes_is_refused(folder, teacher, tmp_path, run):
    root = shutil.copytree(folder, tmp_path / "others")
    (root / "train" / "dog").rename(root / "train" / "wolf")
    done = run(
        "tools/relabel_imagenet.py",
        "--data",
        root,
        "--teacher",
        teacher,
        "--top-k",
        2,
        "--out",
        "maps.h5",
        cwd=tmp_path,
    )
    assert_refused(done, "was trained on other classes than")
    assert not list(tmp_path.glob("maps.h5*"))
