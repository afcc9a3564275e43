"""The command `densefeed`: its subcommands, in the order of the flow."""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from densefeed.system.errors import UserError, run
from densefeed.system.terminal import print

PACKAGE = Path(__file__).parents[1]
# The module of each subcommand, which has a function `command`. `sys.argv` are its words.
COMMANDS = {
    "quickstart": "tools.quickstart",
    "photos": "tools.photos",
    "scenes": "tools.make_digit_scenes",
    "photo-scenes": "tools.make_photo_scenes",
    "label": "tools.relabel_imagenet",
    "import": "tools.import_labels",
    "score-maps": "tools.score_maps",
    "audit": "tools.audit",
    "pack": "tools.pack_dataset",
    "beton": "tools.beton",
    "advise": "tools.advise",
    "costs": "tools.model_costs",
    "train": "train",
    "ablations": "tools.ablations",
    "report": "tools.report",
    "validate": "tools.validate",
    "explain": "tools.explain",
    "export": "tools.export",
    "export-labels": "tools.export_labels",
}


def main() -> None:
    """Call the subcommand that the command line names, or list all of them."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        call(*sys.argv[1:])
    else:
        run(lambda: list_commands(name))


def call(name: str, *words: str) -> None:
    """Do in this process what `densefeed NAME WORDS` does."""
    sys.argv = [f"densefeed {name}", *words]
    import_module(f"densefeed.{COMMANDS[name]}").command()


def list_commands(name: str) -> None:
    """Print a line for each subcommand, or the version. UserError for the `name` of none."""
    if name == "--version":
        # It imports PyTorch, which help does not need.
        from densefeed.system.provenance import own_version

        print(f"densefeed {own_version()}")
        return
    if name not in ("-h", "--help"):
        like = get_close_matches(name, COMMANDS, cutoff=0.5)
        near = f"try {', '.join(like)}, or see" if like else "see all with"
        raise UserError(f"densefeed has no command {name!r}; {near} densefeed --help")
    print("usage: densefeed COMMAND ...")
    print()
    for command, module in COMMANDS.items():
        print(f"  {command:<15}{read_summary(module)}")
    print()
    print("`densefeed COMMAND --help` prints the options of a command; there is --version too.")


def read_summary(module: str) -> str:
    """Return the first line of a module's docstring without importing it, which takes 2 s."""
    with open(PACKAGE / f"{module.replace('.', '/')}.py", encoding="utf-8") as file:
        return file.readline().strip().strip('"')
