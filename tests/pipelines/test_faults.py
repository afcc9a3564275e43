"""Bad input through all loaders, by our decoder and by DALI: read correctly, or refused with the
file's name; never a black image, a hang or a crash.

A crop is correct or refused. Damage outside the crop can remain undetected, since it is never read;
`densefeed beton verify` checks everything. A JPEG without our index has no checksum, so there
damage is detected only where it breaks the entropy code.
"""

import base64
import io
import os
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.resident import ResidentMaps
from densefeed.storage import indexed_jpeg
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import map_arrays, map_fields
from densefeed.storage.beton_verify import verify
from densefeed.storage.beton_writer import BetonWriter, Sample
from densefeed.storage.images import Images, crop_resize, decode
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

from ..jpeg_files import header_jpeg, loader_class
from ..stores import BAD_VALUES, write_store

VICTIM, SIDE = 3, 48
DECODER = "native"
DALI = pytest.param("dali", marks=[pytest.mark.dali, pytest.mark.slow])


@pytest.fixture(params=["native", DALI], autouse=True)
def decoder(request, monkeypatch):
    """Run every test of this file with both decoders."""
    monkeypatch.setitem(globals(), "DECODER", request.param)


# A 20 x 20 JPEG from jpegtran -arithmetic: Pillow reads such files but does not write them.
ARITHMETIC = base64.b64decode(
    "/9j/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09P"
    "T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//yQARCAAUABQDASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwDR"
    "DKBUKX9jNIHC5CT2I+EK87Tv7VNH7uQkHx0lHI06rz9JXSPZaDIJLfpYpwgafwkjCA5fRqr7feNOMJUIYlxmHnvDTuuCRcf2ufxyxVGbYROq1ZNfSATIBvEBEa/8"
    "eEyt1RvqsIf/2Q=="
)


def smooth(height, width, mode="RGB", seed=0):
    coarse = np.random.default_rng(seed).integers(
        0, 256, (2 + height // 16, 2 + width // 16, 3), dtype=np.uint8
    )
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def saved(image, kind="JPEG", **options):
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 90} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def ycck():
    """Make a CMYK JPEG with Pillow and change its Adobe marker to YCCK."""
    encoded = bytearray(saved(smooth(60, 70, "CMYK")))
    encoded[encoded.index(b"Adobe") + 11] = 2
    return bytes(encoded)


def turned():
    exif = Image.Exif()
    # Orientation "rotate by 90 degrees": ignored by the teacher of the maps and by every loader.
    exif[0x0112] = 6
    return saved(smooth(50, 80), exif=exif)


