"""YAML with line numbers: nodes in, values out, problems collected rather than raised.

Scalars follow JSON rather than YAML 1.1: `no` is a text, and a number keeps its digits.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_OTHER_NUMBER = re.compile(
    r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?0[xob][0-9a-fA-F_]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_WORDS = {
    spelling: word
    for word, spellings in {
        "null": ("", "~", "null", "Null", "NULL"),
        "true": ("true", "True", "TRUE"),
        "false": ("false", "False", "FALSE"),
    }.items()
    for spelling in spellings
}
MAX_DEPTH = 50


@dataclass(frozen=True)
class Problem:
    """A fault of the file. Lines count from 1; 0 means the file as a whole."""

    line: int
    message: str


class Reader:
    """Turns nodes into values; what is wrong is noted, with its line, and reading goes on."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def compose(self, text: str) -> yaml.Node | None:
        try:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 0
            self.problems.append(Problem(line, f"not valid YAML: {error.problem}"))
        except yaml.YAMLError as error:
            self.problems.append(Problem(0, f"not valid YAML: {error}"))
        return None

    def fail(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, message))

    def mapping(
        self, node: yaml.Node, what: str, known: Sequence[str] | None = None
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Key, its node and its value's node; unknown and repeated keys are problems."""
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, f"{what} should be a mapping")
            return
        seen: set[str] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(key_node, f"the keys of {what} should be texts")
                continue
            key = key_node.value
            if key_node.tag.endswith(":merge"):
                self.fail(key_node, "merge keys (<<) are not supported")
                continue
            if not self._is_text(key_node):
                continue
            if key in seen:
                self.fail(key_node, f"{key!r} occurs twice in {what}")
                continue
            seen.add(key)
            if known is not None and key not in known:
                self.fail(key_node, f"{what} has no {key!r}{_did_you_mean(key, known)}")
                continue
            yield key, key_node, value_node

    def sequence(self, node: yaml.Node, what: str) -> Sequence[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        self.fail(node, f"{what} should be a list")
        return ()

    def one_or_more(self, node: yaml.Node) -> Sequence[yaml.Node]:
        """A list, or one value in place of a list of one."""
        return list(node.value) if isinstance(node, yaml.SequenceNode) else (node,)

    def text(self, node: yaml.Node, what: str) -> str | None:
        """A text that is not empty."""
        value = self.json(node) if isinstance(node, yaml.ScalarNode) else None
        if value is not None:
            decoded = json.loads(value)
            if isinstance(decoded, str) and decoded:
                return decoded
            if isinstance(decoded, int | float) and not isinstance(decoded, bool):
                # Names such as 4 or 7.5 need no quotes.
                return str(node.value)
        self.fail(node, f"{what} should be a text")
        return None

    def number(self, node: yaml.Node, what: str) -> str | None:
        """A number, as JSON."""
        text = self.json(node)
        if text is not None and _JSON_NUMBER.fullmatch(text):
            return text
        if text is not None:
            self.fail(node, f"{what} should be a number")
        return None

    def boolean(self, node: yaml.Node, what: str) -> bool | None:
        text = self.json(node)
        if text in ("true", "false"):
            return text == "true"
        self.fail(node, f"{what} should be true or false")
        return None

    def json(self, node: yaml.Node, depth: int = 0) -> str | None:
        """Any value as compact JSON; None after a problem."""
        if depth == MAX_DEPTH:
            self.fail(node, f"the value nests deeper than {MAX_DEPTH} levels")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode):
            parts = [self.json(one, depth + 1) for one in node.value]
        else:
            parts = []
            for key, _, value_node in self.mapping(node, "the value"):
                value = self.json(value_node, depth + 1)
                parts.append(None if value is None else f"{_quote(key)}:{value}")
        texts = [part for part in parts if part is not None]
        if len(texts) != len(parts):
            return None
        inside = ",".join(texts)
        return f"[{inside}]" if isinstance(node, yaml.SequenceNode) else f"{{{inside}}}"

    def _scalar(self, node: yaml.ScalarNode) -> str | None:
        value = str(node.value)
        if node.style is None:
            if value in _WORDS:
                return _WORDS[value]
            if _JSON_NUMBER.fullmatch(value):
                return self._number(node, value)
            if _OTHER_NUMBER.fullmatch(value):
                self.fail(node, f"{value!r}: write numbers as in JSON, or put texts in quotes")
                return None
        return _quote(value) if self._is_text(node) else None

    def _is_text(self, node: yaml.ScalarNode) -> bool:
        try:
            node.value.encode()
        except UnicodeEncodeError:
            self.fail(node, "the text holds an unpaired surrogate")
            return False
        return True

    def _number(self, node: yaml.ScalarNode, value: str) -> str | None:
        if len(value) > 400 or float(value) in (float("inf"), float("-inf")):
            self.fail(node, f"{value[:40]!r} is too large for a number")
            return None
        return value


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"
