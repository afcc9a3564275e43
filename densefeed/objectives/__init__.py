"""Objectives: what a run can be trained for, one method per file.

`--objective` names one of OBJECTIVES. Each of METHODS wraps it where an option switches it on. The
section `objective` of a run's options holds the options of all of them.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from tyro.conf import arg

from densefeed.objectives.base import Method, Objective, Setting
from densefeed.objectives.bootstrapping import Bootstrapping
from densefeed.objectives.ce import CrossEntropy
from densefeed.objectives.detection import Detection
from densefeed.objectives.drloc import DRLoc
from densefeed.objectives.relabel import ReLabel
from densefeed.objectives.segmentation import Segmentation, SoftSegmentation
from densefeed.objectives.token_labeling import TokenLabeling
from densefeed.system.errors import UserError
from densefeed.system.options import Options, leaves, refuse_unused, unused_leaves

Registered = TypeVar("Registered", bound=type[Objective])
OBJECTIVES: dict[str, type[Objective]] = {}
METHODS: dict[str, type[Method]] = {}


def register(kind: Registered) -> Registered:
    """Make an objective or a method known by its `name`; usable as a decorator.

    ValueError if the name is taken.
    """
    if kind.name in OBJECTIVES | METHODS:
        raise ValueError(f"there is an objective {kind.name!r} already")
    (METHODS if issubclass(kind, Method) else OBJECTIVES)[kind.name] = kind
    return kind


for builtin in (
    CrossEntropy,
    ReLabel,
    TokenLabeling,
    Segmentation,
    SoftSegmentation,
    Detection,
    DRLoc,
    Bootstrapping,
):
    register(builtin)


@dataclass(frozen=True, kw_only=True)
class Objectives(Options):
    """The section `objective` of a run's options."""

    # ce: image labels; relabel: dense label of the crop; token-label: dense label of every token;
    # segment: masks of pixels; segment-soft: a teacher's dense labels of pixels, and masks;
    # detect: boxes and masks of objects
    name: Annotated[str, arg(name="objective")] = "token-label"


@cache
def make_section(kinds: tuple[type[Objective], ...]) -> type[Objectives]:
    """Make the class of the section `objective` with the options of these objectives."""
    # Objectives may share a section.
    own = {k.section_name(): k.own for k in kinds if k.own}
    sections = [(name, kind, field(default_factory=kind)) for name, kind in own.items()]
    made = make_dataclass("Objectives", sections, bases=(Objectives,), frozen=True, kw_only=True)
    # tyro reads the texts of options in the source of a class, here that of the base.
    made.__module__, made.__doc__ = __name__, Objectives.__doc__
    return made


def complete(section: Objectives) -> Any:
    """Return the section with the options of all that is registered by now."""
    kind = make_section((*OBJECTIVES.values(), *METHODS.values()))
    if type(section) is kind:
        return section
    known = {one.name for one in fields(kind)} & {one.name for one in fields(section)}
    return kind(**{name: getattr(section, name) for name in known})


def build_objective(setting: Setting) -> Objective:
    """Build and check the objective of a run. UserError where options contradict each other."""
    options = setting.options
    if options.name not in OBJECTIVES:
        raise UserError(
            f"--objective {options.name} is unknown; choose one of {', '.join(OBJECTIVES)}, or "
            "start the file that registers your own, as docs/extending.md shows"
        )
    objective = OBJECTIVES[options.name](setting)
    wraps = [kind for kind in METHODS.values() if kind.is_on(kind.read_options(options))]
    if len(wraps) > 1:
        raise UserError(
            f"--{wraps[0].name} and --{wraps[1].name} cannot be combined: each trains a model with "
            "additions of its own, and no paper defines both; give one of the two options"
        )
    if setting.mix and not objective.mixes_labels:
        given = (name for name, value in leaves(setting.mix) if value and name != "mix_label")
        off = {"mixtoken": "--no-mixtoken", "cutmix": "--cutmix 0", "mixup": "--mixup 0"}
        raise UserError(
            f"--objective {options.name} does not state that it mixes labels, and the run mixes "
            f"images; give {' '.join(off[name] for name in given)}, or set mixes_labels = True in "
            "its class once its loss does, as docs/extending.md describes"
        )
    if wraps and objective.needs_masks:
        raise UserError(
            f"--{wraps[0].name} trains classifiers; pretrain with it, and give that run to --init "
            f"of --objective {options.name}"
        )
    for kind in wraps:
        objective = kind(setting, objective)
    objective.check()
    return objective


def check_unused(options: Any, defaults: Any, given: Collection[str] = ()) -> None:
    """Raise UserError for an option that is given and has no effect beside the others.

    Both are nested options with a section `objective`. An option is given if it is unlike its
    default, or one of `given`, the names on the command line. Others may have no effect: a recipe
    with its method switched off is its own baseline.
    """
    before = dict(leaves(defaults))
    # A step of one's own has fewer sections than a run.
    changed = {name for name, value in leaves(options) if value != before[name]}
    unused = unused_leaves(options)
    # An unknown name is refused where the objective is built.
    if objective := OBJECTIVES.get(options.objective.name):
        unused = objective.unused | unused | find_unchosen(complete(options.objective))
    unused = {name: needed for name, needed in unused.items() if name in before}
    refuse_unused(unused, changed | set(given))


def find_unchosen(section: Any) -> dict[str, str]:
    """Return the own options of objectives that are not chosen and methods that are not on.

    With what would give them an effect, as `Options.unused`. The option that switches a method on
    is not among them.
    """
    unused, used = {}, set()
    for kind in (*OBJECTIVES.values(), *METHODS.values()):
        if not (own := kind.read_options(section)):
            continue
        names = {name for name, _ in leaves(own)}
        is_method = issubclass(kind, Method)
        if kind.is_on(own) if is_method else kind.name == section.name:
            used |= names
        else:
            needed = f"--{kind.name}" if is_method else f"--objective {kind.name}"
            unused |= dict.fromkeys(names - {kind.name.replace("-", "_")}, needed)
    # An objective may share the options of another that it derives from.
    return {name: needed for name, needed in unused.items() if name not in used}
