"""The model families; importing this package registers every model with timm."""

from densefeed.models import agent_cnn, cvt, dhvt, lvvit, mask_rcnn, nfnet, t2t, upernet, vit  # noqa: F401
