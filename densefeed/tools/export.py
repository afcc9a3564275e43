"""Export a trained model for timm and the Hugging Face hub (safetensors), or as ONNX.

    densefeed export runs/student --out exported
    densefeed export runs/student --out exported --format both --size 384

`model.safetensors` and `config.json` are the files that timm saves for the hub; upload the folder
as it is. To load it:

    import timm, densefeed  # the import registers our models with timm
    model = timm.create_model("local-dir:exported", pretrained=True)

`model.onnx` (opset 20, or the one that the installed exporter writes) has the input `image`,
float32 `[batch, 3, size, size]`: RGB from 0 to 1, minus the mean, divided by the standard
deviation. As with timm's models, the caller normalizes; the batch is dynamic. The output is
`logits`, float32 `[batch, classes]`. A detector takes one image a call, and its outputs are
`boxes`, `labels`, `scores` and `masks`, see docs/reference/detection.md. The metadata hold, each as
JSON: architecture, size, mean, std, crop_pct, interpolation, and class_names where they are known.
The graph is compared with PyTorch before the file gets its name.

If --size is not the size that the model was trained at, its position table is resampled once, at
export. Our models are trained and evaluated on crops that are resized with an antialiased triangle
filter; config.json calls it `bilinear`, which is the same filter in timm. If several files are
written, all of them are complete before the first one gets its name. A second export to the same
folder at the same time is refused.

--to writes the backbone alone, without head or decoder, as others load it:

    densefeed export runs/swin --to hf-swin --out backbone
    densefeed export runs/swin --to mmdet-swin --out backbone.pth
    densefeed export runs/student --to timm-features --out backbone.safetensors

They are for SwinBackbone of transformers, SwinTransformer of mmdetection and mmsegmentation, and
timm.create_model with features_only; a line says how to load the file. docs/reference/models.md has
what each holds.
"""

if not __package__:
    import script_start  # noqa: F401

import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import safetensors.torch
import timm
import torch
import tyro

# timm's own writer of config.json; its public function, push_to_hf_hub, uploads.
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

from densefeed.models.backbone_layouts import (
    measure_swin,
    shifts_everywhere,
    to_features,
    to_hf_swin,
    to_mm_swin,
)
from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.models.on_backbone import OnBackbone, find_backbone
from densefeed.models.upernet import UperNet
from densefeed.system.errors import BusyError, UserError, first_line, install_extra, make_command
from densefeed.system.files import (
    check_ending,
    check_regular,
    check_utf8,
    make_folder,
    name_errors,
    open_locked,
    replace_file,
    sync,
)
from densefeed.system.options import Options
from densefeed.system.provenance import check_replaceable
from densefeed.system.terminal import print
from densefeed.training.load_model import Trained, Weights, open_trained

if TYPE_CHECKING:
    from onnx import ModelProto

# Packages of the extra `export`.
NEEDED = ("onnx", "onnxscript", "onnxruntime")
ONNX = "model.onnx"
# What a model computes; a detector for one image, see OneImage.
LOGITS = ("logits",)
DETECTED = ("boxes", "labels", "scores", "masks")
# Largest difference between ONNX Runtime and PyTorch, see `compare`.
TOLERANCE = 1e-4
# Batch sizes that are compared, not the one of the trace; of a detector two images.
BATCHES, SINGLE = (1, 3), (1, 1)
# torch.export makes dimensions of 0 and 1 static.
TRACED = 2
# Bytes of weights: a protobuf message is limited to 2 GiB, and the graph itself takes some of it.
ONNX_LIMIT = 2**31 - 2**24


@dataclass(frozen=True, kw_only=True)
class Export(Options):
    """The model to export, and the format."""

    checkpoint: tyro.conf.Positional[Path]  # a checkpoint, or a run folder of densefeed train
    out: Path  # the folder to write; with --to mmdet-swin or timm-features the file
    # safetensors writes config.json too, as timm reads it
    format: Literal["safetensors", "onnx", "both"] = "safetensors"
    # the whole model, or its backbone for others' detectors and segmenters
    to: Literal["classifier", "hf-swin", "mmdet-swin", "timm-features"] = "classifier"
    weights: Weights = "ema"  # EMA weights where the checkpoint has them, or the raw weights
    size: int = 0  # side of the input, pixels; 0: the size the model was trained at
    model: str = ""  # timm's name of the model, for a checkpoint that does not contain it


