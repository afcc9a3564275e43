"""Call what an option names as `package.module:factory`: a function of the user's own module."""

import os
import re
import sys
from pkgutil import resolve_name

from densefeed.system.errors import UserError

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_factory(text: str) -> bool:
    """Whether a text has the form package.module:factory."""
    return FACTORY.fullmatch(text) is not None


def call_factory(source: str) -> object:
    """Call `package.module:factory` without arguments, and return what it makes.

    Modules in the current folder are found too. UserError for whatever the import or the call
    raises.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # Importing and calling run the user's own code, which may raise anything.
    try:
        return resolve_name(source)()
    # It has a remedy already.
    except UserError:
        raise
    # SystemExit too: a script, which parses arguments of its own, ends the interpreter.
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserError(
            f"{source} failed ({problem}); name a function of a module that is installed or in the "
            "current folder, and that is called without arguments"
        ) from error
