"""Verify .beton files: read every byte that has a checksum and decode every image.

densefeed beton verify train.beton val.beton
"""

if not __package__:
    import script_start  # noqa: F401

import tyro

from densefeed.storage.beton import verify_files
from densefeed.system.errors import run


def command() -> None:
    """Run `densefeed beton`."""
    commands = {"verify": verify_files}
    run(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))


if __name__ == "__main__":
    command()
