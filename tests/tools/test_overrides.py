"""Options of commands that others override, or that have no effect beside the others."""

import importlib
import re
from types import SimpleNamespace

import pytest

from densefeed.system.errors import UserError
from densefeed.system.options import check_known, named_options
from densefeed.tools import advise
from densefeed.tools.explain import Explanations, find_images
from densefeed.tools.report import Report
from densefeed.tools.report import main as report

AUDIT = "audit", "maps.h5"
EXPLAIN = "explain", "run", "--out", "page.html", "--images", "a.jpg"
IMPORT = "import_labels", "--labels", "pack", "--data", "photos", "--out", "maps.h5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*AUDIT, "--dataset", "cifar10"), "--dataset has no effect without --data; remove it, or"),
        ((*AUDIT, "--split", "train"), "--split has no effect without --data"),
        ((*AUDIT, "--max-pixels", 10**6), "--max-pixels has no effect without --data"),
        ((*AUDIT, "--data", "x", "--model", "resnet18"), "--model has no effect without --teacher"),
        ((*AUDIT, "--input-size=96"), "--input-size has no effect without --teacher"),
        ((*AUDIT, "--images", 300), "--images has no effect without --teacher"),
        ((*AUDIT, "--threads", 1), "--threads has no effect without --teacher"),
        ((*AUDIT, "--device", "cpu"), "--device has no effect without --teacher"),
        ((*EXPLAIN, "--split", "val"), "--split has no effect without a folder among --images"),
        (
            (*EXPLAIN, "--network", "agent", "--weights", "ema"),
            "--weights has no effect beside --network; give one of the two",
        ),
        (
            ("explain", "resnet18", *EXPLAIN[2:], "--weights", "raw"),
            "--weights has no effect without a checkpoint",
        ),
        ((*IMPORT, "--reference-model", "x"), "--reference-model has no effect without --referenc"),
        ((*IMPORT, "--reference-size", 96), "--reference-size has no effect without --reference"),
        ((*IMPORT, "--audit-images", 300), "--audit-images has no effect without --reference"),
        (
            (*IMPORT, "--reference", "resnet18", "--no-audit"),
            "--reference has no effect beside --no-audit; give one of the two",
        ),
    ],
)
def test_outside_option_without_effect_is_refused(words, message, monkeypatch, tmp_path, capsys):
    """Before anything is read: none of these files exists."""
    monkeypatch.chdir(tmp_path)
    name, *others = words
    monkeypatch.setattr("sys.argv", [name, *map(str, others)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"densefeed.tools.{name}").command()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "words",
    [
        (*IMPORT, "--reference", "x", "--no-audit", "--axes", "find"),
        (*IMPORT, "--no-audit"),
        (*AUDIT, "--data", "photos", "--split", "val", "--teacher", "x", "--images", 20),
        (*EXPLAIN, "--weights", "raw"),
    ],
)
def test_outside_options_with_an_effect_are_accepted(words, monkeypatch, tmp_path, capsys):
    """The commands end where they read the first file."""
    monkeypatch.chdir(tmp_path)
    name, *others = words
    monkeypatch.setattr("sys.argv", [name, *map(str, others)])
    with pytest.raises(SystemExit):
        importlib.import_module(f"densefeed.tools.{name}").command()
    assert "has no effect" not in capsys.readouterr().err


def test_outside_boxes_without_dense_labels_are_refused(micro, tmp_path):
    import densefeed.train as training

    boxes = tmp_path / "boxes.json"
    boxes.write_text("{}")
    training.train(micro(tmp_path / "run", objective="ce", mixtoken=False, epochs=1))
    with pytest.raises(UserError, match="--boxes has no effect without a run that has dense label"):
        report(Report(runs=(tmp_path / "run",), boxes=boxes))


def test_outside_a_split_that_is_not_read_is_named(folder, tmp_path, capsys):
    """The folder of one split holds no others."""
    for split, count in (("val", 0), ("train", 1)):
        options = Explanations(
            source="x", images=(folder / "train",), out=tmp_path / "x.html", split=split
        )
        find_images(options, SimpleNamespace(divided=None))
        assert capsys.readouterr().err.count("--split train is not read") == count


def test_outside_advise_keeps_the_loader_and_the_threads_that_are_given(micro, tmp_path):
    words = ["--loader", "ffcv", "--threads=1", "--val=v", "--out", "r"]
    config = micro(tmp_path / "r", threads=1)
    loaders = advise.open_loaders(config.data, config.optim.batch, named_options(words))
    assert list(loaders) == [("ffcv", 1)]
    for loader in loaders.values():
        loader.close()
    speed = advise.Throughput(100.0, 0.5)
    choice = advise.Candidate("ffcv", 1, speed)
    advice = advise.Advice(choice, 90.0, "step")
    text = advise.recommend(advice, speed, ["lvvit_micro_ce", *words], packed=True)
    want = "`densefeed train lvvit_micro_ce --loader ffcv --threads=1 --val=v --out r` trains about"
    assert text.startswith(want)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pack_dataset", "--dta", "x"), "unknown option --dta; try --data, .* or see densefeed"),
        (("train", "quickstart_ce", "--epoch", "3"), "unknown option --epoch; try --epochs, "),
        (("train", "quickstart_ce", "--qqqq"), "unknown option --qqqq; see densefeed"),
    ],
)
def test_outside_unknown_options_are_one_sentence_with_the_nearest(
    monkeypatch, capsys, words, message
):
    name, *rest = words
    module = importlib.import_module(f"densefeed.{'' if name == 'train' else 'tools.'}{name}")
    monkeypatch.setattr("sys.argv", [f"densefeed {name}", *rest])
    with pytest.raises(SystemExit) as ended:
        module.command()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert re.match(f"error: {message}", printed)
    assert printed.count("\n") == 1


def test_outside_known_options_may_be_negated_or_have_a_value_behind_them():
    words = ["--no-mixtoken", "--size=96", "--help", "-h", "x", "--tyro-print-completion", "bash"]
    check_known(words, ["mixtoken", "size"], "x")
    with pytest.raises(UserError, match="unknown option --no-mix; try --mixtoken"):
        check_known(["--no-mix"], ["mixtoken"], "x")
