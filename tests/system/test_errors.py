"""Messages name the commands that a user has: scripts in a checkout, else those of the package."""

import pytest

from densefeed.system import errors
from densefeed.system.errors import UserError, installed_commands, name_commands


@pytest.fixture
def installed(monkeypatch):
    commands = {
        "densefeed.train": "densefeed-train",
        "densefeed.tools.pack_dataset": "densefeed-pack",
    }
    monkeypatch.setattr(errors, "installed_commands", lambda: commands)


@pytest.mark.parametrize(
    ("checkout", "package"),
    [
        ("pack it with tools/pack_dataset.py", "pack it with densefeed-pack"),
        ("    python tools/pack_dataset.py --out a", "    densefeed-pack --out a"),
        ("name a run folder of train.py", "name a run folder of densefeed-train"),
        ("python tools/crop_figure.py a", "python -m densefeed.tools.crop_figure a"),
        (
            "    torchrun --nproc-per-node 8 train.py ...\n    python train.py R",
            "    torchrun --nproc-per-node 8 -m densefeed.train ...\n    densefeed-train R",
        ),
        ("/data/tools/pack_dataset.py and my/train.py", None),
        ("retrain.py, tools/pack_dataset.pyc and pack_dataset.py", None),
    ],
)
def test_an_installed_package_names_its_commands(installed, checkout, package):
    assert name_commands(checkout) == (package or checkout)
    assert str(UserError(checkout)) == (package or checkout)


def test_a_checkout_names_its_scripts():
    assert installed_commands() == {}
    assert str(UserError("see tools/pack_dataset.py")) == "see tools/pack_dataset.py"
