"""What `hortator gateway --help` and its like print: every setting, its default, the text below its field."""

import ast
import dataclasses
import inspect
import textwrap

from shared.runtime.settings import PREFIX


def settings_help(cls: type) -> str:
    """The environment variables of a settings class, for people."""
    documented: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            documented |= field_texts(base)
    lines = []
    for field in dataclasses.fields(cls):
        secret = not field.repr
        default = (
            "" if secret or field.default in ("", dataclasses.MISSING) else f" (default {field.default})"
        )
        lines.append(f"{PREFIX}{field.name.upper()}{default}")
        text = " ".join(documented.get(field.name, "").split())
        lines += textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


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