def preprocessing(trained: Trained) -> dict:
    """Return the preprocessing of the model's input, with timm's names."""
    return {
        "input_size": (3, trained.size, trained.size),
        "mean": trained.mean,
        "std": trained.std,
        "crop_pct": trained.crop_pct,
        "crop_mode": "center",
        "interpolation": trained.interpolation,
    }


def write_config(trained: Trained, path: Path) -> None:
    """Write config.json for `timm.create_model("local-dir:...")` and the hub."""
    # Dropout and drop-path rates belong to a training, and timm does not save them either. A run's
    # overlay of pretrained_cfg (mean and standard deviation) is part of the pretrained_cfg below,
    # and timm does not accept it twice.
    left_out = ("drop_rate", "drop_path_rate", "pretrained_cfg_overlay")
    arguments = {
        name: value for name, value in trained.kwargs.items() if not name.endswith(left_out)
    }
    config = {"pretrained_cfg": preprocessing(trained), "label_names": trained.class_names}
    save_config_for_hf(trained.model, path, model_config=config, model_args=arguments)
    # timm writes a pair of sides. One number means the same, and models with one side (LV-ViT)
    # accept it too. In a dense network the backbone may be built for another size than the input.
    written = json.loads(path.read_text())
    if "img_size" in written.get("model_args", {}):
        dense = isinstance(trained.model, OnBackbone)
        side = arguments.get("img_size", trained.size) if dense else trained.size
        written["model_args"]["img_size"] = side
    path.write_text(json.dumps(written, indent=2) + "\n")


def write_safetensors(trained: Trained, path: Path) -> None:
    """Write the weights under their names in the model."""
    write_state(trained.model.state_dict(), path)


def write_state(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a state dict as safetensors."""
    # safetensors refuses tensors that are not contiguous.
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    # Written by Python rather than by safetensors, so that a full disk raises OSError.
    path.write_bytes(safetensors.torch.save(state, metadata={"format": "pt"}))


def name_backbone(trained: Trained) -> str:
    """Return timm's name of the model, or of the classifier in it."""
    model = find_backbone(trained.model)
    return trained.name if model is trained.model else model.pretrained_cfg["architecture"]


def measure(trained: Trained) -> dict:
    """Return the sizes of a Swin; UserError for another model."""
    return measure_swin(find_backbone(trained.model), f"{trained.path}: {name_backbone(trained)}")


def write_hf_config(trained: Trained, path: Path) -> None:
    """Write config.json for transformers' SwinBackbone, with the outputs of all stages."""
    sizes = measure(trained)
    stages = [f"stage{number + 1}" for number in range(len(sizes["depths"]))]
    config = {"architectures": ["SwinBackbone"], "model_type": "swin", "out_features": stages}
    path.write_text(json.dumps(config | sizes, indent=2) + "\n")


def write_hf_swin(trained: Trained, path: Path) -> None:
    """Write the weights of transformers' SwinBackbone."""
    write_state(to_hf_swin(trained.model), path)


def write_mm_swin(trained: Trained, path: Path) -> None:
    """Write the weights of mmdetection's and mmsegmentation's SwinTransformer."""
    measure(trained)
    buffer = io.BytesIO()
    torch.save(to_mm_swin(trained.model), buffer)
    # torch.save raises RuntimeError for a full disk.
    path.write_bytes(buffer.getvalue())


def write_features(trained: Trained, path: Path) -> None:
    """Write the weights of timm's features_only."""
    model, name = find_backbone(trained.model), name_backbone(trained)
    write_state(to_features(model, f"{trained.path}: {name}", name), path)


def name_loader(trained: Trained, to: str, out: Path) -> str:
    """Return the expression that loads the backbone in `out` with the other package."""
    if to == "hf-swin":
        return f"transformers.SwinBackbone.from_pretrained({str(out)!r})"
    if to == "timm-features":
        stated = {"features_only": True, "checkpoint_path": str(out)}
        args = stated | timm.models.get_model_args(find_backbone(trained.model))
        words = ", ".join(f"{name}={value!r}" for name, value in args.items())
        return f"timm.create_model({name_backbone(trained)!r}, {words})"
    sizes = measure(trained)
    names = {"num_channels": "in_channels", "embed_dim": "embed_dims"}
    words = {names.get(name, name): value for name, value in sizes.items() if name != "image_size"}
    words |= {
        "strides": [sizes["patch_size"]] + [2] * (len(sizes["depths"]) - 1),
        "out_indices": list(range(len(sizes["depths"]))),
        "init_cfg": {"type": "Pretrained", "checkpoint": str(out)},
    }
    return f"backbone={ {'type': 'SwinTransformer'} | words }"


def check_outputs(trained: Trained) -> None:
    """Raise UserError if the logits of noise are not finite, as after a training that diverged."""
    rng = torch.Generator().manual_seed(0)
    image = torch.randn(TRACED, 3, trained.size, trained.size, generator=rng)
    with torch.inference_mode():
        made = trained.model(image)
        finite = [one["finite"] for one in made] if is_detector(trained) else made.isfinite()
        if not all(part.all() for part in finite):
            raise UserError(
                f"{trained.path}: the outputs of its model are not finite; export an older "
                "checkpoint"
            )


class OneImage(nn.Module):
    """A detector of one image, whose outputs are those named DETECTED, `[n, ...]`."""

    def __init__(self, detector: MaskRCNN) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, image_1CHW: Tensor) -> tuple[Tensor, ...]:
        [found] = self.detector(image_1CHW)
        return tuple(found[name] for name in DETECTED)


