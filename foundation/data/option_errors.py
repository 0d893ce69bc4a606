"""What the option parser finds wrong, in the words of a person who does not know its types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "a mapping",
    "tuple": "a list",
    "list": "a list",
    "NoneType": "null",
    "Path": "a path",
}
_OF_A_FILE = ("Option '", "Problems parsing config")


def reworded(message: str, options: Collection[str] = (), files: Sequence[str] = ()) -> str:
    """The parser's message as `key: expected ..., got ...`, in one line.

    Args:
        message: of jsonargparse.
        options: all options of the command, without dashes; a misspelt one is told the nearest.
        files: the config files that were read; what can only be wrong in one of them names it.
    """
    text = " ".join(message.split())
    if found := re.fullmatch(r'Parser key "([^"]+)": Expected an? (.+?)\. Got value:(.*)', text):
        return f"{found[1]}: expected {_type(found[2])}, got {found[3].strip() or 'nothing'}"
    if found := re.fullmatch(r'Parser key "([^"]+)": Not of type Path: .*, not (\w+)', text):
        return f"{found[1]}: expected a path, got {_type(found[2])}; write it in quotes"
    union = r'Parser key "([^"]+)": Does not validate against any of the Union subtypes Subtypes: \[(.+)\] Errors: .*'
    if found := re.fullmatch(rf"{union}Given value: (.*)", text):
        kinds = dict.fromkeys(_type(kind) for kind in re.split(r", (?=<class|typing\.)", found[2]))
        return f"{found[1]}: expected {' or '.join(kinds)}, got {found[3]}"
    if text.startswith("Unexpected config"):
        text = (
            f"expected options and their values, such as `seed: 1`, got {text.partition(':')[2].strip() or 'nothing'}"
        )
        return f"{' or '.join(files)}: {text}" if files else text
    wrong = re.search(r"(?:unrecognized arguments: --|Option ')([^\s'=]+)", text)
    near = difflib.get_close_matches(wrong[1], options, n=1, cutoff=0.75) if wrong else []
    hint = f"; the nearest option is {near[0]}" if near else ""
    of = f"{' or '.join(files)}: " if files and text.startswith(_OF_A_FILE) else ""
    return f"{of}{text}{hint}"


def _type(name: str) -> str:
    if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", name):
        return f"one of {literal[1]}".replace("'", "")
    plain = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", name)
    return _TYPES.get(plain, plain)
