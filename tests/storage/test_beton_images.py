"""Labeling and packing the images of .beton files."""

import shutil
from contextlib import closing
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

import densefeed.train as training
from densefeed import native
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import FIELD, HEADER, NOTES, notes_place
from densefeed.storage.beton_images import BetonImages, open_images
from densefeed.storage.images import Images, SplitOptions
from densefeed.storage.indexed_jpeg import find_index_damage, transcode
from densefeed.storage.maintenance import has_other_rows
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import with_options
from densefeed.tools.audit import AuditOptions
from densefeed.tools.audit import main as audit
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack
from densefeed.tools.relabel_imagenet import Labeling
from densefeed.tools.relabel_imagenet import main as label

from ..fixtures import photograph


def forget_notes(path, out):
    """Copy a .beton without what FFCV does not write: where the notes are."""
    content = bytearray(path.read_bytes())
    (fields,) = np.frombuffer(content, HEADER, 1)["num_fields"]
    for number in range(fields):
        at = notes_place(HEADER.itemsize + number * FIELD.itemsize)
        content[at : at + NOTES.itemsize] = bytes(NOTES.itemsize)
    out.write_bytes(content)
    return out


@pytest.fixture(scope="module")
def teacher(micro, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "teacher"
    training.train(micro(out, epochs=1, objective="ce", mixtoken=False))
    return out


@pytest.fixture(scope="module")
def bare(folder, tmp_path_factory):
    """The folder as files without maps."""
    root = tmp_path_factory.mktemp("bare")
    for form in ("jpeg", "planes"):
        pack(Packing(data=folder, out=root / f"{form}.beton", form=form))
    forget_notes(root / "jpeg.beton", root / "stock.beton")
    return {form: root / f"{form}.beton" for form in ("jpeg", "planes", "stock")}


@pytest.fixture(scope="module")
def labeled(bare, folder, teacher, tmp_path_factory):
    """Stores of the folder and of the files, by one teacher."""
    root, stores = tmp_path_factory.mktemp("labeled"), {}
    for name, data in {"folder": folder, **bare}.items():
        stores[name] = root / f"{name}.h5"
        # The numbers of a stock file's classes are not the teacher's names.
        names = root / "map.json"
        names.write_text('{"cat": "0", "dog": "1"}')
        maps = (str(names),) if name == "stock" else ()
        label(
            Labeling(
                data=data,
                teacher=(str(teacher),),
                class_map=maps,
                input_size=(32,),
                out=stores[name],
                device="cpu",
            )
        )
    return stores


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["jpeg", "planes", "stock"])
def test_outside_a_packed_file_is_labeled_like_its_images(labeled, bare, folder, form):
    with closing(FfcvSource(bare[form], labeled[form])) as source:
        ids = np.arange(11)
        ours, theirs = source.maps(ids), ScoreMapStore(labeled["folder"]).rows(ids)
        np.testing.assert_array_equal(source.labels, Images(folder).labels)
    if form == "jpeg":
        np.testing.assert_array_equal(ours.logit, theirs.logit)
    elif form == "planes":
        # Pictures of JPEGs may be made from a smaller decoding, and those of PNG never are.
        np.testing.assert_allclose(ours.lse, theirs.lse, atol=0.05)


def test_outside_a_packed_file_trains_with_the_maps_that_were_labeled_from_it(
    labeled, bare, packed, micro, tmp_path
):
    config = micro(tmp_path / "run", epochs=1, score_maps=labeled["jpeg"])
    config = with_options(config, loader="auto", data=bare["jpeg"], val=packed[1])
    assert training.train(config)["skipped"] == 0
    # The same images in another form.
    FfcvSource(bare["planes"], labeled["jpeg"]).close()


def test_outside_maps_of_another_packed_file_are_refused(labeled, folder, bare, tmp_path):
    """It has as many images, with the same labels."""
    other = shutil.copytree(folder, tmp_path / "other")
    image = next((other / "train/cat").iterdir())
    image.rename(image.with_name("zebra.jpg"))
    pack(Packing(data=other, out=tmp_path / "other.beton"))
    forget_notes(tmp_path / "other.beton", tmp_path / "stock.beton")
    for path in (tmp_path / "other.beton", tmp_path / "stock.beton"):
        for store in (labeled["jpeg"], labeled["stock"]):
            with pytest.raises(UserError, match="maps of other images than the 11 of"):
                FfcvSource(path, store)
    with pytest.raises(UserError, match="fingerprints differ"):
        FfcvSource(tmp_path / "other.beton", labeled["folder"])


def test_outside_files_that_leave_out_other_images_have_other_names(folder, tmp_path):
    names = []
    for number in (0, 2):
        data = shutil.copytree(folder, tmp_path / f"{number}")
        (data / f"train/cat/{number:03d}.jpg").write_bytes(b"damaged")
        out = tmp_path / f"{number}.beton"
        pack(Packing(data=data, out=out, on_bad_sample="skip"))
        names.append(BetonImages(out).paths)
        assert len(names[-1]) == 10
    assert set(names[0]).isdisjoint(names[1])


