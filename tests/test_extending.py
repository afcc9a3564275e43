"""What is added from outside the package: an objective, a method, a loader, an augmentation, a
dataset, a teacher and a model, one file of at most 60 lines each.
"""

import importlib.util
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import densefeed.train as training
from densefeed.recipes import RECIPES
from densefeed.storage.beton import Beton
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import report

HERE = Path(__file__).parent / "extensions"
SHORT = [
    *("--epochs", 1, "--batch", 4, "--size", 32, "--threads", 1),
    *("--device", "cpu", "--ema", 0, "--eval-every", 1),
]


@pytest.fixture
def run(command, tmp_path):
    def run(file: str, *words: object) -> str:
        done = command(HERE / file, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("file", sorted(HERE.glob("*.py")), ids=lambda path: path.stem)
def test_an_extension_is_one_short_file(file):
    assert len(file.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_an_objective_trains_with_its_own_options(run, packed, tmp_path):
    losses = []
    for weight in (0.0, 5.0):
        out = tmp_path / f"run-{weight}"
        words = "--data", packed[0], "--val", packed[1], "--out", out, "--loader", "ffcv"
        chosen = "--objective", "confidence-penalty", "--penalty-weight", weight, "--log-every", 1
        run("objective.py", "lvvit_micro_ce", *words, *SHORT, *chosen)
        config = json.loads((out / "config.json").read_text())
        assert config["objective"]["name"] == "confidence-penalty"
        assert config["objective"]["confidence_penalty"] == {"penalty_weight": weight}
        record = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
        losses.append(record["loss"])
    # Two classes: the entropy is at most ln 2, and close to it before the first step.
    assert 2 < losses[0] - losses[1] <= 5 * 0.6932


@pytest.mark.slow
def test_a_method_wraps_the_model_and_its_network_is_evaluated_and_saved(run, packed, tmp_path):
    """Around two objectives; a finished run is resumed too."""
    words = "--data", packed[0], "--val", packed[1], "--loader", "ffcv", "--peer-weight", 0.5
    for objective in ("ce", "relabel"):
        out = tmp_path / objective
        given = *words, "--out", out, "--objective", objective
        printed = run("method.py", "lvvit_micro_ce", *given, *SHORT)
        assert "that --peer-weight 0.5 trains beside them" in printed
        result = json.loads((out / "result.json").read_text())
        assert 0 <= result["top1_peer"] <= 1
        saved = torch.load(out / "last.pt", weights_only=True)
        assert saved["peer"].keys() == saved["model"].keys()
        assert not torch.equal(saved["peer"]["head.weight"], saved["model"]["head.weight"])
        again = run("method.py", "lvvit_micro_ce", *given, *SHORT, "--resume", "auto")
        assert f"continuing at step {saved['step']}" in again


@pytest.mark.slow
def test_the_report_of_an_own_objective_says_why_it_shows_no_crops(run, packed, tmp_path, capsys):
    """The report does not import the module that registers the objective."""
    words = "--data", packed[0], "--val", packed[1], "--loader", "ffcv", "--out", tmp_path / "own"
    run("objective.py", "lvvit_micro_ce", *words, *SHORT, "--objective", "confidence-penalty")
    report.main(report.Report(runs=(tmp_path / "own",)))
    assert (
        "the report shows no crops: --objective confidence-penalty is unknown"
        in capsys.readouterr().err
    )
    assert ">own<" in (tmp_path / "own" / "report.html").read_text()


def test_outside_another_command_reads_a_run_after_an_import(command, run, packed, tmp_path):
    """As docs/extending.md says. Without it the config names an unknown operation."""
    words = "--data", packed[0], "--val", packed[1], "--loader", "ffcv", "--out", tmp_path / "own"
    run("augmentation.py", "lvvit_micro_token_label", *words, *SHORT, "--operations", "gamma")
    script = tmp_path / "script.py"
    lines = "import augmentation", "from densefeed.tools import report", "report.command()"
    script.write_text("\n".join(lines))
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    done = command(script, tmp_path / "own", environment=environment)
    assert (done.returncode, done.stderr.count("shows no")) == (0, 0), done.stderr
    assert "What the student saw" in (tmp_path / "own" / "report.html").read_text()


@pytest.mark.slow
def test_an_augmentation_trains_by_its_name(run, packed, tmp_path):
    words = "--data", packed[0], "--val", packed[1], "--loader", "ffcv", "--log-every", 1
    losses = []
    for operations in ((), ("--operations", "gamma")):
        out = tmp_path / f"run-{len(operations)}"
        run("augmentation.py", "lvvit_micro_ce", *words, "--out", out, *SHORT, *operations)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[0])["loss"])
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_dataset_is_packed_by_its_name(run, folder, tmp_path):
    files = sorted((folder / "train").glob("*/*.jpg"))
    lines = [f"{path.relative_to(folder)},{path.parent.name},train" for path in files]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,class,split", *lines]))
    run("dataset.py", "--data", folder, "--dataset", f"csv/{table}", "--out", "x.beton")
    packed = Beton(tmp_path / "x.beton")
    assert packed.labels.tolist() == [path.parent.name == "dog" for path in files]


