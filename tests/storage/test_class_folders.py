"""Class folders that are listed one by one: the images of one listing, and its shards."""

import json
import random
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from densefeed.storage import class_folders, object_images
from densefeed.storage.class_folders import ClassFolders, order_folder
from densefeed.storage.folder_plan import FoldersPlan, folder_key
from densefeed.storage.images import Images
from densefeed.storage.object_images import read_objects
from densefeed.storage.shard_plan import SIZED_FILES, plan_shard, read_plan, split_images
from densefeed.storage.store_file import StoreHeader
from densefeed.system.errors import UserError
from densefeed.system.object_folder import ObjectFolder
from densefeed.system.object_store import ObjectURL

ROOT = ObjectURL("s3://bucket/photos")
Listing = dict[str, int]


@contextmanager
def show(listing: Listing):
    """Let object storage have these objects below ROOT: bytes by name."""

    def list_objects(root: ObjectURL) -> Listing:
        start = f"{root.removeprefix(ROOT)}/".lstrip("/")
        below = sorted(name for name in listing if name.startswith(start))
        return {name[len(start) :]: listing[name] for name in below}

    def list_folder(root: ObjectURL) -> tuple[list[dict[str, str]], list[str]]:
        names = list_objects(root)
        folders = {name.partition("/")[0] for name in names if "/" in name}
        return [{"path": f"photos/{n}"} for n in names if "/" not in n], sorted(folders)

    with (
        patch.object(object_images, "list_objects", list_objects),
        patch.object(object_images, "list_folder", list_folder),
        patch.object(class_folders, "list_folder", list_folder),
    ):
        yield


def make_header(names: list[str]) -> StoreHeader:
    return StoreHeader(
        side=2,
        top_k=1,
        num_classes=len(names),
        absent="tail",
        teacher="t",
        input_size=32,
        geometry="squash",
        fingerprint="",
        class_names=tuple(names),
    )


WORDS = st.text("aBbZ019-_ .", min_size=1, max_size=4).map(lambda text: f"n{text}n")
FILES = st.dictionaries(
    st.builds("n{}{}".format, st.text("aB01-.", max_size=5), st.sampled_from([".jpg", ".PNG"])),
    st.integers(1, 10**6),
    min_size=1,
    max_size=30,
)
TREES = st.dictionaries(WORDS, FILES, min_size=1, max_size=6)


@settings(max_examples=50)
@given(TREES, st.integers(1, 12), st.randoms(use_true_random=False))
def test_folders_give_images_and_shards_of_the_whole_listing(tmp_path_factory, tree, size, order):
    """In any order of the folders, by any worker."""
    keys = [tuple(order_folder(name)) for name in tree]
    assume(len(set(keys)) == len(keys))
    listing = {f"{folder}/{name}": n for folder, files in tree.items() for name, n in files.items()}
    listing |= {f"{folder}/notes.txt": 1 for folder in list(tree)[:1]}
    with show(listing):
        whole, folders = Images.from_found(ROOT, read_objects(ROOT, "train")), ClassFolders(ROOT)
        parts = [folders.read(number) for number in range(len(folders))]
    assert folders.class_names == whole.class_names
    assert [path for part in parts for path in part.paths] == whole.paths
    assert [n for part in parts for n in part.labels.tolist()] == whole.labels.tolist()

    header, first, want = make_header(whole.class_names), 0, []
    for part in parts:
        for rows in split_images(part.paths, size):
            there = range(first + rows.start, first + rows.stop)
            want.append(plan_shard(header, rows, whole.fingerprint(there, SIZED_FILES)))
        first += len(part)
    objects = ObjectFolder(tmp_path_factory.mktemp("store"))
    workers = [FoldersPlan(header, size, [None] * len(folders)) for _ in range(2)]
    for worker in workers:
        worker.share(objects)
        for number in order.sample(range(len(folders)), len(folders)):
            assert worker.update(objects, number, parts[number])
    third = FoldersPlan(header, size, [None] * len(folders))
    third.load(objects, list(range(len(folders))))
    for worker in (*workers, third):
        assert worker.shards == want
        assert worker.is_stored(objects)
    stored = read_plan(objects)
    assert stored.shards == {shard.name: len(shard.rows) for shard in want}
    assert (stored.folders, stored.unlisted) == (len(folders), 0)


def test_a_changed_listing_replaces_the_plan_of_its_folder_alone(tmp_path, capsys):
    listing = {f"{name}/{number:03d}.jpg": 9 for name in ("cat", "dog") for number in range(40)}
    objects, header = ObjectFolder(tmp_path), make_header(["cat", "dog"])
    early, late = (FoldersPlan(header, 8, [None, None]) for _ in range(2))
    with show(listing):
        folders = ClassFolders(ROOT)
        for number in range(2):
            assert early.update(objects, number, folders.read(number))
    late.load(objects, [0, 1])
    with show({name: size for name, size in listing.items() if name != "dog/020.jpg"}):
        assert late.update(objects, 0, folders.read(0))
        assert not late.update(objects, 1, folders.read(1))
    assert "images have changed" in capsys.readouterr().out
    assert early.parts[0] == late.parts[0]
    changed = {shard.name for shard in late.parts[1]} - {shard.name for shard in early.parts[1]}
    assert 1 <= len(changed) <= 3
    assert late.is_stored(objects)
    assert not early.is_stored(objects)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "photos holds 0 folders; it should hold one folder of images per class"),
        (["x.jpg", "cat/1.jpg"], "photos/x.jpg is in no class folder; move it into one, or label"),
        (["cat/1.jpg", "Cat/1.jpg"], "the folders Cat and cat differ only in case or zeros"),
        (["cat/a/1.jpg", "cat/1.jpg"], "cat/a/1.jpg is in a folder below cat, which is another"),
        (["cat/notes.txt"], "photos/cat holds no images; remove it, or label with --listing whole"),
        (["test/1.jpg"], "holds test but no folder 'train'"),
    ],
)
def test_what_cannot_be_listed_by_folders_is_one_sentence(names, said):
    with show(dict.fromkeys(names, 1)), pytest.raises(UserError, match=said):
        ClassFolders(ROOT).read(0)


def test_a_damaged_plan_of_a_folder_is_one_sentence(tmp_path):
    objects, plan = ObjectFolder(tmp_path), FoldersPlan(make_header(["cat"]), 8, [None])
    plan.share(objects)
    for content in (b"", b"[]", b"{}", json.dumps({"shards": [1]}).encode()):
        objects.replace(folder_key(0), content)
        for read in (lambda: plan.load(objects, [0]), lambda: read_plan(objects)):
            with pytest.raises(UserError, match=r"00000.json is damaged; remove it and run"):
                read()


def test_folders_are_in_the_order_of_their_paths():
    """By timm's key of whole paths, for names that share beginnings."""
    draws = random.Random(0)
    names = {"n" + "".join(draws.choices("ab-/01 ."[:3] + "01 .", k=4)) for _ in range(300)}
    unique = {tuple(order_folder(name)): name for name in names}.values()
    paths = [f"{name}/{file}" for name in unique for file in ("1.jpg", "a.jpg", "-.jpg", "0b.png")]
    paths.sort(key=object_images.natural_key)
    order = list(dict.fromkeys(path.partition("/")[0] for path in paths))
    assert order == sorted(unique, key=order_folder)
