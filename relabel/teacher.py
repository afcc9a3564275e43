"""A teacher: any timm model as a dense scorer. It owns its preprocessing and says which Window of the image it saw."""

import hashlib

import torch
from PIL import Image
from torch import Tensor, nn

from .files import UserError
from .geometry import Geometry, Look, crop_in_pixels, window_of

INTERPOLATIONS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA if there is one, else the CPU. UserError if it cannot be used."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}); take auto, cpu or cuda"
        ) from error
    return device


class Teacher(nn.Module):
    """Wraps a timm classifier so that it gives logits for every cell of its feature map.

    Args:
        model: a timm model whose `forward_features` keeps space: `[N, C, h, w]`, `[N, h, w, C]` or `[N, T, C]` tokens.
        input_size: side of the square input, pixels.
        geometry: `squash` shows the whole image, its aspect ratio lost; `centre-crop` its centre square.
        config: timm's data config of the model: `mean`, `std`, `interpolation`.
    """

    def __init__(self, model: nn.Module, input_size: int, geometry: Geometry, config: dict) -> None:
        super().__init__()
        self.model = model.eval()
        self.input_size, self.geometry = input_size, geometry
        self.interpolation = INTERPOLATIONS[config["interpolation"]]
        self.register_buffer("mean", torch.tensor(config["mean"]).view(1, 3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(config["std"]).view(1, 3, 1, 1) * 255)

    def window(self, height: int, width: int) -> tuple[float, float, float, float]:
        """The Window of an image of this size, pixels, that its map covers."""
        return window_of(self.geometry, height, width)

    def looks(self, height: int, width: int) -> list[Look]:
        """What to show the teacher of an image of this size, pixels: as many Looks for every image."""
        return [Look(crop_in_pixels(self.window(height, width), height, width), flip=False)]

    @torch.no_grad()
    def forward(self, image_NLHWC: Tensor) -> Tensor:
        """Logits of every cell, float32 `[N, S, S, K]`, of uint8 images `[N, L, size, size, 3]`: their L looks, as `looks` has them.

        The classifier, bias included, is applied at each position as if that position were the whole image, so the mean
        over positions of a linear head is the model's own answer.
        """
        image_NCHW = (image_NLHWC.squeeze(1).permute(0, 3, 1, 2).float() - self.mean) / self.std
        if hasattr(self.model, "forward_token_logits"):
            return self.model.forward_token_logits(image_NCHW).permute(0, 2, 3, 1).float()
        features = self.model.forward_features(image_NCHW)
        return self._score(features).float()

    def _score(self, features: Tensor) -> Tensor:
        model, count = self.model, len(features)
        if features.ndim == 4 and features.shape[1] == model.num_features:  # N C h w
            height, width = features.shape[2:]
            cells = features.permute(0, 2, 3, 1).reshape(-1, model.num_features, 1, 1)
        elif features.ndim == 4 and features.shape[3] == model.num_features:  # N h w C
            height, width = features.shape[1:3]
            cells = features.reshape(-1, 1, 1, model.num_features)
        elif features.ndim == 3:  # N T C
            prefix = getattr(model, "num_prefix_tokens", 0)
            tokens = features[:, prefix:]
            height = width = round(tokens.shape[1] ** 0.5)
            # A head that averages skips the prefix, one that reads the class token takes the first: this serves both.
            cells = tokens.reshape(-1, 1, tokens.shape[2]).expand(-1, prefix + 1, -1)
        else:
            raise UserError(
                f"{type(model).__name__} gives features of shape {tuple(features.shape)}; a teacher must keep space"
            )
        if height != width or height * width * count != len(cells):
            raise UserError(f"{type(model).__name__} does not give a square map of cells; choose another teacher or input size")
        return model.forward_head(cells).view(count, height, width, -1)


def weights_hash(model: nn.Module) -> str:
    """First 16 hexadecimal digits of the SHA-256 over all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
