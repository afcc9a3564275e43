"""Griffe extension: comments above or behind the fields of a class become its attributes."""

import griffe


def read_comment(field: griffe.Attribute) -> str:
    """Return the comment behind a field, else the lines of comment above it."""
    lines = field.lines_collection[field.filepath]
    # ruff format puts two spaces before such a comment; a # within a string has none.
    if behind := lines[field.endlineno - 1].partition("  # ")[2]:
        return behind
    # `lineno` counts from 1, so this is the index of the line above the field.
    above, at = [], field.lineno - 2
    while lines[at].strip().startswith("# "):
        above.insert(0, lines[at].strip()[2:])
        at -= 1
    return " ".join(above)


class FieldComments(griffe.Extension):
    """Describe the fields of dataclasses and named tuples by the comments of the source."""

    def on_class(self, *, cls: griffe.Class, **kwargs: object) -> None:
        """Append an Attributes section to the docstring of a class."""
        fields = [f for f in cls.members.values() if f.is_attribute and f.lineno and f.annotation]
        texts = {f.name: text for f in fields if (text := read_comment(f))}
        if cls.docstring and texts:
            section = [f"    {name}: {text}" for name, text in texts.items()]
            cls.docstring.value += "\n".join(["\n\nAttributes:", *section])
