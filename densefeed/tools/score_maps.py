"""Verify, convert or merge score maps; show the progress of workers, or let them redo images.

    python tools/score_maps.py verify maps.h5
    python tools/score_maps.py convert maps.h5 --form compact --out small.h5
    python tools/score_maps.py merge maps.h5
    python tools/score_maps.py status maps
    python tools/score_maps.py redo maps cat/001.jpg

The options of a command are in its own --help.
"""

import tyro

from densefeed.storage.maintenance import convert_file, verify_files
from densefeed.storage.shard_plan import print_status, redo_images
from densefeed.storage.shards import merge_files
from densefeed.system.errors import name_commands, run

COMMANDS = {
    "verify": verify_files,
    "convert": convert_file,
    "merge": merge_files,
    "status": print_status,
    "redo": redo_images,
}


def command() -> None:
    """Run the console script `densefeed-score-maps`."""
    run(lambda: tyro.extras.subcommand_cli_from_dict(COMMANDS, description=name_commands(__doc__)))


if __name__ == "__main__":
    command()