def test_outside_a_packed_file_is_audited_and_packed_again(labeled, bare, tmp_path):
    audit(AuditOptions(maps=labeled["jpeg"], data=bare["jpeg"], out=tmp_path / "audit.html"))
    out = tmp_path / "with-maps.beton"
    pack(Packing(data=bare["jpeg"], maps=labeled["jpeg"], out=out))
    ids = np.arange(11)
    with closing(FfcvSource(out)) as source, closing(Beton(bare["jpeg"])) as beton:
        want = ScoreMapStore(labeled["jpeg"]).rows(ids)
        np.testing.assert_array_equal(source.maps(ids).logit, want.logit)
        assert all(source._beton.image(n) == beton.image(n) for n in range(11))


def test_outside_a_folder_of_shards_of_a_packed_file_is_sound(bare, teacher, tmp_path):
    out = tmp_path / "maps"
    label(
        Labeling(
            data=bare["jpeg"], teacher=(str(teacher),), input_size=(32,), out=out, shard_images=4
        )
    )
    assert has_other_rows(ScoreMapStore(out)) is False


def test_outside_damage_of_an_indexed_jpeg_is_found_by_all_that_read_it(folder, teacher, tmp_path):
    """Not packed again with new checksums; libjpeg would decode most of it without a word."""
    path = tmp_path / "damaged.beton"
    pack(Packing(data=folder, out=path))
    with closing(Beton(path)) as beton:
        at, size = int(beton.images.offset[3]), int(beton.images.size[3])
    content = bytearray(path.read_bytes())
    content[at + size - 20] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match="its compressed rows do not match their checksum"):
        BetonImages(path).read(3)
    with closing(FfcvSource(path)) as source, pytest.raises(UserError, match="compressed rows"):
        source.image(3)
    with pytest.raises(UserError, match="its compressed rows do not match"):
        pack(Packing(data=path, out=tmp_path / "again.beton"))
    with pytest.raises(UserError, match="its compressed rows do not match"):
        label(Labeling(data=path, teacher=(str(teacher),), input_size=(32,), out=tmp_path / "m.h5"))


@pytest.mark.parametrize("place", ["header", "rows"])
def test_a_flipped_bit_of_an_indexed_jpeg_is_found_as_by_the_native_decoder(folder, place):
    files = [transcode(path.read_bytes()) for path in sorted((folder / "train").glob("*/*.jpg"))]
    rng = np.random.default_rng(0)
    for file in files:
        assert find_index_damage(file) == ""
        header = int.from_bytes(file[12:16], "little")
        low, high = (12, header) if place == "header" else (header, len(file) - 2)
        changed = bytearray(file)
        changed[int(rng.integers(low, high))] ^= 1 << int(rng.integers(8))
        assert place[:6] in find_index_damage(bytes(changed))
        with pytest.raises(native.JpegError):
            native.check(bytes(changed), *native.probe(file))
        assert find_index_damage(file[: header - 1]) == "its header does not match its checksum"
        # More rows than the header has, with a checksum that matches.
        rest = b"\xff\xff" + file[22:header]
        head = file[:16] + crc32(rest, crc32(file[:16])).to_bytes(4, "little") + rest
        assert "header" in find_index_damage(head + file[header:])
        assert find_index_damage(file[:20]) == "its header is too short"
    assert find_index_damage(b"") == find_index_damage(b"\xff\xd8\xff\xe0") == ""


def test_outside_raw_pixels_and_sizes_of_packed_images(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(4):
        path = tmp_path / f"data/{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(rng, 20, 30 + number).save(path)
    pack(Packing(data=tmp_path / "data", out=tmp_path / "x.beton"))
    packed, images = BetonImages(tmp_path / "x.beton"), Images(tmp_path / "data")
    for number in range(4):
        with packed.open(number) as ours, images.open(number) as theirs:
            np.testing.assert_array_equal(Image.open(ours), Image.open(theirs))
        assert packed.size(number) == images.size(number)
    several = BetonImages(tmp_path / "*.beton")
    assert (several.labels.tolist(), several.class_names) == ([0, 0, 1, 1], ["0", "1"])


def test_outside_missing_files_of_a_number_are_named(packed, tmp_path):
    """A part of an interrupted copy was trained on. A pattern may choose some that are there."""
    first, second, third = (tmp_path / f"train-0000{n}-of-00003.beton" for n in range(3))
    for path in (first, third, tmp_path / "val-00000-of-00002.beton"):
        path.symlink_to(packed[1])
    pattern = tmp_path / "train-*.beton"
    with pytest.raises(
        UserError, match=f"^{tmp_path} lacks 1 of 3 .beton files: {second.name}; copy them there"
    ):
        BetonImages(pattern)
    # A file that is named is wanted.
    one = len(BetonImages(third))
    second.symlink_to(packed[1])
    assert len(BetonImages(pattern)) == 3 * one
    assert len(BetonImages(tmp_path / "train-0000[12]*.beton")) == 2 * one


@pytest.mark.parametrize(
    ("dataset", "fraction", "message"),
    [("cifar10", 0.0, "--dataset is for folders"), ("", 0.2, "--val-fraction is for folders")],
)
def test_outside_packed_files_are_neither_divided_nor_searched(packed, dataset, fraction, message):
    with pytest.raises(UserError, match=message):
        open_images(packed[0], dataset, "train", SplitOptions(val_fraction=fraction))
    with pytest.raises(UserError, match="not labeled or packed; copy it to a disk"):
        open_images(ObjectURL("s3://bucket/x.beton"), "", "train")
    with pytest.raises(UserError, match="there is no such file"):
        open_images(packed[0].with_name("y.beton"), "", "train")