# All are named .jpg, whatever their format, and no crop is larger than twice the output's side.
READABLE = {
    "CMYK": lambda: saved(smooth(60, 70, "CMYK")),
    "YCCK": ycck,
    "gray": lambda: saved(smooth(60, 70, "L")),
    "progressive": lambda: saved(smooth(60, 70), progressive=True),
    "4:4:4": lambda: saved(smooth(60, 70), subsampling=0),
    "4:2:2": lambda: saved(smooth(60, 70), subsampling=1),
    "restart markers": lambda: saved(smooth(60, 70), restart_marker_rows=1),
    "arithmetic": lambda: ARITHMETIC,
    "EXIF-rotated": turned,
    "bytes behind the end": lambda: saved(smooth(60, 70)) + b"\xff\xd8 and more" * 99,
    "16-bit PNG": lambda: saved(
        Image.fromarray(np.asarray(smooth(60, 70, "L")).astype(np.uint16) * 257), "PNG"
    ),
    "palette PNG": lambda: saved(smooth(60, 70).quantize(64), "PNG"),
    "RGBA PNG": lambda: saved(smooth(60, 70, "RGBA"), "PNG"),
    "PNG": lambda: saved(smooth(60, 70), "PNG"),
    "WebP": lambda: saved(smooth(60, 70), "WEBP"),
    "GIF": lambda: saved(smooth(60, 70), "GIF"),
    "1 x 1": lambda: saved(Image.new("RGB", (1, 1), (200, 100, 50))),
    "1 x 4000": lambda: saved(smooth(4000, 1)),
    "4000 x 1": lambda: saved(smooth(1, 4000)),
    "20,000 px wide": lambda: saved(smooth(40, 20_000)),
    "20,000 px high": lambda: saved(smooth(20_000, 40)),
}
UNREADABLE = {
    "half": lambda: saved(smooth(60, 70))[:800],
    "all but its last row": lambda: saved(smooth(160, 70))[:-60],
    "half a progressive one": lambda: saved(smooth(60, 70), progressive=True)[:1000],
    "half a CMYK one": lambda: saved(smooth(60, 70, "CMYK"))[:1200],
    "half a PNG": lambda: saved(smooth(60, 70), "PNG")[:2000],
    "half a WebP": lambda: saved(smooth(60, 70), "WEBP")[:300],
    "no end marker": lambda: saved(smooth(60, 70))[:-2],
    "header alone": lambda: saved(smooth(60, 70))[:640],
    "zeros": lambda: bytes(3000),
    "zeros behind the first bytes": lambda: saved(smooth(60, 70))[:3] + bytes(3000),
    "zeros behind the header": lambda: saved(smooth(60, 70))[:640] + bytes(3000),
    "a flipped bit in a PNG": lambda: bytes(
        b ^ (n == 2000) for n, b in enumerate(saved(smooth(60, 70), "PNG"))
    ),
    "text": lambda: b"no image at all\n" * 9,
    "nothing": lambda: b"",
    "12 bits": lambda: header_jpeg(0xC1, 64, precision=12),
    "lossless": lambda: header_jpeg(0xC3, 64),
    "16,384 x 16,384 pixels": lambda: header_jpeg(0xCA, 16_384),
    "an HTML page": lambda: b"<!DOCTYPE html><title>404</title>",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Write eight undamaged images, the last of another class."""
    root = tmp_path_factory.mktemp("good")
    for number in range(8):
        label = root / "train" / ("dog" if number == 7 else "cat")
        label.mkdir(parents=True, exist_ok=True)
        (label / f"{number}.jpg").write_bytes(saved(smooth(70 + number, 90 - number, seed=number)))
    return root


@pytest.fixture
def data(good, tmp_path):
    """Copy them; return the folder and the fourth one's path."""
    root = shutil.copytree(good, tmp_path / "data")
    return root, root / "train" / "cat" / f"{VICTIM}.jpg"


def loader(source, on_bad_sample="raise", mode="evaluate", batch=4):
    plan = EpochPlan(
        num_samples=len(source.labels), batch=batch, seed=3, mode=mode, sizes=((0, SIDE),)
    )
    return loader_class(DECODER)(source, plan, 2, on_bad_sample)


def epoch(source, epoch=0, **options):
    """Return the concatenated fields of an epoch, and the number of skipped samples."""
    reader = loader(source, **options)
    try:
        batches = list(reader.batches(epoch))
    finally:
        reader.close()
    names = batches[0].tensors
    whole = {name: torch.cat([batch.tensors[name] for batch in batches]) for name in names}
    return batches[0]._replace(**whole), reader.skipped


def error_of(source, **options):
    """Return the loader's error for the bad sample, after checking that it is one sentence."""
    with pytest.raises(UserError) as refused:
        epoch(source, **options)
    assert "\n" not in str(refused.value)
    assert "Errno" not in str(refused.value)
    return str(refused.value)


def check_skipped(source, row=VICTIM, **options):
    """Check that the bad sample is counted once and replaced by a good one of its batch, with
    weight 0.
    """
    whole, skipped = epoch(source, on_bad_sample="skip", **options)
    assert skipped == 1
    assert whole.weight.tolist() == [n != row for n in range(8)]
    twin = int(whole.index[row])
    assert twin != row
    for field in whole.tensors.values():
        if field is not whole.weight:
            assert torch.equal(field[row], field[twin])
    assert (whole.image.float().std((1, 2, 3)) > 5).all()


# ----------------------------------------------------------------------- files of every kind


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", READABLE)
def test_unusual_images_are_read_as_by_the_teacher(data, tmp_path, name):
    """`folder` gives the pixels of storage.images.decode, which the teacher uses; so does `ffcv`,
    except for images that had to be converted to JPEG.
    """
    root, victim = data
    victim.write_bytes(READABLE[name]())
    teachers = decode(victim.read_bytes(), "it")
    short, (width, height) = min(teachers.size), teachers.size
    left, top = (width - short) / 2, (height - short) / 2
    want = crop_resize(teachers, (left, top, left + short, top + short), SIDE).astype(int)
    main(Packing(data=root, out=tmp_path / "x.beton"))
    for source in (FolderSource(root, "train"), FfcvSource(tmp_path / "x.beton")):
        whole, _ = epoch(source)
        assert whole.weight.all()
        got = whole.image[VICTIM].numpy().astype(int)
        reencoded = isinstance(source, FfcvSource) and (
            "PNG" in name or name in ("CMYK", "YCCK", "WebP", "GIF")
        )
        # libjpeg does not interpolate the chroma of images up to 4 px wide; we always do.
        assert np.abs(got - want).mean() <= (2 if reencoded or name == "1 x 4000" else 0.6)
    for source in (FolderSource(root, "train"), FfcvSource(tmp_path / "x.beton")):
        assert epoch(source, mode="train")[0].weight.all()  # and any crop of it can be read


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", UNREADABLE)
def test_bad_images_are_refused_with_their_path_or_skipped_and_counted(
    data, tmp_path, name, capsys
):
    root, victim = data
    victim.write_bytes(UNREADABLE[name]())
    message = error_of(FolderSource(root, "train"))
    assert message.startswith(f"sample {VICTIM}: {victim} ")
    assert "; replace or remove this file" in message
    check_skipped(FolderSource(root, "train"))
    assert f"skipped {message}" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"1 image cannot be packed: {victim} cannot be decoded"):
        main(Packing(data=root, out=tmp_path / "x.beton"))
    main(Packing(data=root, out=tmp_path / "x.beton", on_bad_sample="skip"))
    whole, skipped = epoch(FfcvSource(tmp_path / "x.beton"))
    assert (len(whole.index), whole.weight.sum(), skipped) == (8, 7, 0)


