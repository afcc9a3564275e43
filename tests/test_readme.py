"""README's commands, run as a newcomer would in the order in which they stand, on a flow small
enough for a test.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = {
    "tools/quickstart.py": ["--train", "60", "--val", "20", "--epochs", "1"],
    "train.py": ["--epochs", "1"],
}


def commands() -> list[str]:
    """Every line of README's shell blocks that is no comment."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    ]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory, command):
    """A folder with the checkout's files in it, where the quickstart has run in small."""
    home = tmp_path_factory.mktemp("newcomer")
    for path in ROOT.iterdir():
        if path.name not in (".git", "quickstart", "runs", ".venv"):
            (home / path.name).symlink_to(path)
    words = "tools/quickstart.py", "--out", home / "quickstart", *SMALL["tools/quickstart.py"]
    done = command(*words, cwd=home, descendants=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return home, done.stdout


def test_the_quickstart_prints_its_table_and_writes_its_report(newcomer):
    home, said = newcomer
    report = home / "quickstart" / "report.html"
    assert str(report) in said.replace("\n", "")
    for words in (
        "student (lvvit_micro), token-label",
        "teacher (nfnet_micro)",
        "token's dense label",
    ):
        assert words in said
    text = report.read_text()
    assert text.count("<img") == 24  # 12 crops, with labels and with boxes
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text  # self-contained
    purity = json.loads(report.with_suffix(".json").read_text())
    assert purity["tokens"]["all"] == purity["tokens"]["largest"] + purity["tokens"]["others"] > 100
    # by construction of the scenes
    assert (purity["image"]["largest"], purity["image"]["others"]) == (1, 0)
    assert 0 < purity["token"]["all"] < 1


def test_the_quickstart_keeps_what_is_there(newcomer, command):
    home, _ = newcomer
    again = command(
        "tools/quickstart.py", "--out", home / "quickstart", *SMALL["tools/quickstart.py"], cwd=home
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(" exists; skipped") == 10
    assert "$ python" not in again.stdout


def test_every_command_of_the_readme_runs(newcomer, command):
    home, _ = newcomer
    found = commands()
    assert found[:2] == ["make quickstart", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    # which the fixture ran in small
    assert "\t$(RUN) tools/quickstart.py --out quickstart\n" in makefile
    assert "\t$(RUN) -m pytest -n auto" in makefile  # which is what runs now
    for line in found[2:]:
        words = shlex.split(line)
        if words[0] == "torchrun":
            words = [
                "python",
                "-m",
                "torch.distributed.run",
                *words[1:],
                *(SMALL["train.py"] if "train.py" in words else []),
            ]
        # of a launcher, which says itself how its ranks begin
        fresh = words[1:3] == ["-m", "torch.distributed.run"]
        assert words[0] == "python", line
        extra = SMALL.get(words[1], []) if "--help" not in words else []
        done = command(*words[1:], *extra, cwd=home, fresh=fresh, teardown=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.ffcv
def test_the_example_with_ffcv_runs_as_it_stands(newcomer, command):
    pytest.importorskip("ffcv", reason="ffcv could not be built here")
    home, _ = newcomer
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(example.splitlines()) <= 10
    told = "import json; print(json.dumps([len(loader), image.shape, float(image.float().std()), tokens.weight.tolist()]))"
    done = command("-c", example + told, cwd=home, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    batches, shape, spread, weight = json.loads(done.stdout)
    assert (batches, shape) == (3, [20, 112, 112, 3])  # of the fixture's 60 scenes
    assert spread > 10  # scenes, not one color
    assert [len(row) for row in weight] == 20 * [49]
    # maps of the quickstart cover the whole image
    assert all(one == 1 for row in weight for one in row)
