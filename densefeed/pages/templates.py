"""Templates of self-contained HTML pages, which stand beside this file, and pictures in them."""

import base64
import io
from pathlib import Path

import jinja2
from markupsafe import Markup
from PIL import Image

from densefeed.system.terminal import escape_controls

# The colors of Okabe and Ito but black, which color-blind readers can tell apart, and three more.
INKS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#d55e00",
    "#cc79a7",
    "#0072b2",
    "#b2df8a",
    "#ff7f7f",
    "#9e9ac8",
)


def escape_text(value: object) -> object:
    """Write the control characters of a text visibly: HTML allows none, and some change its order.

    What a template made itself, a Markup, stays.
    """
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return escape_controls(value) if is_text else value


# The templates of this folder; an undefined name in one is an error.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    # Names of files and classes may contain HTML.
    autoescape=True,
    finalize=escape_text,
    undefined=jinja2.StrictUndefined,
)


def picture(image: Image.Image, kind: str) -> str:
    """Encode an image as a data URL: PNG, which is lossless and ignores the quality, or JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True, quality=82)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()
