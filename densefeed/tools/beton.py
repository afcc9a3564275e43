"""Verify .beton files and folders of images: decode all, and list what is damaged.

    densefeed beton verify train.beton val.beton
    densefeed beton verify imagenet/train imagenet/val

Of a .beton every byte that has a checksum is read. A JPEG in a folder has none: damage shows where
it breaks the code of the compressed data, and libjpeg warns of bytes that are left over.
"""

if not __package__:
    import script_start  # noqa: F401

import tyro

from densefeed.storage.beton_verify import verify_files
from densefeed.system.errors import run

COMMANDS = {"verify": verify_files}


def command() -> None:
    """Run `densefeed beton`."""
    run(lambda: tyro.extras.subcommand_cli_from_dict(COMMANDS, description=__doc__))


if __name__ == "__main__":
    command()
