"""Verify, convert, merge, select or fetch score maps; show progress, redo images.

    densefeed score-maps verify maps.h5
    densefeed score-maps convert maps.h5 --form compact --out small.h5
    densefeed score-maps merge part-0 part-1 --out maps.h5
    densefeed score-maps select maps.h5 --data tars --out maps-of-tars.h5
    densefeed score-maps status maps
    densefeed score-maps redo maps cat/001.jpg
    densefeed score-maps fetch s3://bucket/maps maps

The options of a command are in its own --help.
"""

if not __package__:
    import script_start  # noqa: F401

from pathlib import Path

import tyro

from densefeed.relabel.accuracy import print_accuracy
from densefeed.storage.fetch import fetch
from densefeed.storage.maintenance import convert_file, summary, verify_files
from densefeed.storage.selection import select_maps
from densefeed.storage.shard_plan import print_status, redo_images
from densefeed.storage.shards import merge_folders
from densefeed.system.errors import UserError, run
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import Location
from densefeed.system.terminal import print


def fetch_store(url: Location, out: Path, /) -> None:
    """Copy the finished store at URL to the folder OUT, for training and all other commands.

    Run it again to continue an interrupted copy, or to copy what has changed.

    Args:
        url: the store, s3://BUCKET/FOLDER.
        out: the folder of the copy.
    """
    if not isinstance(url, ObjectURL):
        raise UserError(f"{url} is not a URL; name s3://BUCKET/FOLDER, and a folder for the copy")
    store = fetch(url, out)
    print(summary(store))
    # Images with masks have no labels, and all are stored as those of class 0.
    if store.labels.any():
        print_accuracy(store)


COMMANDS = {
    "verify": verify_files,
    "convert": convert_file,
    "merge": merge_folders,
    "select": select_maps,
    "status": print_status,
    "redo": redo_images,
    "fetch": fetch_store,
}


def command() -> None:
    """Run `densefeed score-maps`."""
    run(lambda: tyro.extras.subcommand_cli_from_dict(COMMANDS, description=__doc__))


if __name__ == "__main__":
    command()
