"""Pages of explanations: maps against those of the functions, hostile names, refusals, faults."""

import errno
import re
import shutil
from contextlib import closing
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from densefeed.explain.capture import capture_attention
from densefeed.explain.features import block_features
from densefeed.explain.relevance import class_relevance
from densefeed.models.agent_cnn import make_agent
from densefeed.objectives import Objectives, complete
from densefeed.pages.templates import INKS
from densefeed.pages.tokens import label_tokens
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import explain
from densefeed.tools.explain import Explanations, ImageFile, find_images, main, read_input
from densefeed.training.load_model import open_trained

from ..explain.test_heat_maps import decode_url

SIZE = 32
NAMES = ["cat", "dog", "<script>alert('\"')</script>", "🦊 & fox", "x" * 200, "\x1b[2Jred"]
LVVIT = dict(img_size=SIZE, embed_dim=24, num_heads=2, depth=3, stem_width=4, token_head=True)
SWIN = dict(
    img_size=SIZE, patch_size=4, window_size=4, embed_dim=8, depths=(1, 2), num_heads=(1, 2)
)
MODELS = {
    "lvvit": ("lvvit_micro", LVVIT),
    "dhvt": ("dhvt_micro", dict(img_size=SIZE, embed_dim=16, num_heads=2, depth=2)),
    "cvt": ("cvt_13", dict(dims=(4, 8, 12), depths=(1, 1, 2), num_heads=(1, 2, 3))),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "resnet": ("test_resnet", {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run folder of each model in MODELS, with random weights."""
    root = tmp_path_factory.mktemp("runs")
    for family, (name, kwargs) in MODELS.items():
        kwargs = kwargs | {"num_classes": len(NAMES)}
        torch.manual_seed(0)
        model = timm.create_model(name, **kwargs)
        with torch.no_grad():
            for weights in model.parameters():
                # Maps of zeros, as those of the initial head and class token, would be all equal.
                weights += 0.05 * torch.randn_like(weights)
        (root / family).mkdir()
        saved = {"recipe": {"name": name, "kwargs": kwargs}, "class_names": NAMES}
        saved |= {"config": {"data": {"size": SIZE, "crop_pct": 0.9}}, "model": model.state_dict()}
        torch.save(saved, root / family / "last.pt")
    return root


@pytest.fixture
def options(runs, folder, tmp_path):
    def make(family: str = "lvvit", **fields) -> Explanations:
        plain = dict(source=str(runs / family), images=(folder,), out=tmp_path / "page.html")
        return Explanations(**plain | {"device": "cpu"} | fields)

    return make


class Page(HTMLParser):
    """Reads a page: its texts, its tags, and sources of images by their alternative text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts, self.tags, self.pictures = [], [], {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        if tag == "img":
            self.pictures.setdefault(given["alt"], []).append(given["src"])

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
def test_the_model_sees_the_pixels_of_validation(folder, runs, filter):
    """Up to rounding: Pillow resizes here, the native decoder in the loaders."""
    source = FolderSource(folder, "val")
    fields = dict(sizes=((0, SIZE),), crop_pct=0.9, crop_interpolation=filter)
    plan = EpochPlan(num_samples=5, batch=5, seed=0, mode="evaluate", **fields)
    with closing(ThreadedLoader(source, plan, threads=1)) as loader:
        (batch,) = loader.batches(0)
    images, trained = Images(folder, split="val"), open_trained(runs / "lvvit")
    for row, pixels in enumerate(batch.image.numpy()):
        file = ImageFile(Path(images.where(row)), "", row, None)
        seen = read_input(file, trained._replace(interpolation=filter), 0.9)
        difference = seen.pixels.astype(int) - pixels
        assert abs(difference).max() <= 3
        assert abs(difference).mean() < 0.6


def test_outside_a_folder_without_class_folders_is_explained(options, runs, folder, tmp_path):
    for number in (10, 9):
        shutil.copy(next(folder.rglob("*.jpg")), tmp_path / f"{number}.jpg")
    (tmp_path / "._9.jpg").touch()
    files, images = find_images(options(images=(tmp_path,), count=2), open_trained(runs / "lvvit"))
    assert images is None
    assert [(file.path.name, file.label) for file in files] == [("9.jpg", ""), ("10.jpg", "")]


def test_a_page_and_its_files_hold_the_maps_of_the_functions(options, runs, tmp_path):
    folders = {name: tmp_path / name for name in ("arrays", "pictures")}
    given = options(classes=("5", "dog"), layers=(1, 3), batch=1, **folders)
    main(given)
    trained = open_trained(runs / "lvvit")
    files, _ = find_images(given, trained)
    page, order = Page(given.out), [path.name for path in sorted(folders["arrays"].iterdir())]
    assert order == [f"{n:06d}.npz" for n in range(5)]
    explained = 0
    for n, file in enumerate(files):
        pixels = torch.tensor(read_input(file, trained, 0.9).pixels)
        image_1CHW = Normalize(trained.mean, trained.std)(pixels[None])
        with torch.no_grad(), capture_attention(trained.model) as captured:
            probability_K = trained.model(image_1CHW)[0].softmax(-1)
        classes = list(dict.fromkeys([*probability_K.topk(2).indices.tolist(), 5, 1]))
        want = class_relevance(trained.model, image_1CHW, torch.tensor([classes]))[0]
        with np.load(folders["arrays"] / order[n]) as arrays:
            assert arrays["path"] == str(file.path)
            assert arrays["classes"].tolist() == classes
            np.testing.assert_allclose(arrays["probability"], probability_K, atol=1e-6)
            # The same batch: in float32 relevance depends on the order of sums, by some percent.
            np.testing.assert_allclose(arrays["relevance"], want, atol=1e-4 * want.max().item())
            np.testing.assert_allclose(
                arrays["layer_03_matrix"], captured[2].weights.mean(1)[0], atol=1e-6
            )
            assert arrays["layer_02_class_map"].shape == (4, 4)
            assert arrays["block_01_features"].shape == (24, 4, 4)
            assert not {"layer_02_matrix", "block_02_features"} & set(arrays)
            stored = arrays["relevance"]
        for map_RC in stored:
            shown = decode_url(page.pictures["relevance"][explained])
            scaled = (map_RC - map_RC.min()) / (map_RC.max() - map_RC.min())
            np.testing.assert_allclose(shown, 255 * scaled, atol=0.51)
            explained += 1
    assert explained == len(page.pictures["relevance"])
    drawn = {path.name[7:-4] for path in folders["pictures"].glob("000004-*")}
    assert {"input", "rollout", "layer-02-mean-row", "layer-03-matrix", "block-01-features"} < drawn
    assert {"relevance-class-5", "gradient-attention-class-1"} < drawn
    with Image.open(folders["pictures"] / "000004-relevance-class-5.png") as picture:
        assert picture.size == (SIZE, SIZE)


def test_names_show_as_text(options, folder, tmp_path):
    """Names of classes and files, also where they look like HTML."""
    image = next((folder / "val").rglob("*.jpg"))
    hostile = tmp_path / "<b>&\"'.jpg"
    hostile.write_bytes(image.read_bytes())
    given = options(images=(hostile,), classes=tuple("012345"))
    main(given)
    page = Page(given.out)
    text = " ".join(page.texts)
    for name in (*NAMES[:-1], "\\x1b[2Jred", str(hostile)):
        assert name in text
    assert page.tags.count("script") == 1
    assert "b" not in page.tags[: page.tags.index("h2") + 1]
    assert "\x1b" not in text
    # Nothing is loaded from elsewhere.
    sources = [source for group in page.pictures.values() for source in group]
    assert all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", given.out.read_text())


@pytest.mark.parametrize(
    ("family", "shown", "refused"),
    [
        ("dhvt", {"relevance", "rollout", "head token 2, layer 1"}, []),
        ("cvt", {"relevance", "rollout", "attention matrix of layer 4"}, []),
        (
            "swin",
            {"gradient × attention", "attention, layer 3", "features of block 3"},
            ["rollout", "relevance"],
        ),
        (
            "resnet",
            {"features of block 4"},
            ["attention, rollout, relevance, gradient x attention"],
        ),
    ],
)
def test_every_model_is_shown_by_what_it_can_be(options, family, shown, refused):
    given = options(family, count=2)
    main(given)
    page = Page(given.out)
    assert shown <= set(page.pictures)
    assert page.tags.count("section") == 2
    found = [text for text in page.texts if text.startswith("No ")]
    assert found == [f"No {kind} on this page:" for kind in refused]
    for kind in refused:
        assert not set(kind.split(", ")) & set(page.pictures)


def test_token_labels_are_those_of_the_loader(options, folder, maps):
    given = options(maps=maps, split="train")
    main(given)
    source = FolderSource(folder, "train", maps)
    plan = EpochPlan(
        num_samples=11, batch=11, seed=0, mode="evaluate", sizes=((0, SIZE),), crop_pct=0.9
    )
    with closing(ThreadedLoader(source, plan, threads=1)) as loader:
        (batch,) = loader.batches(0)
        class_NT, sure_NT = label_tokens(batch, loader.score_maps, 4)
    cells = re.findall(r'<rect .*? fill="(.*?)" fill-opacity="(.*?)"/>', given.out.read_text())
    # Others would not be seen.
    drawn = sure_NT.ravel() > 0.2
    assert [float(opacity) for _, opacity in cells] == pytest.approx(
        (0.62 * sure_NT.ravel()[drawn] ** 2).tolist(), abs=6e-3
    )
    assert [ink for ink, _ in cells] == [INKS[c] for c in class_NT.ravel()[drawn]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"out": Path("page.txt")}, "--out page.txt must end in .html"),
        ({"images": (Path("nowhere.jpg"),)}, "nowhere.jpg is neither an image nor a folder"),
        ({"images": ()}, "names no image"),
        ({"classes": ("bird",)}, "--classes bird is not a class of"),
        ({"classes": ("6",)}, "a number from 0 to 5"),
        ({"layers": (4,)}, "LVViT has layers 1 to 3"),
        ({"maps": Path("maps.h5"), "images": (Path("val.jpg"),)}, "--images"),
        ({"source": "resnet", "layers": (1, 9)}, "--layers 1 9: ResNet has blocks 1 to 5"),
        ({"arrays": Path("tests")}, "tests exists already"),
        ({"arrays": Path("a"), "pictures": Path("./a")}, "are both a"),
        ({"arrays": Path("a"), "out": Path("a/page.html")}, "is inside"),
        ({"arrays": Path("a/b"), "pictures": Path("a")}, "is inside"),
        ({"crop_pct": 2.0}, "--crop-pct is 2"),
        ({"source": "nowhere.pt"}, None),
        ({"source": "lvvit_s", "model": "lvvit_s"}, "leave out --model lvvit_s"),
    ],
)
def test_bad_options_are_refused(options, runs, fields, message):
    if fields.get("source") in MODELS:
        fields = fields | {"source": str(runs / fields["source"])}
    with pytest.raises((UserError, FileNotFoundError), match=message and re.escape(message)):
        main(options(**fields))


def test_a_fault_or_an_interrupt_leaves_nothing(options, folder, tmp_path, monkeypatch):
    """Not the page, the folders, nor temporary files; an old page stays."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "page.html").write_text("old")
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(next(folder.rglob("*.jpg")).read_bytes()[:200])
    outputs = {name: work / name for name in ("arrays", "pictures")}
    given = dict(out=work / "page.html", batch=1, **outputs)
    with pytest.raises(UserError, match=r"damaged.jpg cannot be decoded"):
        main(options(images=(folder, damaged), **given))
    describe, calls = explain.describe, []

    def interrupted(*arguments):
        calls.append(sum(path.stat().st_size for path in work.glob("page.html.*.part")))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return describe(*arguments)

    monkeypatch.setattr(explain, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(options(**given))
    # The images before it were on disk by then.
    assert calls[-1] > calls[0] + 8000
    assert [path.name for path in work.iterdir()] == ["page.html"]
    assert (work / "page.html").read_text() == "old"


def test_an_out_that_is_a_folder_is_refused_before_any_image(options, tmp_path, monkeypatch):
    monkeypatch.setattr(explain, "read_input", None)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match=r"--out \S*folder.html is a folder"):
        main(options(out=tmp_path / "folder.html"))


@pytest.mark.parametrize("name", ["arrays", "pictures"])
def test_a_full_disk_of_a_folder_has_its_name(options, tmp_path, monkeypatch, name):
    """The page may lie on another disk."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(explain, f"save_{name}", full)
    with pytest.raises(OSError, match="No space") as caught:
        main(options(**{name: tmp_path / name}))
    assert caught.value.filename == str(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_timm_comes_with_its_published_weights(options, monkeypatch):
    def offline(*arguments, **more):
        raise OSError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", offline)
        with pytest.raises(UserError, match=r"name a file of them in its place, and test_vit with"):
            main(options(source="test_vit"))
    given = options(source="test_vit", count=1, classes=("tench, Tinca tinca", "999"))
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained: create(name, pretrained=not pretrained)
    )
    main(given)
    text = " ".join(Page(given.out).texts)
    assert "for tench, Tinca tinca" in text
    assert "test_vit, raw weights, 1,000 classes, input 160 px. 1 image." in text


@pytest.fixture(params=["joint", "shared"])
def joint_run(request, runs, tmp_path) -> tuple[Path, torch.nn.Module]:
    """A run folder of a transformer and its agent with random weights, and the agent."""
    kwargs = {"img_size": SIZE, "num_classes": len(NAMES)}
    torch.manual_seed(0)
    model = timm.create_model("bootstrapping_vit_micro", **kwargs)
    agent = make_agent(model, len(NAMES), request.param == "shared", stem="base", down=(1, 3))
    for part in (model, agent):
        for weights in part.parameters():
            torch.nn.init.normal_(weights, 0, 0.1)
    averaged = {name: weights + 1 for name, weights in model.state_dict().items()}
    options = dict(bootstrap=request.param, agent="base", agent_kwargs=("down=(1,3)",))
    section = with_options(complete(Objectives(name="ce")), **options)
    saved = {"recipe": {"name": "bootstrapping_vit_micro", "kwargs": kwargs}, "class_names": NAMES}
    config = {"data": {"size": SIZE, "crop_pct": 0.9}, "objective": asdict(section)}
    saved |= {"config": config, "model": model.state_dict(), "ema": averaged}
    folder = tmp_path / "joint"
    folder.mkdir()
    torch.save(saved | {"agent": agent.state_dict()}, folder / "last.pt")
    if request.param == "shared":
        agent.share_weights(model)
    return folder, agent.eval()


def test_the_agent_of_a_joint_run_is_shown_by_its_features(options, joint_run, tmp_path):
    """Bootstrapping ViTs, Tables 10 and 11. A shared agent has the raw weights, not the EMA's."""
    folder, agent = joint_run
    given = options(source=str(folder), network="agent", arrays=tmp_path / "arrays", count=1)
    main(given)
    trained = open_trained(folder)
    (file,), _ = find_images(given, trained)
    pixels = torch.tensor(read_input(file, trained, 0.9).pixels)
    image_1CHW = Normalize(trained.mean, trained.std)(pixels[None])
    with torch.no_grad():
        want, logits_1K = block_features(agent, image_1CHW), agent(image_1CHW)
    with np.load(tmp_path / "arrays/000000.npz") as arrays:
        np.testing.assert_allclose(arrays["probability"], logits_1K.softmax(-1)[0], atol=1e-6)
        for block, map_1DRC in want.items():
            found = arrays[f"block_{block + 1:02d}_features"]
            np.testing.assert_allclose(found, map_1DRC[0], rtol=1e-5, atol=1e-5)
    assert "agent of bootstrapping_vit_micro, raw weights" in " ".join(Page(given.out).texts)


def test_a_run_without_an_agent_is_refused(options, joint_run):
    with pytest.raises(UserError, match=r"lvvit.last.pt holds no agent; .* leave out --network"):
        main(options(network="agent"))
    with pytest.raises(UserError, match=r"test_vit is a model of timm alone; leave out"):
        main(options(source="test_vit", network="agent"))
    path = joint_run[0] / "last.pt"
    saved = torch.load(path)
    for config in ({}, {"objective": {"bootstrap": {"mode": "joint", "agent": "base"}}}):
        torch.save(saved | {"config": config}, path)
        with pytest.raises(UserError, match=r"its agent cannot be built for inputs of"):
            main(options(source=str(joint_run[0]), network="agent", size=SIZE))


def test_the_guide_uses_files_of_the_quickstart():
    guide = (Path(__file__).parents[2] / "docs/guides/explain.md").read_text()
    places = re.findall(r"^densefeed explain (\S+) --images (\S+)", guide, re.M)
    steps = (Path(__file__).parents[2] / "docs/start/quickstart.md").read_text()
    assert places
    for run, images in places:
        assert f"--out {run}\n" in steps
        assert f"--data {images} " in steps
