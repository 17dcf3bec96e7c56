"""What `hortator gateway --help` and its like print: every setting, its default, the text below its field."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator

from shared.runtime.settings import OF_THE_NODE, PREFIX, ServiceSettings, choices


def settings_help(cls: type[ServiceSettings]) -> str:
    """The environment variables of a settings class, for people."""
    documented: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            documented |= field_texts(base)
    hints = typing.get_type_hints(cls)
    lines: list[str] = []
    for field in dataclasses.fields(cls):
        if field.name in cls.unused:
            continue
        default = "" if field.default in ("", dataclasses.MISSING) else f" (default {_shown(field.default)})"
        lines.append(f"{PREFIX}{field.name.upper()}{default}")
        values = choices(hints[field.name])
        lines += _below(documented.get(field.name, ""), f"One of {', '.join(values)}." if values else "")
    for name, text in OF_THE_NODE.items():
        lines.append(name)
        lines += _below(text)
    return "\n".join(lines)


def _below(*texts: str) -> Iterator[str]:
    text = " ".join(" ".join(texts).split())
    yield from textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")


def _shown(default: object) -> str:
    """As the variable takes it."""
    return str(int(default)) if isinstance(default, bool) else str(default)


def field_texts(cls: type) -> dict[str, str]:
    """Field → the string literal that stands below it in the class's source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:]):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = text
    return texts
