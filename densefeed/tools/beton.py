"""Verify .beton files: read every byte that has a checksum and decode every image.

python tools/beton.py verify train.beton val.beton
"""

import tyro

from densefeed.storage.beton import verify_files
from densefeed.system.errors import name_commands, run


def command() -> None:
    """Run the console script `densefeed-beton`."""
    run(
        lambda: tyro.extras.subcommand_cli_from_dict(
            {"verify": verify_files}, description=name_commands(__doc__)
        )
    )


if __name__ == "__main__":
    command()
