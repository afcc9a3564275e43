"""A model of your own with a head on every token: timm's ViT and a second classifier.

python model.py lvvit_micro_token_label --model token_vit --model-kwargs --no-mixtoken --data ...
"""

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from densefeed import train
from densefeed.models.token_transformer import TokenLogits

# Mean and deviation of the input; timm sets them as `pretrained_cfg`.
default_cfgs = generate_default_cfgs({"token_vit": {"mean": (0.5,) * 3, "std": (0.5,) * 3}})


class TokenViT(VisionTransformer):
    """A vision transformer with a second classifier, for `--objective token-label`."""

    patch_size = 8  # pixels along a token

    def __init__(self, token_head: bool = False, **kwargs) -> None:
        super().__init__(patch_size=self.patch_size, embed_dim=96, depth=4, num_heads=3, **kwargs)
        self.with_token_head = token_head
        if token_head:
            self.token_head = nn.Linear(self.embed_dim, self.num_classes)

    def forward(self, image_NCHW: Tensor) -> Tensor | TokenLogits:
        """Return logits `[N, K]`; in training, with the head, also `[N, T, K]` row by row."""
        x_NTD = self.forward_features(image_NCHW)
        cls_NK = self.forward_head(x_NTD)
        if not (self.training and self.with_token_head):
            return cls_NK
        return TokenLogits(cls_NK, self.token_head(x_NTD[:, self.num_prefix_tokens :]))


@register_model
def token_vit(pretrained: bool = False, **kwargs) -> TokenViT:
    """Build the model."""
    return build_model_with_cfg(TokenViT, "token_vit", pretrained, **kwargs)


if __name__ == "__main__":
    train.command()
