"""A trained model in formats that others read: safetensors with a config.json for timm and the
Hugging Face hub, and ONNX.

    python tools/export.py runs/student --out exported
    python tools/export.py runs/student --out exported --format both --size 384

`model.safetensors` and `config.json` are what timm saves for the hub; upload the folder as it is.
Read it with

    import timm, densefeed.models.checkpoints            # the import makes our models known to timm
    model = timm.create_model("local-dir:exported", pretrained=True)

`model.onnx` (opset 20 or what the installed exporter writes) takes `image`, float32 `[batch, 3,
size, size]`, RGB from 0 to 1 less the mean and divided by the standard deviation, as timm's models
do, so normalizing is the caller's; any batch. It gives `logits`, float32 `[batch, classes]`. Its
metadata hold what the caller needs: architecture, size, mean, std, crop_pct, interpolation, and
class_names where they are known, each as JSON. It is compared with PyTorch before it gets its name.

At another --size than the model was trained for its position table is resampled once, here. A model
of ours was trained and judged on crops resized with an antialiased triangle; the config says
`bilinear`, which is that in timm. Where several files are written, all of them are whole before the
first gets its name.
"""

import importlib.util
import json
import logging
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import safetensors.torch
import torch
import tyro
from timm.models._hub import (
    save_config_for_hf,  # timm's own writer; its public door, push_to_hf_hub, uploads
)

from densefeed.system.errors import UserError, run
from densefeed.system.files import name_errors, replace_file
from densefeed.tools.load_model import Trained, Weights, open_trained

NEEDED = ("onnx", "onnxscript", "onnxruntime")  # of the dependency group `export`
ONNX = "model.onnx"
TOLERANCE = 1e-4  # between ONNX Runtime and PyTorch, of the largest logit where that is above 1
BATCHES = (1, 3)  # that are compared; neither is the one that the graph is traced with
TRACED = 2
# bytes: a protobuf message ends at 2 GiB, and the graph itself takes some
ONNX_LIMIT = 2**31 - 2**24


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to export."""

    checkpoint: Annotated[Path, tyro.conf.Positional]  # a checkpoint, or a run folder of train.py
    out: Path  # the folder to write
    # safetensors: config.json too, as timm reads them
    format: Literal["safetensors", "onnx", "both"] = "safetensors"
    weights: Weights = "ema"  # averaged weights where the checkpoint has them, or the raw ones
    size: int = 0  # side of the input, pixels; 0: what the model was trained for
    model: str = ""  # timm's name of the model, for a checkpoint that does not say


def preprocessing(trained: Trained) -> dict:
    """What the model takes, in timm's words."""
    return {
        "input_size": (3, trained.size, trained.size),
        "mean": trained.mean,
        "std": trained.std,
        "crop_pct": trained.crop_pct,
        "crop_mode": "center",
        "interpolation": trained.interpolation,
    }


def write_config(trained: Trained, path: Path) -> None:
    """config.json as `timm.create_model("local-dir:...")` and the hub read it."""
    # Rates of dropping belong to a training, and timm leaves them out of what it saves too. What a
    # run put over pretrained_cfg (mean and deviation of its own) is in the one below, and timm
    # takes it only once.
    left_out = ("drop_rate", "drop_path_rate", "pretrained_cfg_overlay")
    arguments = {
        name: value for name, value in trained.kwargs.items() if not name.endswith(left_out)
    }
    config = {"pretrained_cfg": preprocessing(trained), "label_names": trained.class_names}
    save_config_for_hf(trained.model, str(path), model_config=config, model_args=arguments)
    # timm writes a pair of sides; one number says the same, and models of one side (LV-ViT) take it
    # too.
    told = json.loads(path.read_text())
    if "img_size" in told.get("model_args", {}):
        told["model_args"]["img_size"] = trained.size
    path.write_text(json.dumps(told, indent=2) + "\n")


def write_safetensors(trained: Trained, path: Path) -> None:
    """The weights under their names in the model."""
    state = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    # Through Python's own file: a full disk is an OSError there.
    path.write_bytes(safetensors.torch.save(state, metadata={"format": "pt"}))