@pytest.mark.slow
def test_a_loader_trains_by_its_name(run, folder, tmp_path):
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as archive:
            archive.add(folder / split, arcname=".")
    out = tmp_path / "run"
    words = "--loader", "tar", "--data", "train.tar", "--val", "val.tar", "--out", out
    run("loader.py", "lvvit_micro_ce", *words, *SHORT)
    result = json.loads((out / "result.json").read_text())
    assert (result["skipped"], 0 <= result["top1"] <= 1) == (0, True)


@pytest.mark.slow
def test_a_teacher_labels_by_its_factory(command, folder, tmp_path):
    out = tmp_path / "maps.h5"
    done = command(
        "tools/relabel_imagenet.py",
        "--data",
        folder,
        "--teacher",
        "teacher:make",
        "--out",
        out,
        "--input-size",
        48,
        "--top-k",
        2,
        environment=os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
    )
    assert done.returncode == 0, done.stderr
    assert ScoreMapStore(out).header.side == 6


@pytest.mark.slow
def test_outside_a_model_of_ones_own_trains_with_token_labels(run, packed, tmp_path):
    out = tmp_path / "run"
    words = "--data", packed[0], "--val", packed[1], "--loader", "ffcv", "--out", out
    own = "--model", "token_vit", "--no-mixtoken", "--log-every", 1
    run("model.py", "lvvit_micro_token_label", *words, *SHORT, *own, "--model-kwargs")
    saved = torch.load(out / "last.pt", weights_only=True)
    assert saved["recipe"]["name"] == "token_vit"
    # The tokens' loss reached the head.
    assert saved["model"]["token_head.bias"].abs().sum() > 0
    assert 0 <= json.loads((out / "result.json").read_text())["top1"] <= 1


def test_outside_models_without_what_tokens_need_are_refused(packed, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("token_vit_model", HERE / "model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours = with_options(
        RECIPES["lvvit_micro_token_label"](),
        data=packed[0],
        val=packed[1],
        loader="ffcv",
        out=tmp_path / "run",
        model="token_vit",
        model_kwargs=(),
        batch=4,
        size=32,
        threads=1,
        device="cpu",
        dry_run=True,
        mixtoken=True,
    )
    training.train(with_options(ours, mixtoken=False))
    with pytest.raises(UserError, match=r"token_vit cannot exchange tokens .*, or --no-mixtoken"):
        training.train(ours)
    # A plain tuple, and a patch size that is not set, were tracebacks.
    with monkeypatch.context() as patch:
        patch.setattr(module, "TokenLogits", lambda *parts: parts)
        with pytest.raises(
            UserError, match=r"token_vit returns a tuple in training, .*TokenLogits"
        ):
            training.train(with_options(ours, mixtoken=False))
    for wrong, what in (
        (lambda x: (x,), "a tuple in"),
        (lambda x: x[:, None], r"a Tensor of shape \(\d+, 1, \d+\) in"),
    ):
        with monkeypatch.context() as patch:
            plain = module.TokenViT.forward
            patch.setattr(module.TokenViT, "forward", lambda *args, w=wrong, f=plain: w(f(*args)))
            for objective in ("ce", "relabel"):
                match = rf"token_vit returns {what} .*--objective {objective} needs logits"
                with pytest.raises(UserError, match=match):
                    training.train(with_options(ours, mixtoken=False, objective=objective))
    built = module.TokenViT.__init__

    def forget_patch(self, **kwargs):
        built(self, **kwargs)
        self.patch_size = None

    with monkeypatch.context() as patch:
        patch.setattr(module.TokenViT, "__init__", forget_patch)
        with pytest.raises(UserError, match=r"patch_size of TokenViT is None, and --objective tok"):
            training.train(with_options(ours, mixtoken=False))
    for name in ("pit_ti_224", "crossvit_9_240"):
        size = 240 if name == "crossvit_9_240" else 32
        with pytest.raises(
            UserError, match=rf"{name}: its features are .*, or train with the objective relabel"
        ):
            training.train(with_options(ours, model=name, size=size))
