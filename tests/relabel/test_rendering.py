"""Our renderer against Pillow's, on photographs and on unusual kinds of files."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from densefeed import native
from densefeed.relabel import rendering
from densefeed.relabel.rendering import NativeRender, PillowRender
from densefeed.storage.geometry import TeacherView, crop_in_pixels, teacher_window
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.tools import relabel_imagenet

MEAN = 0.6  # gray levels


class Viewer:
    """The views of a teacher: two boxes with fractional edges, one mirrored; or a single box."""

    fill = (120, 110, 100)

    def __init__(self, size, interpolation, several=False, geometry="center-crop"):
        self.input_size, self.interpolation, self.several, self.geometry = (
            size,
            interpolation,
            several,
            geometry,
        )

    def window(self, height, width):
        return teacher_window(self.geometry, height, width)

    def views(self, height, width):
        one = TeacherView(crop_in_pixels(self.window(height, width), height, width), False)
        return (
            [one, TeacherView((0.3, 1.6, width - 2.2, height - 0.7), True)]
            if self.several
            else [one]
        )


def in_memory(*files: bytes) -> SimpleNamespace:
    return SimpleNamespace(read=lambda index: files[index], where=lambda index: f"image-{index}")


def render_both(file: bytes, viewer: Viewer) -> tuple[np.ndarray, np.ndarray]:
    """Render with our decoder and with Pillow; their windows are equal."""
    pixels = np.full((2, 1 + viewer.several, viewer.input_size, viewer.input_size, 3), 99, np.uint8)
    windows = [
        make(in_memory(file), viewer)(0, out)
        for make, out in zip((NativeRender, PillowRender), pixels, strict=True)
    ]
    assert windows[0] == windows[1]
    return pixels[0].astype(int), pixels[1].astype(int)


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("filter", ["BILINEAR", "BICUBIC", "LANCZOS"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("size", [48, 224, 576])
def test_pixels_are_pillows(photographs, filter, several, size, monkeypatch):
    viewer = Viewer(size, Image.Resampling[filter], several)
    used = []
    render_native = rendering.render_native

    def record(*arguments):
        used.append(render_native(*arguments))
        return used[-1]

    monkeypatch.setattr(rendering, "render_native", record)
    for photograph in photographs[:3]:
        for subsampling in ("4:2:0", "4:4:4"):
            ours, pillows = render_both(
                encode(photograph, quality=90, subsampling=subsampling), viewer
            )
            assert np.abs(ours - pillows).mean() <= MEAN, subsampling
    # A filter that the library lacks is refused for the file (of one picture) and for the pixels.
    refused = [False] * (6 if several else 12)
    assert used == (refused if filter == "LANCZOS" else [True] * 6)


def test_bicubic_at_sharp_edges_stays_within_0_to_255():
    """Black and white blocks up to the edge of the image, enlarged. Nothing wraps around.

    Pillow clips between its two passes, our library after both.
    """
    rng = np.random.default_rng(0)
    black_or_white = (rng.integers(0, 2, (20, 24, 1)) * 255).repeat(3, 2).astype(np.uint8)
    blocks = Image.fromarray(black_or_white).resize((96, 80), Image.Resampling.NEAREST)
    for file in (encode(blocks, quality=95), encode(blocks, "PNG")):
        for size in (31, 200):
            ours, pillows = render_both(
                file, Viewer(size, Image.Resampling.BICUBIC, geometry="squash")
            )
            assert np.abs(ours - pillows).mean() < 3
            assert np.abs(ours - pillows).max() < 40


def odd_files(photograph: Image.Image) -> dict[str, bytes]:
    """Encode kinds of files that occur in real datasets."""
    rotated = Image.Exif()
    rotated[0x0112] = 6
    ramp = np.linspace(0, 65535, 60 * 50).astype(np.uint16).reshape(50, 60)
    small = photograph.resize((60, 50))
    return {
        "gray": encode(small.convert("L")),
        "cmyk": encode(small.convert("CMYK")),
        "progressive": encode(small, progressive=True),
        "exif-rotated": encode(small, exif=rotated),
        "16 bits": encode(Image.fromarray(ramp), "PNG"),
        "transparent": encode(small.convert("RGBA"), "PNG"),
        "palette": encode(small.convert("P"), "GIF"),
        "webp": encode(small, "WEBP"),
        "rgb": encode(small, keep_rgb=True),
        "one pixel": encode(small.resize((1, 1))),
        "thin": encode(small.resize((400, 1))),
    }


def test_unusual_files_are_rendered_as_by_pillow(photographs):
    for kind, file in odd_files(photographs[0]).items():
        ours, pillows = render_both(file, Viewer(64, Image.Resampling.BICUBIC, geometry="squash"))
        assert np.abs(ours - pillows).mean() <= 1, kind


def test_damaged_files_are_refused_with_the_same_message_as_by_pillow(photographs):
    whole = encode(photographs[0])
    for file in (whole[: len(whole) // 2], b"hello", b"", whole[:2]):
        messages = []
        for make in (NativeRender, PillowRender):
            with pytest.raises(
                UserError, match=r"image-0 cannot be decoded .*; replace or remove this file"
            ) as error:
                make(in_memory(file), Viewer(64, Image.Resampling.BILINEAR))(
                    0, np.empty((1, 64, 64, 3), np.uint8)
                )
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("several", [False, True])
def test_outside_damage_that_pillow_ignores_is_refused(photographs, several):
    """Also below a center crop, where the native decoder does not look."""
    tall = encode(photographs[0].resize((100, 200)), progressive=True)
    long = encode(photographs[0].resize((100, 200)), restart_marker_rows=1)
    # The last restart marker becomes another one.
    at = max(long.rfind(bytes([0xFF, 0xD0 + n])) for n in range(8))
    long = long[: at + 1] + bytes([long[at + 1] ^ 2]) + long[at + 2 :]
    tall = tall[: len(tall) // 2] + bytes(40) + tall[len(tall) // 2 + 40 :]
    for file in (tall, long):
        Image.open(io.BytesIO(file)).load()
        for make in (NativeRender, PillowRender):
            with pytest.raises(UserError, match=r"image-0 cannot be decoded \(Corrupt JPEG data"):
                make(in_memory(file), Viewer(64, Image.Resampling.BILINEAR, several))(
                    0, np.empty((1 + several, 64, 64, 3), np.uint8)
                )


def test_beyond_the_image_the_fill_color_is_shown(photographs):
    """A letterboxed image is in the middle of its square."""
    image = photographs[0].resize((60, 30))
    viewer = Viewer(60, Image.Resampling.BILINEAR)
    viewer.views = lambda height, width: [TeacherView((0.0, -15.0, 60.0, 45.0), False)]
    ours, pillows = render_both(encode(image), viewer)
    np.testing.assert_array_equal(ours, pillows)
    assert (ours[0, :14] == Viewer.fill).all()
    assert ours[0, 20:40].mean() > 5


def test_exhausted_memory_is_reported(photographs, monkeypatch):
    monkeypatch.setattr(
        native.Job, "decode", lambda self: self.samples["status"].fill(native.NO_MEMORY)
    )
    with pytest.raises(UserError, match=r"memory is exhausted; choose a smaller --batch"):
        render_both(encode(photographs[0]), Viewer(48, Image.Resampling.BILINEAR))


def test_our_decoder_gives_the_labels_of_pillow(folder, tmp_path):
    """The command with either decoder: pixels differ by roundings, logits by no more than 2 %."""
    torch.manual_seed(0)
    save_file(
        timm.create_model("test_resnet", num_classes=2).state_dict(),
        tmp_path / "teacher.safetensors",
    )
    logits = []
    for decoder in ("native", "pillow"):
        wanted = relabel_imagenet.Labeling(
            data=folder,
            teacher=(str(tmp_path / "teacher.safetensors"),),
            model=("test_resnet",),
            input_size=(64,),
            top_k=2,
            device="cpu",
            decoder=decoder,
            threads=2,
            out=tmp_path / f"{decoder}.h5",
        )
        relabel_imagenet.main(wanted)
        logits.append(ScoreMapStore(wanted.out).rows(np.arange(11)).logit.astype(float))
    assert 0 < np.abs(logits[0] - logits[1]).mean() < 0.02 * np.abs(logits[1]).mean()
