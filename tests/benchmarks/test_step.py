"""Small runs of the step benchmark: our step and timm's are the same training, and invalid
options raise.
"""

import csv
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.loss import LabelSmoothingCrossEntropy

from benchmarks import harness, step
from benchmarks.step import StepBenchmark, build_contest, main
from densefeed.models.kernels import four_channels
from densefeed.models.kernels.levers import LEVERS, VARIABLE
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def packed(packed, folder, tmp_path_factory):
    """The small folder's 11 images as .beton files with and without score maps."""
    plain = tmp_path_factory.mktemp("packed") / "plain.beton"
    pack(Packing(data=folder, out=plain))
    return packed[0], plain


def small(**options):
    sizes = {
        "model": "lvvit_micro",
        "batch": 4,
        "size": 32,
        "classes": 30,
        "modes": ("eager",),
        "steps": 2,
        "rounds": 2,
    }
    return StepBenchmark(**{**sizes, "device": "cpu", "threads": 1, "record": False, **options})


def build(**options):
    benchmark = small(**options)
    return build_contest(benchmark, benchmark.classes, CPU, None)


@pytest.mark.slow
def test_document_and_csv_rows(packed, tmp_path, capsys):
    out, results = tmp_path / "out.json", tmp_path / "results.csv"
    main(
        small(
            objective="token-label",
            loader="ffcv",
            data=packed[0],
            json=out,
            record=True,
            results=results,
        )
    )
    document = json.loads(out.read_text())
    assert list(document) == ["rows", "ratios", "data", "environment", "equality"]
    names = ["ours", "ours+labels", "timm", "ours+labels+loader"]
    *rows, wait, first = document["rows"]
    assert [row["name"] for row in rows] == [f"{name}, eager" for name in names]
    assert wait["name"] == "ours+labels+loader waits for data, eager"
    assert 0 < wait["p25"] <= wait["median"] <= wait["p75"] < 1
    assert first["name"] == "ours+labels+loader until the first batch, eager"
    pairs = [("ours", "timm"), ("ours+labels", "ours"), ("ours+labels+loader", "ours+labels")]
    assert [(ratio["a"], ratio["b"]) for ratio in document["ratios"]] == pairs
    for ratio in document["ratios"]:
        assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    rows = list(csv.DictReader(results.open()))
    assert [(row["name"], row["unit"]) for row in rows] == [
        *((f"step {name}, eager", "images/s") for name in names),
        ("step ours+labels+loader waits for data, eager", "ratio"),
        ("step ours+labels+loader until the first batch, eager", "ms"),
        *((f"step {a} / {b}, eager", "ratio") for a, b in pairs),
    ]
    assert {row["runs"] for row in rows} == {"2"}
    assert {row["data"] for row in rows} == {
        "lvvit_micro, 4 images of 32 px, 2 classes, float32; CPU"
    }
    printed = capsys.readouterr().out
    assert "required 0.97" in printed
    assert "eager: losses before and after the first update" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("lvvit_micro", "fp32"),
        ("lvvit_micro", "bf16"),
        ("lvvit_micro", "fp16"),
        ("deit_tiny_patch16_224", "fp32"),
    ],
)
def test_our_step_and_timms_give_the_same_losses(model, precision):
    (found,) = build(model=model, precision=precision).equality
    assert found["rel_error"] < found["bar"]
    # The update changes the loss.
    assert abs(found["ours"][0] - found["ours"][1]) > 5 * found["bar"] * found["ours"][0]


def test_both_steps_drop_the_same_samples(monkeypatch):
    (found,) = build(drop_path=0.9).equality
    assert found["rel_error"] < found["bar"]
    monkeypatch.setattr(step.OurStep, "seed", lambda self, number: number)
    (found,) = build(drop_path=0.9).equality
    assert found["rel_error"] > found["bar"]


def test_another_loss_or_optimizer_is_detected(monkeypatch):
    monkeypatch.setattr(
        step, "LabelSmoothingCrossEntropy", lambda _: LabelSmoothingCrossEntropy(0.2)
    )
    (found,) = build().equality
    assert found["rel_error"] > found["bar"]
    monkeypatch.undo()
    monkeypatch.setattr(
        step,
        "create_optimizer_v2",
        lambda model, opt, **_: torch.optim.SGD(model.parameters(), 1e-4),
    )
    (found,) = build().equality
    # The first loss precedes the update.
    assert found["ours"][0] == pytest.approx(found["timm"][0], rel=1e-6)
    assert found["rel_error"] > found["bar"]


