"""The documentation is true: its commands and Python blocks run in their order on a small
quickstart, its links and options exist, and the site builds without a warning.
"""

import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import densefeed
from densefeed.recipes import RECIPES
from densefeed.system.commands import COMMANDS
from densefeed.tools import score_maps

ROOT = Path(__file__).parent.parent
SMALL = {
    "quickstart": ["--train", "60", "--val", "20", "--epochs", "1"],
    "train": ["--epochs", "1"],
}
# The values in Python blocks that a test replaces by small ones.
SMALL_VALUES = {
    '"train.beton"': '"quickstart/train.beton"',
    '"val.beton"': '"quickstart/val.beton"',
    "batch=256, size=224": "batch=20, size=64",
    "batch=256": "batch=20",
    '"lvvit_s"': '"lvvit_micro"',
    "range(300)": "range(1)",
    "epochs = 300": "epochs = 1",
}
# Pages whose `sh` blocks run, in the order in which they use each other's files.
RUN = (
    "README.md",
    "docs/start/install.md",
    "docs/start/quickstart.md",
    "docs/start/your-images.md",
    "docs/guides/label-on-many-devices.md",
    "docs/guides/label-packs.md",
    "docs/guides/validate.md",
    "docs/guides/export.md",
    "docs/guides/many-gpus.md",
)
PAGES = sorted(ROOT.glob("docs/**/*.md"))
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
# Options of torchrun, of Slurm and of examples that the pages mention.
FOREIGN = {
    *("--nnodes", "--nproc-per-node", "--rdzv-endpoint", "--rdzv-id", "--signals-to-handle"),
    *("--signal", "--requeue", "--penalty-weight", "--peer-weight", "--shm-size"),
}
SCRIPT = "loop.py"  # the script that a page tells to save
ACTIVATE = ["source", ".venv/bin/activate"]  # what the tests run in is active already


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of these languages."""
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", path.read_text(), re.S)


def commands(path: Path, *languages: str) -> list[list[str]]:
    """Return the words of every command in these blocks, variables of the block replaced."""
    lines, variables = [], {}
    for line in "\n".join(blocks(path, *languages)).replace("\\\n", " ").splitlines():
        line = line.split("  #")[0].strip()
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if match := re.fullmatch(r"([A-Z]+)=(\S+)", line):
            variables[match[1]] = match[2]
        elif line and not line.startswith("#"):
            lines.append(shlex.split(line))
    return lines


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory, command):
    """A folder with the files of a checkout, in which a small quickstart has run."""
    home = tmp_path_factory.mktemp("newcomer")
    for path in ROOT.iterdir():
        if path.name not in (".git", "quickstart", "runs", "mine", "yours", ".venv"):
            (home / path.name).symlink_to(path)
    words = "tools/quickstart.py", "--out", home / "quickstart", *SMALL["quickstart"]
    done = command(*words, cwd=home, descendants=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return home, done.stdout


@pytest.mark.slow
def test_quickstart_prints_its_table_and_writes_its_report(newcomer):
    home, printed = newcomer
    report = home / "quickstart" / "report.html"
    assert str(report) in printed.replace("\n", "")
    for words in (
        "student (lvvit_micro), token-label",
        "teacher (nfnet_micro)",
        "token's dense label",
    ):
        assert words in printed
    text = report.read_text()
    assert len(text.encode()) < 1_000_000
    # 12 crops, with labels and with boxes, and what the last student predicts.
    for picture in ("training crop of sample", "the same crop without labels"):
        assert text.count(f'alt="{picture}') == 12
    assert text.count("validation sample ") >= 6
    # The report is self-contained.
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    purity = json.loads(report.with_suffix(".json").read_text())
    assert purity["tokens"]["all"] == purity["tokens"]["largest"] + purity["tokens"]["others"] > 100
    # By construction of the scenes, the image label is that of the largest digit.
    assert (purity["image"]["largest"], purity["image"]["others"]) == (1, 0)
    assert 0 < purity["token"]["all"] < 1


@pytest.mark.slow
def test_quickstart_keeps_existing_results(newcomer, command):
    home, _ = newcomer
    words = "tools/quickstart.py", "--out", home / "quickstart", *SMALL["quickstart"]
    again = command(*words, cwd=home)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(" exists; skipped") == 10
    assert "$ densefeed" not in again.stdout


@pytest.mark.slow
def test_every_shell_block_runs(newcomer, command):
    home, _ = newcomer
    makefile = (ROOT / "Makefile").read_text()
    # The fixture ran the one on a small scale, and the other runs now.
    assert "\t$(RUN) tools/quickstart.py --out quickstart\n" in makefile
    assert "\t$(PYTEST) " in makefile
    found = [words for page in RUN for words in commands(ROOT / page, "sh")]
    assert found[:2] == [["make", "quickstart"], ["make", "test"]]
    for words in found:
        if words[0] == "make":
            assert words[1] in ("quickstart", "test")
            continue
        if words == ACTIVATE:
            continue
        *_, name = program(words)[:3]
        # torchrun starts its ranks itself, so it needs a fresh interpreter.
        fresh = words[0] == "torchrun"
        run = ("-m", "torch.distributed.run", *words[1:]) if fresh else python_words(words)
        done = command(*run, *SMALL.get(name, []), cwd=home, fresh=fresh, teardown=True)
        output = f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.returncode == 0, output


def shrink(example: str) -> str:
    """Return a Python block with small values."""
    for value, small in SMALL_VALUES.items():
        example = example.replace(value, small)
    return example


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/start/quickstart.md"])
def test_the_python_block_trains_a_model(newcomer, command, page):
    home, _ = newcomer
    (example,) = blocks(ROOT / page, "python")
    assert len(example.splitlines()) <= 10
    example = shrink(example)
    check = "print(bool(loss.isfinite()), model.training, len(batch.label))"
    done = command("-c", example + check, cwd=home, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("True True ")


@pytest.mark.slow
def test_the_script_of_your_own_loop_runs(newcomer, command):
    """The blocks of the page are one script, but the last, which is a script for torchrun."""
    home, _ = newcomer
    *parts, parallel = map(shrink, blocks(ROOT / "docs/guides/own-loop.md", "python"))
    done = command("-c", "".join(parts), cwd=home, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "% of 20 images" in done.stdout
    (home / SCRIPT).write_text(parallel)
    words = "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT
    done = command(*words, cwd=home, timeout=600, fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]
    weights = [torch.load(home / name, weights_only=True) for name in ("own.pt", "parallel.pt")]
    assert weights[0].keys() == weights[1].keys()


@pytest.mark.slow
def test_an_exported_model_predicts_an_image(newcomer, command):
    home, _ = newcomer
    words = "quickstart/runs/token-label", "--out", "exported"
    assert command("tools/export.py", *words, cwd=home).returncode == 0
    (example,) = blocks(ROOT / "docs/guides/export.md", "python")
    image = next((home / "quickstart/scenes/val").glob("*/*.jpg"))
    example = example.replace("runs/exported", "exported").replace("photo.jpg", str(image))
    done = command("-c", example, cwd=home, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"\d\n", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.ffcv
def test_the_example_with_stock_ffcv_runs(newcomer, command):
    pytest.importorskip("ffcv", reason="ffcv could not be built here")
    home, _ = newcomer
    (example,) = blocks(ROOT / "docs/guides/stock-ffcv.md", "python")
    assert len(example.splitlines()) <= 16
    shutil.copy(ROOT / "examples" / "stock_ffcv.py", home)
    values = "[len(loader), image.shape, float(image.float().std()), tokens.weight.tolist(), "
    values += "min(float(p.grad.abs().max()) for p in model.head.parameters())]"
    code = f"{example}import json; print(json.dumps({values}))"
    done = command("-c", code, cwd=home, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    batches, shape, deviation, weight, gradient = json.loads(done.stdout)
    assert (batches, shape) == (3, [20, 112, 112, 3])  # of the fixture's 60 scenes
    assert deviation > 10  # scenes, not one color
    assert [len(row) for row in weight] == 20 * [196]
    assert gradient > 0
    # Maps of the quickstart cover the whole image.
    assert all(one == 1 for row in weight for one in row)


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 200
    assert len(text.split()) <= 1600
    assert not [line for line in lines if len(line) > 100]


NEWCOMERS = [*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/guides/*.md")]


def test_outside_the_pages_for_newcomers_are_short():
    """Half of the 15,407 words that both folders had at commit 6d54ec6, and 750 for any loop."""
    assert sum(len(page.read_text().split()) for page in NEWCOMERS) <= 15_407 // 2 + 750


@pytest.mark.parametrize("page", NEWCOMERS, ids=lambda page: page.stem)
def test_outside_what_was_never_run_is_in_the_faq_alone(page):
    text = " ".join(page.read_text().split())
    doubts = r"(never|not|nothing was) (run|measured|trained|used|tried|executed)|inconclusive"
    assert not re.search(doubts, text, re.I)
    assert re.search(doubts, (ROOT / "docs/faq.md").read_text())


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/guides/*.md")), ids=lambda page: page.stem)
def test_outside_a_guide_names_what_goes_wrong(page):
    _, _, wrong = page.read_text().partition("\n## If it goes wrong\n")
    assert len(re.findall(r"^- \*\*", wrong, re.M)) == 3


def test_outside_code_on_pages_is_on_github_too():
    """GitHub shows `--8<--`, which included a file on the site, as it is."""
    assert not [page for page in PAGES if "--8<--" in page.read_text()]
    shown = [code.strip() for code in blocks(ROOT / "docs/extending.md", "python")]
    for file in ROOT.glob("tests/extensions/*.py"):
        assert file.read_text().strip() in shown, f"{file.name} and docs/extending.md differ"


@pytest.mark.parametrize(("name", "tables"), [("labels", (2, 4)), ("any-loop", (3, 4))])
def test_outside_a_figure_is_what_its_script_draws(name, tables):
    path = ROOT / f"docs/images/{name}.svg"
    drawn = runpy.run_path(str(ROOT / "docs/figure.py"))["FIGURES"][path.name]()
    assert drawn == path.read_text(), "run python docs/figure.py"
    assert len(drawn.encode()) < 200_000
    # Every class but the background has a letter, for readers who cannot tell colors apart.
    panels = drawn.split('<g transform="translate')
    assert len(panels) == 5
    for at in tables:
        assert re.findall(r">([CTS])</text>", panels[at])


def test_outside_the_api_page_is_what_its_script_writes():
    path = ROOT / "docs/reference/api.md"
    text = path.read_text()
    assert runpy.run_path(str(ROOT / "docs/api.py"))["write_page"]() == text, (
        "run python docs/api.py"
    )
    calls = dict(re.findall(r"(?m)^#+ `([\w.]+)`\n\n```python\n(.*?)\n```", text, re.S))
    assert calls.keys() >= {*densefeed.__all__, "StoredLabels.targets", "Step.__call__"}
    # Python's own signatures and classes, which the script does not read.
    for name in densefeed.__all__:
        one = getattr(densefeed, name)
        if inspect.isfunction(one):
            assert all(f"{p}: " in calls[name] for p in inspect.signature(one).parameters), name
        for own, value in vars(one).items() if inspect.isclass(one) else ():
            if inspect.isfunction(value) and value.__doc__ and not own.startswith("_"):
                assert f"{name}.{own}" in calls
    assert max(map(len, "\n".join(calls.values()).splitlines())) <= 88


def test_outside_parameters_of_the_micro_models_are_those_of_the_page():
    _, _, table = (ROOT / "docs/reference/models.md").read_text().partition("## Micro models")
    rows = re.findall(r"^\| `(\w+_micro)` \| ([\d,]+) \|", table, re.M)
    listed = {name for name in timm.list_models("*_micro") if "densefeed" in module_of(name)}
    assert {name for name, _ in rows} == listed
    for name, count in rows:
        model = timm.create_model(name, num_classes=10)
        assert f"{sum(one.numel() for one in model.parameters()):,}" == count, name


def module_of(name: str) -> str:
    """Return the module that defines a model of timm."""
    return timm.models.model_entrypoint(name).__module__


@pytest.mark.parametrize("signaled", [True, False])
def test_outside_the_slurm_script_of_a_training_is_queued_again(tmp_path, signaled):
    """The signal reaches torchrun through srun; a run that failed by itself is not queued again.

    Stand-ins: srun becomes its command, as torchrun a shell that ends with 1 at SIGUSR1, and
    scontrol writes its arguments.
    """
    (script,) = blocks(ROOT / "docs/guides/many-gpus.md", "bash")
    assert "#SBATCH" in script
    ended = "sleep 0.2; kill -USR1 $PPID; sleep 30 & wait" if signaled else "exit 3"
    stand_ins = {
        "srun": 'exec "$@"',
        "torchrun": f"trap 'kill $!; echo saved > saved; exit 1' USR1\n{ended}",
        # It ends when `head` has its first line.
        "scontrol": "echo $* >> told\necho node-1\necho node-2",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NNODES": "2"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=20)
    # A failure stays one; 3 is that of the stand-in.
    assert done.returncode == (0 if signaled else 3)
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["show hostnames node-[1-2]", *(["requeue 7"] if signaled else [])]
    assert (tmp_path / "saved").exists() == signaled


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("path", PROSE, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    """On GitHub; mkdocs checks those of the site."""
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]+))?\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M) if anchor else []
        assert not anchor or anchor in map(slug, headings), f"{target}#{anchor}"


def test_the_readme_links_to_every_page():
    linked = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text())
    found = {(ROOT / target).resolve() for target in linked}
    # The readme links to the files that these pages include, and the home page repeats it.
    included = {"docs/index.md", "docs/formats/index.md"}
    included |= {"docs/reference/ablations.md", "docs/results/records.md"}
    pages = {page for page in PAGES if str(page.relative_to(ROOT)) not in included}
    assert {page for page in pages if "docs/reference/python" not in str(page)} <= found


@pytest.fixture(scope="module")
def options(command):
    """A function of a command that returns its options, as its --help prints them."""
    known = {}

    def read(*words: str) -> set[str]:
        if words not in known:
            done = command(*words, "--help")
            assert done.returncode == 0, (words, done.stderr[-500:])
            known[words] = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
            assert "--help" in known[words], f"{words} prints no help"
        return known[words]

    return read


RECIPE = "lvvit_micro_token_label"  # recipes differ in their defaults only
# The first word of these commands, on which their options depend.
SUBCOMMANDS = {
    "train": (RECIPE,),
    "advise": (RECIPE,),
    "score-maps": tuple(score_maps.COMMANDS),
    "beton": ("verify",),
}
BENCHMARKS = sorted(
    f"benchmarks.{path.stem}"
    for path in (ROOT / "benchmarks").glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text()
)


def python_words(words: list[str]) -> list[str]:
    """Return the words after `python` of a command; of torchrun, those of its program."""
    if words[0] == "densefeed":
        return ["-m", *words]
    return words[words.index("-m") :] if words[0] == "torchrun" and "-m" in words else words[1:]


def program(words: list[str]) -> tuple[str, ...]:
    """Return the program of a command without its arguments, () if it is none of ours."""
    if words[0] not in ("densefeed", "python", "torchrun"):
        return ()
    first, *rest = python_words(words)
    if first.endswith(".py") and first != SCRIPT:
        assert (ROOT / first).exists(), f"{first} does not exist"
        return (first,)
    if rest and rest[0].startswith("benchmarks."):
        return "-m", rest[0]
    # `densefeed` alone lists the commands.
    if first != "-m" or rest[0] != "densefeed" or len(rest) < 2:
        return ()
    _, name, *given = rest
    assert name in COMMANDS, f"densefeed {name}"
    if name in ("train", "advise"):
        assert given[0] in {*RECIPES, "RECIPE"}, given[0]
        return "-m", "densefeed", name, RECIPE
    return ("-m", "densefeed", name, *(given[:1] if name in SUBCOMMANDS else ()))


@pytest.mark.slow
@pytest.mark.parametrize("path", PROSE, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_their_options_exist(path, options):
    for words in commands(path, "sh", "shell", "text"):
        if found := program(words):
            own = python_words(words)
            given = {word for word in own if re.fullmatch(r"--[a-z][a-z0-9-]*", word)}
            assert given <= options(*found), f"{shlex.join(words)}: {given - options(*found)}"


@pytest.mark.slow
def test_every_option_in_the_prose_exists(options):
    known = set(FOREIGN)
    for name in COMMANDS:
        for part in SUBCOMMANDS.get(name, ("",)):
            known |= options("-m", "densefeed", name, *filter(None, [part]))
    known |= options("tools/gpu_check.py")
    for name in BENCHMARKS:
        known |= options("-m", name)
    for path in PROSE:
        inline = " ".join(re.findall(r"`([^`\n]+)`", path.read_text()))
        unknown = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", inline)) - known
        assert not unknown, f"{path.relative_to(ROOT)}: {sorted(unknown)}"
        for name in re.findall(r"(?<![\w/.])(?:tools|benchmarks)/\w+\.py", inline):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "reference/command-line/index.html").exists()
