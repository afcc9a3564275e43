"""Verify, convert or merge files of score maps (HDF5).

    python tools/score_maps.py verify maps.h5
    python tools/score_maps.py convert maps.h5 --form compact --out small.h5
    python tools/score_maps.py merge maps.h5

The options of a command are in its own --help.
"""

import tyro

from densefeed.storage.maintenance import convert_file, verify_files
from densefeed.storage.shards import merge_files
from densefeed.system.errors import name_commands, run

COMMANDS = {"verify": verify_files, "convert": convert_file, "merge": merge_files}


def command() -> None:
    """Run the console script `densefeed-score-maps`."""
    run(lambda: tyro.extras.subcommand_cli_from_dict(COMMANDS, description=name_commands(__doc__)))


if __name__ == "__main__":
    command()
