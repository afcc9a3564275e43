"""Write docs/reference/python/index.md: the public names with signatures, docstrings and fields.

    python docs/python_api.py

GitHub shows the page as it is. A test compares it with the code.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import densefeed

OUT = Path(__file__).parent / "reference" / "python" / "index.md"
HEAD = """# Python API

The public names of `densefeed`. Everything else may change without notice. The pages beside this
one describe modules, for those who extend them.
"""
# What begins an entry of `Args:` and `Attributes:`.
ENTRY = re.compile(r"^((?:\w+, )*\w+): ")
# Objects as defaults, which print all of their fields, and functions, which print their address.
OBJECT = re.compile(r"=([A-Z]\w+)\([^()]*(?:\([^()]*\)[^()]*)*\)")
FUNCTION = re.compile(r"<(?:built-in )?function (?:[\w.<>]*\.)?(\w+)(?: at 0x\w+)?>")


def write_page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name in densefeed.__all__:
        parts += describe(name, getattr(densefeed, name))
    return "\n".join(parts)


def describe(name: str, item: type | object) -> Iterator[str]:
    """Yield the parts of a public name."""
    yield f"## {name}\n"
    fields = list_fields(item) if inspect.isclass(item) else {}
    # The arguments of a class of fields are its fields.
    if not fields and not (inspect.isclass(item) and issubclass(item, Exception)):
        yield f"```python\n{name}{read_arguments(item)}\n```\n"
    yield format_docstring(inspect.getdoc(item) or "")
    if fields:
        yield "\n".join(f"- `{field}`: {text}" for field, text in fields.items()) + "\n"
    for method, value in vars(item).items() if inspect.isclass(item) else ():
        plain = getattr(value, "fget", getattr(value, "__func__", value))
        # A method that overrides one of a base has no docstring of its own.
        if method.startswith("_") or not inspect.isfunction(plain) or not plain.__doc__:
            continue
        yield f"### {name}.{method}\n"
        if not isinstance(value, property):
            yield f"```python\n{method}{read_arguments(plain, skip=1)}\n```\n"
        yield format_docstring(inspect.getdoc(plain))


def read_arguments(item: object, skip: int = 0) -> str:
    """Return arguments and defaults, without types; `skip` leaves out `self`."""
    arguments = list(inspect.signature(item).parameters.values())[skip:]
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in arguments]
    text = OBJECT.sub(r"=\1(...)", str(inspect.Signature(plain)))
    text = FUNCTION.sub(r"\1", text)
    if len(text) < 80:
        return text
    # At commas that no bracket encloses.
    return "(\n    " + re.sub(r", (?![^(\[]*[)\]])", ",\n    ", text[1:-1]) + ",\n)"


def list_fields(cls: type) -> dict[str, str]:
    """Return the fields of a class and the comments of its source behind or above them."""
    if not hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "_fields"):
        return {}
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body[0].body:
        if not isinstance(node, ast.AnnAssign) or node.target.id.startswith("_"):
            continue
        behind, at, above = lines[node.end_lineno - 1].partition("  # ")[2], node.lineno - 2, []
        while lines[at].strip().startswith("# "):
            above.insert(0, lines[at].strip()[2:])
            at -= 1
        if text := behind or " ".join(above):
            default = f" (default: `{ast.unparse(node.value)}`)" if node.value else ""
            found[node.target.id] = text + default
    return found


def format_docstring(text: str) -> str:
    """Return a docstring as Markdown: its sections as lists, indented blocks as code."""
    parts = []
    for block in text.strip().split("\n\n"):
        title, _, rest = block.partition("\n")
        if title in ("Args:", "Attributes:"):
            lines = textwrap.dedent(rest).splitlines()
            block = "\n".join(ENTRY.sub(r"- `\1`: ", line) for line in lines)
            block = re.sub(r"\n {4,}", "\n  ", block)
        elif block.startswith("    "):
            block = f"```python\n{textwrap.dedent(block)}\n```"
        parts.append(block)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    OUT.write_text(write_page())