def test_a_file_truncated_anywhere_is_refused(data):
    """Also where the crop does not reach the last rows. A PNG that lacks only its end chunk has all
    its pixels.
    """
    root, victim = data
    cases = (
        (saved(smooth(90, 60)), 1),
        (saved(smooth(90, 60), progressive=True), 1),
        (saved(smooth(30, 20), "PNG"), 22),
    )
    for whole, spare in cases:
        for length in np.linspace(0, len(whole) - spare, 20).astype(int):
            victim.write_bytes(whole[:length])
            error_of(FolderSource(root, "train"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "encoded",
    [{}, {"progressive": True}, {"restart_marker_rows": 1}],
    ids=["baseline", "progressive", "restarts"],
)
def test_zeros_in_the_middle_never_make_a_black_image(data, encoded):
    root, victim = data
    whole, refused = saved(smooth(90, 80), **encoded), 0
    for start in np.linspace(0, len(whole) - 400, 13).astype(int):
        victim.write_bytes(whole[:start] + bytes(400) + whole[start + 400 :])
        batch, skipped = epoch(FolderSource(root, "train"), on_bad_sample="skip")
        refused += skipped
        assert (batch.image.float().std((1, 2, 3)) > 5).all()
    assert refused > 5


def test_a_batch_of_only_bad_images_stops_the_run_even_when_skipping(data, capsys):
    root, _ = data
    for path in root.glob("train/cat/*.jpg"):
        path.write_bytes(path.read_bytes()[:300])
    first = root / "train" / "cat" / "0.jpg"
    with pytest.raises(
        UserError,
        match=rf"none of the 4 samples of a batch can be read \(the first is {first}\); see the",
    ):
        epoch(FolderSource(root, "train"), on_bad_sample="skip")
    assert capsys.readouterr().err.count("skipped sample") == 4


# --------------------------------------------------- files that change while they are open


def vanish(victim):
    victim.unlink()
    return "there is no such file or folder; check the path"


def become_a_folder(victim):
    victim.unlink()
    victim.mkdir()
    return "this is a folder where a file is expected; check the path"


def close_to_all(victim):
    if not os.geteuid():
        pytest.skip("root may read everything")
    victim.chmod(0)
    return "no permission; change its owner or mode, or choose another place"


def lead_nowhere(victim):
    victim.unlink()
    victim.symlink_to(victim)
    return "symbolic links lead around in a circle; remove one of them"


@pytest.mark.parametrize("happens", [vanish, become_a_folder, close_to_all, lead_nowhere])
def test_a_file_that_becomes_unreadable(data, happens):
    root, victim = data
    sources = [FolderSource(root, "train") for _ in range(2)]
    message = happens(victim)
    assert error_of(sources[0]) == f"sample {VICTIM}: {victim}: {message}"
    check_skipped(sources[1])


def test_a_replaced_file_is_read_in_its_new_form(data):
    """With its own size: never a crop of the old size from the new image."""
    root, victim = data
    source, other = FolderSource(root, "train"), smooth(20, 95, seed=99)
    victim.write_bytes(saved(other))
    whole, skipped = epoch(source)
    want = crop_resize(decode(saved(other), "it"), (37.5, 0, 57.5, 20), SIDE).astype(int)
    assert np.abs(whole.image[VICTIM].numpy().astype(int) - want).mean() < 0.6
    assert skipped == 0


@pytest.fixture(scope="module")
def packed(good, random_maps, tmp_path_factory):
    """Pack the good images as a .beton with maps inside and one without, and store the maps as
    .h5.
    """
    root = tmp_path_factory.mktemp("packed")
    write_store(root / "maps.h5", Images(good), random_maps(8, 6, 1, 1), 2)
    main(Packing(data=good, maps=root / "maps.h5", out=root / "x.beton"))
    main(Packing(data=good, out=root / "bare.beton"))
    return root


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def test_a_flipped_bit_in_a_packed_image_or_map_is_detected_where_used(packed, tmp_path):
    """Every crop equals that of the undamaged file bit for bit, or is refused with path and number,
    or skipped and counted.
    """
    path = shutil.copy(packed / "x.beton", tmp_path / "x.beton")
    beton = Beton(path)
    wants = [epoch(FfcvSource(path), n, mode="train")[0] for n in range(3)]
    rng, seen, refused = np.random.default_rng(0), 0, 0
    start, end = (
        int(beton.images.offset[VICTIM]),
        int(beton.images.offset[VICTIM] + beton.images.size[VICTIM]),
    )
    map_start = int(beton.offsets("map")[VICTIM])
    for offset in [
        *rng.integers(start, end, 12).tolist(),
        end - 1,
        start,
        start + 3,
        map_start,
        map_start + 100,
    ]:
        flip(path, offset)
        for number, want in enumerate(wants):
            got, skipped = epoch(FfcvSource(path), number, on_bad_sample="skip", mode="train")
            row = int((want.index == VICTIM).nonzero())
            assert got.weight[row] == 1 - skipped
            sound = got.weight == 1
            same = (torch.equal(a[sound], want.tensors[n][sound]) for n, a in got.tensors.items())
            assert all(same)
            seen, refused = seen + 1, refused + skipped
        if skipped:
            message = error_of(FfcvSource(path), epoch=number, mode="train")
            assert message.startswith(f"sample {VICTIM}: {path} image {VICTIM}")
            assert message.endswith(
                ("copy the file again, or pack it again", "pack or copy the file again")
            )
        flip(path, offset)
    assert seen / 2 < refused < seen


def test_damage_outside_the_crop_is_not_detected(packed, good, tmp_path):
    """The last rows of a tall image are not read for its center; a crop that contains them is
    refused.
    """
    root = shutil.copytree(good, tmp_path / "data")
    victim = root / "train" / "cat" / f"{VICTIM}.jpg"
    victim.write_bytes(saved(smooth(90, 40)))
    path = tmp_path / "x.beton"
    main(Packing(data=root, out=path))
    want, _ = epoch(FfcvSource(path))
    beton = Beton(path)
    flip(path, int(beton.images.offset[VICTIM] + beton.images.size[VICTIM]) - 8)
    got, _ = epoch(FfcvSource(path))
    assert torch.equal(got.image, want.image)
    whole = [epoch(FfcvSource(path), n, mode="train", on_bad_sample="skip") for n in range(20)]
    assert 0 < sum(skipped for _, skipped in whole) < 20


@pytest.mark.parametrize(("kind", "beside"), [("folder", True), ("ffcv", True), ("ffcv", False)])
def test_a_damaged_or_truncated_map_is_reported_and_not_the_image(
    packed, good, tmp_path, kind, beside
):
    maps = shutil.copy(packed / "maps.h5", tmp_path / "maps.h5")
    path = shutil.copy(packed / ("bare.beton" if beside else "x.beton"), tmp_path / "x.beton")

    def source():
        return (
            FolderSource(good, "train", maps)
            if kind == "folder"
            else FfcvSource(path, maps if beside else None)
        )

    if beside:
        damaged, (_, offsets) = maps, ScoreMapStore(maps).places(np.array([VICTIM]))
        message = f"{maps}: row {VICTIM} (cat/{VICTIM}.jpg) is damaged; relabel or copy it again"
    else:
        damaged, offsets = path, Beton(path).offsets("lse")[None, [VICTIM]]
        message = (
            f"sample {VICTIM}: {path} image {VICTIM}: its arrays are damaged; pack or copy the "
        )
        message += "file again"
    flip(damaged, int(offsets[0, -1]) + 3)
    assert message in error_of(source())
    check_skipped(source())
    flip(damaged, int(offsets[0, -1]) + 3)
    opened = source()
    os.truncate(damaged, int(offsets[0, 0]))
    cut = error_of(opened)
    assert str(damaged) in cut
    assert "cut" in cut or "truncated" in cut


def test_a_beton_truncated_while_open_is_an_error_and_a_replaced_one_is_read_on(
    packed, good, tmp_path
):
    path = shutil.copy(packed / "bare.beton", tmp_path / "bare.beton")
    want, _ = epoch(FfcvSource(path))
    opened = [FfcvSource(path) for _ in range(3)]
    shutil.copy(packed / "x.beton", tmp_path / "other")
    os.replace(tmp_path / "other", path)  # as the packer and most tools do
    assert torch.equal(epoch(opened[0])[0].image, want.image)
    path = shutil.copy(packed / "bare.beton", tmp_path / "cut.beton")
    opened = [FfcvSource(path) for _ in range(2)]
    os.truncate(path, int(Beton(packed / "bare.beton").images.offset[VICTIM]) + 100)
    message = error_of(opened[0])
    assert message.startswith(
        f"sample {VICTIM}: {path} image {VICTIM} cannot be decoded (its file was cut"
    )
    # The second batch lies beyond the end of the file.
    with pytest.raises(UserError, match="none of the 4 samples of a batch can be read"):
        epoch(opened[1], on_bad_sample="skip")


@pytest.fixture(scope="module")
def three_classes(good, random_maps, tmp_path_factory):
    """Return a function that packs the good images with maps of 3 classes, some values replaced."""
    root = tmp_path_factory.mktemp("values")

    def pack(replace, max_palette=3):
        maps, path = random_maps(8, 6, 2, 3), root / "x.beton"
        replace(maps, VICTIM)
        path.unlink(missing_ok=True)
        notes = {"class_names": [*"abc"], "fingerprint": "f", "teacher": "t", "absent": "tail"}
        notes |= {"max_palette": max_palette, "min_window_side": 0.5}
        with BetonWriter(path, 8, map_fields(6, 2), notes) as writer:
            for n in range(8):
                image = Image.open(next(good.glob(f"train/*/{n}.jpg")))
                size = image.height, image.width
                encoded = indexed_jpeg.transcode(saved(image))
                writer.write(n, Sample(encoded, *size, 0, map_arrays(maps, n)))
            writer.finish()
        return path

    return pack


@pytest.mark.parametrize("fault", BAD_VALUES)
def test_a_map_with_impossible_values_is_refused_or_skipped(three_classes, fault, capsys):
    """Its checksums are right. Held on the device, it is refused before the first step."""
    path = three_classes(BAD_VALUES[fault])
    want = f"{path} image {VICTIM}: its score map holds {fault}; label the images again and pack"
    assert want in error_of(FfcvSource(path))
    check_skipped(FfcvSource(path))
    assert want in capsys.readouterr().err
    with pytest.raises(UserError, match=re.escape(want)):
        ResidentMaps(FfcvSource(path), torch.device("cpu"))
    assert [line[: len(want)] for line in verify(path, 2)] == [want]


def test_a_map_of_more_classes_than_the_notes_allow_is_refused(three_classes):
    """The palettes of a batch have room for `max_palette` classes."""
    path = three_classes(lambda maps, n: None, max_palette=2)
    assert "holds more classes than its palette size" in error_of(FfcvSource(path))


def write_random_coding(path, three_classes):
    """Pack the good images; write noise over the entropy coding of one, with right checksums."""
    shutil.copy(three_classes(lambda maps, n: None), path)
    beton = Beton(path)
    at, size = int(beton.images.offset[VICTIM]), int(beton.images.size[VICTIM])
    jpeg = bytearray(beton.image(VICTIM)[0])
    header, rows = int.from_bytes(jpeg[12:16], "little"), jpeg[20] | jpeg[21] << 8
    scan = memoryview(jpeg)[header:]
    rng = np.random.default_rng(0)
    start = 0
    for row in range(rows):
        place = 22 + 8 * row
        length = int.from_bytes(jpeg[place : place + 4], "little")
        content = np.frombuffer(scan[start : start + length], np.uint8).copy()
        # Markers and stuffed bytes stay where they are.
        marked = content == 255
        marked[1:] |= content[:-1] == 255
        content[~marked] = rng.integers(0, 255, (~marked).sum())
        scan[start : start + length] = content.tobytes()
        jpeg[place + 4 : place + 8] = zlib.crc32(content).to_bytes(4, "little")
        start += length
    scan.release()
    crc = zlib.crc32(jpeg[20:header], zlib.crc32(jpeg[:16]))
    jpeg[16:20] = crc.to_bytes(4, "little")
    with open(path, "r+b") as file:
        file.seek(at)
        assert file.write(jpeg) == size


def test_random_entropy_data_with_right_checksums_is_refused(three_classes, tmp_path):
    """DALI would show guessed pixels."""
    write_random_coding(tmp_path / "y.beton", three_classes)
    source = FfcvSource(tmp_path / "y.beton")
    assert "the segments at pixel row 0 are corrupt" in error_of(source)
    check_skipped(FfcvSource(tmp_path / "y.beton"))
