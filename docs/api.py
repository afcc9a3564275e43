"""Write docs/reference/api.md from the signatures and docstrings of the public names.

    python docs/api.py

Modules that pages in docs/reference/python/ name are rendered on the site alone (generate.py).
"""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import densefeed

PAGE = Path(__file__).parent / "reference" / "api.md"
INTRODUCTION = """# Python API

The public names of `densefeed`, and the classes that its functions return. Everything else, but
what the guides import, may change without notice. `python docs/api.py` writes this page from
signatures and docstrings.

| name | what it is or does |
|---|---|
"""
SPECIAL = "__call__", "__iter__", "__len__"  # shown among the methods


def write_call(name: str, node: ast.FunctionDef, bound: bool) -> str:
    """Write a call, annotated, without its first argument if `bound`; it breaks after commas."""
    node.args.args = node.args.args[bound:]
    call = f"{name}({ast.unparse(node.args)})" + f" -> {ast.unparse(node.returns or ast.Tuple([]))}"
    call = re.sub(r"(?<=[\w\]'])=(?=\S)", " = ", call).removesuffix(" -> ()")
    call = re.sub(r"([:>] )'([^']+)'", r"\1\2", call)
    # textwrap takes a no-break space for a letter.
    lines = textwrap.fill(re.sub(r"(?<!,) ", "\xa0", call), 88, subsequent_indent="    ")
    return lines.replace("\xa0", " ")


def write_doc(node: ast.AST) -> str:
    """Write a docstring, with lists of the names in its sections."""
    text = re.sub(r"(?m)^([A-Z][\w ]*:)$", r"\1\n", ast.get_docstring(node) or "")
    return re.sub(r"(?m)^ {8}(?=\S)", "  ", re.sub(r"(?m)^ {4}(\w[\w, ]*): ", r"- `\1`: ", text))


def write_field(node: ast.AnnAssign, lines: list[str]) -> str:
    """Write a field of a dataclass or named tuple, with the comment behind it or above."""
    behind = lines[node.end_lineno - 1].partition("  # ")[2]
    above = takewhile(re.compile(r"\s*# ").match, lines[node.lineno - 2 :: -1])
    comment = behind or " ".join(line.strip()[2:] for line in reversed([*above]))
    return f"- `{ast.unparse(node)}`" + f": {comment}" * bool(comment)


def write(name: str, node: ast.AST, lines: list[str], level: int, in_class: bool = False) -> str:
    """Write a function, or a class with its documented public members, under a heading."""
    fields, members, docs = [], [], [write_doc(node)]
    if isinstance(node, ast.FunctionDef):
        kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
        call = write_call(name, node, in_class and "staticmethod" not in kinds)
        if "property" in kinds:
            call = call.replace("()", "", 1).replace(" -> ", ": ", 1)
    else:
        call = f"class {name}({', '.join(map(ast.unparse, node.bases))})".removesuffix("()")
        for one in node.body:
            own = getattr(one, "name", "")
            if isinstance(one, ast.AnnAssign) and not one.target.id.startswith("_"):
                fields.append(write_field(one, lines))
            elif own in ("__init__", "__new__"):
                one.returns = None
                call += f"\n{write_call(name, one, True)}"
                docs.append(write_doc(one))
            elif own and ast.get_docstring(one) and (own[0] != "_" or own in SPECIAL):
                members.append(write(f"{name}.{own}", one, lines, level + 1, True))
    fields = ["Fields:", "\n".join(fields)] if fields else []
    parts = f"{'#' * level} `{name}`", f"```python\n{call}\n```", *docs, *fields, *members
    return "\n\n".join(filter(None, parts))


def write_module(name: str) -> str:
    """Write a module with its documented public classes and functions."""
    source = inspect.getsource(import_module(name))
    module, lines = ast.parse(source), source.splitlines()
    kept = [one for one in module.body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    kept = [one for one in kept if one.name[0] != "_" and ast.get_docstring(one)]
    parts = (write(one.name, one, lines, 3) for one in kept)
    return "\n\n".join([f"## `{name}`", write_doc(module), *parts])


def write_page() -> str:
    """Write the page of the public names."""
    names = {name: getattr(densefeed, name) for name in densefeed.__all__}
    for one in list(names.values()):
        found = inspect.signature(one).return_annotation if inspect.isfunction(one) else None
        if inspect.isclass(found) and found.__module__.startswith("densefeed"):
            names[found.__name__] = found
    rows, parts = [], []
    for name in sorted(names, key=str.lower):
        source = inspect.getsource(names[name])
        (node,) = ast.parse(source).body
        first = ast.get_docstring(node).partition("\n")[0]
        rows.append(f"| [`{name}`](#{name.lower()}) | {first} |")
        parts.append(write(name, node, source.splitlines(), 2))
    return INTRODUCTION + "\n".join(rows) + "\n\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page())