def is_detector(trained: Trained) -> bool:
    """Return whether the model finds objects, whose number differs between images."""
    return isinstance(trained.model, MaskRCNN)


def check_onnx_packages() -> None:
    """Raise UserError if a package that ONNX export needs is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--format onnx needs {', '.join(missing)}; {install_extra('export')}")


def write_onnx(trained: Trained, path: Path) -> None:
    """Write the model as one ONNX file with metadata. Raises UserError if that is not possible."""
    import onnx

    model, size = trained.model, trained.size
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if weights > ONNX_LIMIT:
        raise UserError(
            f"{trained.path} has {weights:,} bytes of weights, more than one ONNX file can hold; "
            "use --format safetensors"
        )
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        # The exporter's log and warnings are about its passes; `check_onnx` checks the result.
        logger.setLevel(logging.ERROR)
        # A trace that fails prints its graph.
        with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            graph = (trace_detector if is_detector(trained) else export_graph)(model, size)
    # The passes of the exporter raise errors of many types.
    except Exception as error:
        raise UserError(
            f"{trained.name} cannot be written as ONNX ({type(error).__name__}: "
            f"{first_line(error)}); use --format safetensors"
        ) from error
    finally:
        logger.setLevel(level)
    metadata = {
        "architecture": trained.name,
        "size": size,
        "class_names": trained.class_names,
    } | preprocessing(trained)
    stated = {name: json.dumps(value) for name, value in metadata.items() if value != []}
    onnx.helper.set_model_props(graph, stated)
    # One file: ONNX_LIMIT keeps it below the 2 GiB of a protobuf message.
    onnx.save(graph, path)


def export_graph(model: nn.Module, size: int) -> "ModelProto":
    """Return the graph of a classifier, or of a network that classifies pixels."""
    image = torch.zeros(TRACED, 3, size, size)
    shapes = ({0: torch.export.Dim("batch")},)
    # Without strict=True, len() of a tensor makes the batch size static. The model is exported here
    # and not by torch.onnx.export, which would then make the batch size static without a warning.
    program = torch.export.export(model, (image,), dynamic_shapes=shapes, strict=True)
    return torch.onnx.export(
        program,
        (image,),
        input_names=["image"],
        output_names=list(LOGITS),
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    ).model_proto


def trace_detector(model: MaskRCNN, size: int) -> "ModelProto":
    """Return the graph of a detector.

    It is traced: torch.export cannot follow counts of boxes, which the values decide, through
    torchvision's code.
    """
    import onnx

    image, traced = torch.zeros(1, 3, size, size), io.BytesIO()
    torch.onnx.export(
        OneImage(model).eval(),
        (image,),
        traced,
        input_names=["image"],
        output_names=list(DETECTED),
        dynamic_axes={name: {0: "objects"} for name in DETECTED},
        dynamo=False,
    )
    return onnx.load_from_string(traced.getvalue())


def compare(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest difference, in units of the largest wanted number if that is above 1."""
    if got.shape != want.shape:
        return np.inf
    difference = np.abs(got.astype(np.float64) - want).max(initial=0)
    return float(difference / max(1.0, np.abs(want).max(initial=0)))