@pytest.mark.slow
def test_compiled_steps_give_the_same_losses(monkeypatch):
    """Graphs are captured but not compiled to code, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    benchmark = small(modes=("compiled", "eager", "compiled", "whole"), rounds=1)
    document = main(benchmark)
    # Our patch embedding, block, heads and loss, timm's network, and our whole step. The second
    # time timm's is compiled already.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 6
    assert [found["mode"] for found in document["equality"]] == ["compiled", "eager", "whole"]
    assert all(found["rel_error"] < found["bar"] for found in document["equality"])
    assert document["equality"][0]["ours"] == pytest.approx(
        document["equality"][1]["ours"], rel=1e-5
    )
    assert [row["name"] for row in document["rows"]] == [
        f"{name}, {mode}" for mode in ("compiled", "eager", "whole") for name in ("ours", "timm")
    ]


@pytest.mark.slow
def test_two_networks_together_and_one_after_the_other():
    """Their ratio is one of times: (model + agent) / both. One that shares weights is not alone."""
    options = {
        "model": "bootstrapping_vit_micro",
        "variants": ("bootstrap=shared", "bootstrap=joint"),
    }
    shared, joint = (f"ours+{word}" for word in options["variants"])
    contest = build(**options)
    assert [name for name, _ in contest.works] == ["ours", shared, "agent", joint, "timm"]
    assert contest.added == {shared: ["agent"], joint: ["agent"]}
    rates = {
        (name, "eager"): [rate]
        for name, rate in (("ours", 6.0), ("agent", 3.0), (joint, 1.0), ("timm", 1.0))
    }
    (found,) = [ratio for ratio in step.ratios(rates, {joint: ["agent"]}) if ratio["a"] == joint]
    assert (found["b"], found["median"]) == ("ours, then agent", 0.5)
    document = main(small(**options, rounds=1, steps=1))
    assert [ratio["b"] for ratio in document["ratios"]] == ["timm", *["ours, then agent"] * 2]


def test_variants_are_contestants_in_the_same_rounds():
    variant = "drloc=l1,drloc_grid=0"
    document = main(small(size=64, variants=(variant,)))
    names = [f"{name}, eager" for name in ("ours", f"ours+{variant}", "timm")]
    assert [row["name"] for row in document["rows"]] == names
    (ratio,) = (ratio for ratio in document["ratios"] if ratio["a"] == f"ours+{variant}")
    assert ratio["b"] == "ours"


def test_steps_of_sgd_and_sam():
    """From equal weights: the first loss is the same, the second another one after each update."""
    contest = build(variants=("optimizer=sgd", "sam_rho=0.1"), casts=True)
    names = ["ours", "ours+optimizer=sgd", "ours+sam_rho=0.1", "ours+casts", "timm"]
    assert [name for name, _ in contest.works] == names
    for turn in contest.works.values():
        turn(0)
    losses = {name: float(loss) for (name, _), loss in contest.losses.items()}
    assert len({losses[name] for name in names[:3]}) == 3
    rates = {(name, "eager"): [1.0] for name in names[:-1]}
    assert [(one["a"], one["b"]) for one in step.ratios(rates, contest.added)] == [
        ("ours", "ours+casts"),
        ("ours+optimizer=sgd", "ours"),
        ("ours+sam_rho=0.1", "ours"),
    ]


@pytest.mark.parametrize("only", [("ours+labels",), ("timm", "ours+labels+loader")])
def test_outside_only_some_contestants_are_measured(packed, monkeypatch, only):
    """Each other one would compile a network too."""
    built, build_step = [], step.build_step

    def build_and_note(name, *more):
        built.append(name)
        return build_step(name, *more)

    monkeypatch.setattr(step, "build_step", build_and_note)
    options = dict(objective="token-label", only=only, rounds=1)
    document = main(small(**options, loader="ffcv", data=packed[0]))
    rates = [row["name"] for row in document["rows"] if row["unit"] == "images/s"]
    assert sorted(rates) == sorted(f"{name}, eager" for name in only)
    # timm's step draws as ours does; the loader's has a step of its own.
    assert built == (["ours"] if "timm" in only else ["ours+labels"])
    assert document["equality"] == []


def test_outside_the_first_batch_has_a_row_of_its_own(packed):
    document = main(small(loader="ffcv", data=packed[0], only=("ours+loader",)))
    (rate,) = (row for row in document["rows"] if row["unit"] == "images/s")
    (first,) = (row for row in document["rows"] if row["unit"] == "ms")
    assert first["name"] == "ours+loader until the first batch, eager"
    # Two steps of 4 images begin with it.
    assert 0 < first["p25"] < 1000 * 2 * 4 / rate["p25"]
    assert first["runs"] == rate["runs"] == 2


def test_outside_steps_with_a_residual_in_16_bits():
    contest = build(half_residual=True, precision="bf16", only=("ours",))
    config = step.make_config(small(half_residual=True), "ours")
    assert config.model.half_residual
    assert [name for name, _ in contest.works] == ["ours"]


def test_outside_a_gpu_has_a_core_more_than_threads(monkeypatch):
    """Its launching thread would share the cores of decoding."""
    pinned = []
    monkeypatch.setattr(harness, "pin", pinned.append)
    monkeypatch.setattr(harness, "choose_cores", lambda count, allowed: count)
    with harness.use_cores(1, 1):
        assert (torch.get_num_threads(), pinned[0]) == (1, 2)


def test_non_finite_losses_raise(monkeypatch):
    monkeypatch.setattr(step, "RATE", 1e30)
    with pytest.raises(
        UserError, match=r"the loss of ours, eager is (nan|inf); choose another --precision"
    ):
        main(small())


def test_out_of_memory_raises(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step, "first_losses", full)
    with pytest.raises(UserError, match="--batch 4: out of memory on cpu; give a smaller batch"):
        main(small())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch is 0, and must be at least 1"),
        ({"rounds": 0}, "--rounds is 0, and must be at least 1"),
        ({"modes": ()}, "--modes is empty"),
        (
            {"modes": ("captured",), "device": "cpu"},
            "--modes captured: CUDA graphs need a GPU, and the device is cpu",
        ),
        ({"threads": 999}, r"--threads 999: this process may use \d+ cores"),
        ({"data": Path("train.beton")}, "--data needs --loader ffcv, which reads that .beton"),
        (
            {"model": "pit_ti_224", "objective": "token-label"},
            "pit_ti_224: its features are the class token alone",
        ),
        ({"model": "resnet1"}, "timm knows no model 'resnet1'"),
        ({"objective": "token-label", "classes": 2**16 + 1}, "at most 65,536 classes"),
        ({"size": 33}, "cannot be built"),
        (
            {"variants": ("bootstrap=joint",), "model": "nfnet_micro"},
            "it has no blocks of attention",
        ),
        (
            {"only": ("ours+labels",)},
            "--only ours\\+labels: .* without --only they give ours, timm",
        ),
        ({"variants": ("sam",)}, "--variants sam: 'sam' is not NAME=VALUE, as sam_rho=0.1"),
        ({"variants": ("sam=1",)}, "--variants sam=1: Config has no option 'sam'; see densefeed"),
        (
            {"variants": ("drloc=l1",)},
            "--drloc l1 cannot be computed for lvvit_micro: its grid of 4 x 4 is smaller",
        ),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        main(small(**options))


@pytest.mark.slow
def test_without_data_the_loader_reads_generated_crops_a_batch_for_each_step(tmp_path):
    document = main(small(objective="token-label", loader="ffcv", cache=tmp_path))
    assert "ours+labels+loader, eager" in {row["name"] for row in document["rows"]}
    (beton,) = tmp_path.rglob("*.beton")
    assert beton.parent.name == "photographs-8-8"


def test_unsuitable_data_raises(packed, tmp_path):
    with pytest.raises(
        UserError, match=r"plain\.beton has no score maps, which --objective token-label needs"
    ):
        main(small(objective="token-label", loader="ffcv", data=packed[1]))
    with pytest.raises(
        UserError, match=r"--steps 3: .*plain\.beton has 2 whole batches of 4 images"
    ):
        main(small(loader="ffcv", data=packed[1], steps=3))
    with pytest.raises(UserError, match=r"none\.beton"):
        main(small(loader="ffcv", data=tmp_path / "none.beton"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_steps_give_the_same_losses():
    document = main(
        small(
            device="cuda",
            objective="token-label",
            modes=("eager", "compiled", "captured"),
            precision="bf16",
        )
    )
    assert all(found["rel_error"] < found["bar"] for found in document["equality"])


def test_outside_the_stem_under_test_is_the_one_that_is_measured(tmp_path, monkeypatch):
    """The constant batch had three channels, with which it is the plain convolution."""
    seen, convolve = set(), four_channels.convolve

    def watch(x_NCHW, *weights):
        seen.add(x_NCHW.shape[1])
        return convolve(x_NCHW, *weights)

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(four_channels, "convolve", watch)
    options = dict(levers=("four-channels",), only=("ours",), steps=1, rounds=1)
    main(small(results=tmp_path / "rows.csv", **options))
    assert seen == {4}


def test_outside_rows_name_the_forms_under_test(tmp_path, monkeypatch):
    """They would look like rows of the plain step, and the variable would stay for the next."""
    monkeypatch.delenv(VARIABLE, raising=False)
    results, used = tmp_path / "rows.csv", []
    monkeypatch.setitem(LEVERS, "gelu", used.append)
    for levers in ((), ("gelu",)):
        options = dict(levers=levers, only=("ours",), steps=1, rounds=1, record=True)
        main(small(results=results, **options))
    plain, other = (row["data"] for row in csv.DictReader(results.open()))
    assert len(used) == 1
    assert VARIABLE not in plain
    assert f"float32, {VARIABLE}=gelu; CPU" in other
    assert VARIABLE not in os.environ
