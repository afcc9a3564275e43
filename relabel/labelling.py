"""The pass: every image once through the teacher, its top-k logits per cell into the store."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from .files import UserError
from .forms import Form
from .images import Images, decode
from .prefetch import ordered_map
from .progress import bar
from .store import Absent, ScoreMaps, ScoreMapStore, ScoreMapWriter, StoreHeader, undone_batches
from .teacher import Teacher, weights_hash
from .upkeep import convert


def label_images(
    images: Images, teacher: Teacher, name: str, out: Path, top_k: int, batch: int, threads: int, absent: Absent,
    form: Form = "raw",
) -> ScoreMapStore:  # fmt: skip
    """Label every image that `out` does not hold yet and return the finished store.

    Work is written batch by batch, so a killed run continues at its first undone row. Another `form` than raw is made at the
    end, of the raw rows in `<out>.part`. UserError names an image that cannot be read, and says so if `top_k` exceeds the
    teacher's classes.
    """
    device = teacher.mean.device
    example = torch.zeros(1, *teacher.shape, dtype=torch.uint8, device=device)
    try:
        _, side, _, num_classes = teacher(example).shape
    except (AssertionError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name} does not take images of {teacher.input_size} px ({said}); choose another --input-size"
        ) from error
    if top_k < 1 or batch < 1 or threads < 1:
        raise UserError("--top-k, --batch and --threads must be at least 1")
    if top_k > num_classes:
        raise UserError(f"--top-k {top_k} is more than the {num_classes} classes of {name}")
    if num_classes > 65535:
        raise UserError(f"{name} has {num_classes} classes; a store numbers at most 65,535")
    if len(images.class_names) != num_classes:
        raise UserError(
            f"{images.root} has {len(images.class_names)} classes but the teacher {name} scores {num_classes}; "
            "choose a teacher of the same classes, or give a --class-map"
        )
    header = StoreHeader(
        side=side, top_k=top_k, num_classes=num_classes, absent=absent,
        teacher=f"{name} {weights_hash(teacher.model)}", input_size=teacher.input_size, geometry=teacher.geometry,
        fingerprint=images.fingerprint(), class_names=tuple(images.class_names),
    )  # fmt: skip
    writer = ScoreMapWriter(out, header, images.paths, images.labels)
    try:
        work = list(undone_batches(writer.done, batch))
        if writer.done.any():
            print(f"{out}: continuing, {int(writer.done.sum())} of {len(images)} images are labelled already")

        def load(index: int) -> tuple[np.ndarray, tuple]:
            return teacher.prepare(decode(images.read(index), images.where(index)))

        with ThreadPoolExecutor(threads) as pool:
            loaded = ordered_map(load, (i for ids in work for i in ids.tolist()), pool, ahead=2 * batch)
            for ids in bar(work, "relabel, batches"):
                pixels, windows = zip(*(next(loaded) for _ in ids), strict=True)
                logits_NSSK = teacher(torch.from_numpy(np.stack(pixels)).to(device))
                writer.write(ids, keep_top(logits_NSSK, top_k, np.array(windows, np.float32)))
        if form == "raw":
            writer.finish()
        else:
            convert(ScoreMapStore(writer.part), out, form)
            writer.part.unlink()
    finally:
        writer.close()
    return ScoreMapStore(out)


def keep_top(logits_NSSK: torch.Tensor, top_k: int, window_N4: np.ndarray) -> ScoreMaps:
    """The rows to store: top-k logits, descending, their classes, and the logsumexp over all classes."""
    if not torch.isfinite(logits_NSSK).all() or logits_NSSK.abs().max() > torch.finfo(torch.float16).max:
        raise UserError("the teacher gave logits that are not finite in float16; check its weights and preprocessing")
    top = logits_NSSK.topk(top_k, dim=-1)
    return ScoreMaps(
        logit=top.values.half().cpu().numpy(),
        cls=top.indices.cpu().numpy().astype(np.uint16),
        lse=logits_NSSK.logsumexp(-1).half().cpu().numpy(),
        window=window_N4,
    )


def stored_accuracy(store: ScoreMapStore, batch: int = 1024) -> float:
    """Top-1 accuracy of the stored maps: the class of the highest mean logit over the cells, against the image labels.

    That mean is what a teacher with a linear head answers itself, so the figure should be close to the teacher's own
    accuracy; if it is not, the maps are wrong. A class that a cell does not name counts there with the logit it is stored
    with: 0, or its even share of the remaining probability (at least 1e-3, below which float16 leaves nothing of it).
    """
    header, right = store.header, 0
    for ids in bar(np.array_split(np.arange(len(store)), -(-len(store) // batch)), "read back"):
        maps = store.rows(ids)
        logit, lse = maps.logit.astype(np.float64), maps.lse.astype(np.float64)
        remainder = np.maximum(1 - np.exp(logit - lse[..., None]).sum(-1), 1e-3) / max(header.num_classes - header.top_k, 1)
        unnamed = lse + np.log(remainder) if header.absent == "tail" else np.zeros_like(lse)
        # Every class begins with the sum of `unnamed` over the cells; where it is named, its own logit takes that place.
        score = np.repeat(unnamed.sum((1, 2))[:, None], header.num_classes, axis=1)
        rows = np.broadcast_to(np.arange(len(ids))[:, None], (len(ids), logit[0].size))
        np.add.at(score, (rows, maps.cls.reshape(len(ids), -1)), (logit - unnamed[..., None]).reshape(len(ids), -1))
        right += int((score.argmax(1) == store.labels[ids]).sum())
    return right / len(store)