def check_onnx_packages() -> None:
    """UserError if a package is missing that ONNX needs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx needs {', '.join(missing)}; run `pip install {' '.join(missing)}`"
        )


def write_onnx(trained: Trained, path: Path) -> None:
    """The model as one ONNX file with its metadata. UserError if its graph cannot be written so."""
    model, size = trained.model, trained.size
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if weights > ONNX_LIMIT:
        raise UserError(
            f"{trained.path} holds {weights:,} bytes of weights, more than one ONNX file can; take --format safetensors"
        )
    image = torch.zeros(TRACED, 3, size, size)
    shapes = ({0: torch.export.Dim("batch")},)
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    try:
        quiet.setLevel(logging.ERROR)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Strict, because otherwise len() of a tensor fixes the batch; and here rather than in
            # torch.onnx.export, which would then fix the batch without a word.
            program = torch.export.export(model, (image,), dynamic_shapes=shapes, strict=True)
            onnx = torch.onnx.export(
                program,
                (image,),
                input_names=["image"],
                output_names=["logits"],
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises what its passes raise, of many kinds
        why = str(error).partition("\n")[0]
        raise UserError(
            f"{trained.name} cannot be written as ONNX ({type(error).__name__}: {why}); take --format safetensors"
        ) from error
    finally:
        quiet.setLevel(level)
    told = {
        "architecture": trained.name,
        "size": size,
        "class_names": trained.class_names,
    } | preprocessing(trained)
    onnx.model.metadata_props.update(
        {name: json.dumps(value) for name, value in told.items() if value != []}
    )
    onnx.save(str(path), external_data=False)


def check_onnx(trained: Trained, path: Path) -> float:
    """The largest difference of a logit between ONNX Runtime and PyTorch, on noise. UserError if it
    is above TOLERANCE.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng, worst = torch.Generator().manual_seed(0), 0.0
    for batch in BATCHES:
        image = torch.randn(batch, 3, trained.size, trained.size, generator=rng)
        with torch.inference_mode():
            want = trained.model(image).numpy()
        (said,) = session.run(["logits"], {"image": image.numpy()})
        away = float(np.abs(said - want).max()) if said.shape == want.shape else np.inf
        if not away <= TOLERANCE * max(1.0, float(np.abs(want).max())):  # a NaN is no agreement
            raise UserError(
                f"{trained.name} says other logits as ONNX (by {away:.1e} in a batch of {batch}); take --format safetensors"
            )
        worst = max(worst, away)
    return worst


def main(export: Export) -> list[Path]:
    """Export; returns the files."""
    if export.out.exists() and not export.out.is_dir():
        raise UserError(
            f"{export.out} is a file, and --out a folder to write into; choose another --out"
        )
    as_onnx, as_tensors = (
        export.format in ("onnx", "both"),
        export.format in ("safetensors", "both"),
    )
    if as_onnx:
        check_onnx_packages()
    trained = open_trained(export.checkpoint, export.weights, export.model, export.size)
    writers = (
        {"model.safetensors": write_safetensors, "config.json": write_config} if as_tensors else {}
    )
    writers |= {ONNX: write_onnx} if as_onnx else {}
    files = {export.out / name: write for name, write in writers.items()}
    fresh, said = not export.out.exists(), ""
    try:
        with ExitStack() as stack:
            parts = {path: stack.enter_context(replace_file(path)) for path in files}
            for path, write in files.items():
                with name_errors(path):
                    write(trained, parts[path])
            if as_onnx:
                said = (
                    f"; ONNX within {check_onnx(trained, parts[export.out / ONNX]):.0e} of PyTorch"
                )
    except BaseException:
        if fresh:
            with suppress(OSError):  # it may not have been made yet
                export.out.rmdir()
        raise
    for path in files:
        print(f"{path}: {path.stat().st_size:,} bytes")
    print(
        f"{trained.name}, {trained.weights} weights, {trained.model.num_classes:,} classes, {trained.size} px{said}"
    )
    return list(files)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Export, description=__doc__)))