def check_onnx(trained: Trained, path: Path) -> float:
    """Return the largest difference between ONNX Runtime and PyTorch on noise, see `compare`.

    Raises UserError if it is above TOLERANCE.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng, worst = torch.Generator().manual_seed(0), 0.0
    detects = is_detector(trained)
    model, names = (OneImage(trained.model), DETECTED) if detects else (trained.model, LOGITS)
    for batch in SINGLE if detects else BATCHES:
        image = torch.randn(batch, 3, trained.size, trained.size, generator=rng)
        with torch.inference_mode():
            made = model(image)
        wanted = made if detects else [made]
        for name, want, got in zip(
            names, wanted, session.run(names, {"image": image.numpy()}), strict=True
        ):
            error = compare(got, want.numpy())
            # Written as `not <=`, so that NaN fails too.
            if not error <= TOLERANCE:
                raise UserError(
                    f"{trained.name} has other {name} as ONNX (by {error:.1e} in a batch of "
                    f"{batch}); use --format safetensors"
                )
            worst = max(worst, error)
    return worst


def check_new(files: Iterable[Path]) -> None:
    """Raise UserError if an export would replace one of these files."""
    for path in files:
        check_regular(path)
        if path.exists():
            raise UserError(f"{path} exists already; remove it or choose another --out")


def write_files(trained: Trained, files: Mapping[Path, Callable], out: Path) -> str:
    """Write the files of a folder, config.json first, by their functions; return how ONNX compares.

    No file gets its name before all are complete.
    """
    agreement = ""
    make_folder(out)
    with ExitStack() as stack:
        # Two exports at once could leave the weights of one with the config of the other.
        stack.callback(os.close, open_locked(out, os.O_RDONLY))
        # Another export may have ended since.
        check_new(files)
        parts = {path: stack.enter_context(replace_file(path)) for path in files}
        for path, write in files.items():
            with name_errors(path):
                write(trained, parts[path])
        if out / ONNX in files:
            error = check_onnx(trained, parts[out / ONNX])
            agreement = f"; ONNX within {error:.0e} of PyTorch"
        # The stack names config.json last, so a kill between two names leaves a folder that does
        # not load. A sync that fails must leave no file with a name.
        for path, part in parts.items():
            with name_errors(path):
                sync(part)
    return agreement


def choose_files(export: Export) -> dict[Path, Callable]:
    """Return the files to write, config.json first, and their functions.

    Raises UserError if the options or the names do not fit.
    """
    out, to = export.out, export.to
    check_utf8(out, "--out")
    if to != "classifier" and export.format != "safetensors":
        raise UserError(f"--format {export.format} writes a classifier; leave it or --to {to} out")
    # mmengine reads .pth with torch.load, and timm knows safetensors by the name.
    if to == "mmdet-swin":
        check_ending(out, ".pth", "--out")
        return {out: write_mm_swin}
    if to == "timm-features":
        check_ending(out, ".safetensors", "--out")
        return {out: write_features}
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, and --out must be a folder; choose another --out")
    key = "architectures" if to == "hf-swin" else "architecture"
    check_replaceable(out / "config.json", key, "--out")
    if to == "hf-swin":
        return {out / "config.json": write_hf_config, out / "model.safetensors": write_hf_swin}
    files = {}
    if export.format != "onnx":
        files = {out / "config.json": write_config, out / "model.safetensors": write_safetensors}
    if export.format != "safetensors":
        # Before the model is loaded, which may take long.
        check_onnx_packages()
        files[out / ONNX] = write_onnx
    return files


def main(export: Export) -> list[Path]:
    """Export the model; return the paths of the files."""
    files = choose_files(export)
    [out] = {path.parent for path in files}
    check_new(files)
    named = export.weights, export.model, export.size
    trained = open_trained(export.checkpoint, *named, others=(UperNet, MaskRCNN))
    check_outputs(trained)
    new_folder = not out.exists()
    try:
        agreement = write_files(trained, files, out)
    # Another export made it.
    except BusyError:
        raise
    except BaseException:
        if new_folder:
            # The folder may not have been made yet.
            with suppress(OSError):
                out.rmdir()
        raise
    for path in files:
        print(f"{path}: {path.stat().st_size:,} bytes")
    print(
        f"{trained.name}, {trained.weights} weights, {trained.model.num_classes:,} classes, "
        f"{trained.size} px{agreement}"
    )
    if export.to != "classifier":
        print(f"load it with {name_loader(trained, export.to, export.out)}")
        print(f"its input is RGB from 0 to 1, minus {trained.mean}, divided by {trained.std}")
    shifting = export.to in ("hf-swin", "mmdet-swin")
    if shifting and not shifts_everywhere(find_backbone(trained.model)):
        print(
            f"note: at {trained.size} px a map of the model is one window, which timm does not "
            "shift and this backbone does: its outputs from there on differ from the model's"
        )
    return list(files)


command = make_command(main, Export, __doc__)


if __name__ == "__main__":
    command()
