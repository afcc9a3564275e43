"""Run the ablations of the papers at small scale, on digit scenes.

    densefeed ablations --out ablations --seeds 0 1 2
    densefeed ablations --out ablations --seeds 0 1 2 --rows ce token-label-mixtoken

densefeed/recipes/ablations.py has the rows, table by table of the papers.

Each row trains `lvvit_micro` (or `dhvt_micro`), 4 blocks at 64 pixels, for eight epochs: one to two
minutes on two CPU cores. The rows `vit*` train for forty epochs: six minutes, or fifteen with a
second network. The printed table has the mean and the standard deviation over the seeds, and the
figure of each seed; a seed changes scenes, teacher and students. Finished steps are kept, so an
interrupted call continues; scenes, teacher and score maps are those of `densefeed quickstart
--seeds`. Such short trainings show that a row works and in which direction it may point:
differences within the deviations are inconclusive, and regularizers cost accuracy.
"""

if not __package__:
    import script_start  # noqa: F401

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from densefeed.recipes.ablations import RUNS, TABLES
from densefeed.recipes.digit_flow import DigitOptions, prepare_data
from densefeed.recipes.flow import format_spread, read_top1, train_model
from densefeed.system.errors import UserError, make_command
from densefeed.system.options import Texts
from densefeed.system.terminal import print, print_table


@dataclass(frozen=True, kw_only=True)
class Ablations(DigitOptions):
    """The rows to run."""

    out: Path = Path("ablations")  # folder for everything, with a folder seed-N for each seed
    rows: Texts = tuple(RUNS)  # names of the rows to run


def main(options: Ablations) -> None:
    """Run the rows that are missing and print the table."""
    for name in options.rows:
        if name not in RUNS:
            raise UserError(f"--rows {name}: unknown row; choose from {', '.join(RUNS)}")
    top1 = {name: [] for name in options.rows}
    for seed in options.seeds:
        folder = options.out / f"seed-{seed}"
        packed, val = prepare_data(folder, seed, options)
        data = {"loader": "ffcv", "data": packed, "val": val}
        for name in options.rows:
            # Not in `runs`, where the quickstart's students of the same names are.
            run = folder / "rows" / name
            train_model(run, f"Train the row {name}", RUNS[name], data, seed, options)
            top1[name].append(read_top1(run))
    show(top1, len(options.seeds))


def show(top1: dict[str, list[float]], seeds: int) -> None:
    """Print the accuracies of all seeds, table by table."""
    title = f"Top-1 on digit scenes, {seeds} seed{'s' * (seeds > 1)}"
    table = Table("table", "row", title=title, title_justify="left")
    for column in ("top-1", "each seed"):
        table.add_column(column, justify="right")
    for title, names in TABLES.items():
        chosen = [name for name in names if name in top1]
        for name in chosen:
            each = ", ".join(f"{100 * value:.1f}" for value in top1[name])
            cells = title if name == chosen[0] else "", name, format_spread(top1[name]), each
            table.add_row(*cells, end_section=name == chosen[-1])
    print()
    print_table(table)


command = make_command(main, Ablations, __doc__)


if __name__ == "__main__":
    command()
