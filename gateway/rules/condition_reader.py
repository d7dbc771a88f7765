"""The `when` and `if` sections of the rules file."""

import json
from typing import Any

import yaml

from gateway.rules import headers as header_rules
from gateway.rules.conditions import (
    JSON_TYPES,
    Combination,
    HeaderTest,
    Predicate,
    Test,
    When,
    canonical,
)
from gateway.rules.paths import Glob, Path
from gateway.rules.yaml_reader import MAX_DEPTH, Reader

ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "inference": "/mesh.v1.InferenceService/Generate",
}

_WHEN_KEYS = ("model", "served_model", "route", "key", "key_group", "header", "body")
_COMBINATIONS = ("all", "any", "not")
_BOUNDS = ("gt", "gte", "lt", "lte")
_TESTS = ("path", "exists", "equals", "in", "like", "type", *_BOUNDS)


class ConditionReader:
    """Reads conditions; problems go to the reader of the file."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def when(self, node: yaml.Node) -> When:
        fields: dict[str, Any] = {}
        for key, _, value in self._reader.mapping(node, "when", _WHEN_KEYS):
            if key == "header":
                fields["headers"] = self._headers(value)
            elif key == "body":
                fields["body"] = self.predicate(value)
            elif key == "route":
                fields["route"] = self._routes(value)
            else:
                fields[key] = self._globs(value, key)
        return When(**fields)

    def predicate(self, node: yaml.Node, depth: int = 0) -> Predicate | None:
        """A test, a combination, or a list of which all must hold."""
        if depth == MAX_DEPTH:
            self._reader.fail(node, f"predicates nest deeper than {MAX_DEPTH} levels")
            return None
        if isinstance(node, yaml.SequenceNode):
            return self._combination("all", node, depth)
        if not isinstance(node, yaml.MappingNode):
            self._reader.fail(node, "a predicate should be a mapping or a list")
            return None
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if "path" in names:
            return self._test(node)
        if len(names) != 1 or names[0] not in _COMBINATIONS:
            self._reader.fail(
                node, "a predicate should have a path, or exactly one of all, any and not"
            )
            return None
        return self._combination(names[0], node.value[0][1], depth)

    def _combination(self, op: str, node: yaml.Node, depth: int) -> Combination | None:
        if op != "not" and not isinstance(node, yaml.SequenceNode):
            self._reader.fail(node, f"{op} should be a list of predicates")
            return None
        nodes = [node] if op == "not" else self._reader.sequence(node, op)
        if not nodes:
            self._reader.fail(node, f"{op} is empty")
        predicates = [self.predicate(one, depth + 1) for one in nodes]
        return Combination(op, tuple(one for one in predicates if one is not None))  # type: ignore[arg-type]

    def _test(self, node: yaml.Node) -> Test | None:
        fields: dict[str, Any] = {}
        one_of: list[str] = []
        for key, _, value in self._reader.mapping(node, "a test", _TESTS):
            if key == "path":
                fields["path"] = self._path(value)
            elif key == "exists":
                fields["exists"] = self._reader.boolean(value, key)
            elif key == "type":
                fields["type"] = self._type(value)
            elif key == "like":
                fields["like"] = self._globs(value, key)
            elif key in _BOUNDS:
                number = self._reader.number(value, key)
                fields[key] = None if number is None else float(number)
            else:
                values = (value,) if key == "equals" else self._reader.sequence(value, key)
                one_of += [self._canonical(one) for one in values]
                fields["one_of"] = tuple(one_of)
        if fields.get("exists") is False and len(fields) > 2:
            self._reader.fail(node, "exists: false cannot be combined with other tests")
        return None if fields.get("path") is None else Test(**fields)

    def _path(self, node: yaml.Node) -> Path | None:
        text = self._reader.text(node, "path")
        try:
            return None if text is None else Path.parse(text)
        except ValueError as error:
            self._reader.fail(node, str(error))
            return None

    def _type(self, node: yaml.Node) -> str | None:
        text = self._reader.json(node)
        name = "null" if text == "null" else self._reader.text(node, "type")
        if name is not None and name not in JSON_TYPES:
            self._reader.fail(node, f"type should be one of {', '.join(JSON_TYPES)}")
            return None
        return name

    def _canonical(self, node: yaml.Node) -> str:
        text = self._reader.json(node)
        return "" if text is None else canonical(json.loads(text))

    def _globs(self, node: yaml.Node, what: str) -> tuple[Glob, ...]:
        texts = [self._reader.text(one, what) for one in self._reader.one_or_more(node)]
        if not texts:
            self._reader.fail(node, f"{what} is empty")
        return tuple(Glob.parse(text) for text in texts if text is not None)

    def _routes(self, node: yaml.Node) -> tuple[Glob, ...]:
        globs = []
        for one in self._reader.one_or_more(node):
            text = self._reader.text(one, "route")
            if text is None:
                continue
            route = ROUTES.get(text, text)
            if not route.startswith(("/", "*")):
                names = ", ".join(ROUTES)
                self._reader.fail(one, f"route should be a path, or one of {names}")
            globs.append(Glob.parse(route))
        return tuple(globs)

    def _headers(self, node: yaml.Node) -> tuple[HeaderTest, ...]:
        tests = []
        for name, name_node, value in self._reader.mapping(node, "header"):
            if not header_rules.NAME.fullmatch(name.lower()):
                self._reader.fail(name_node, f"{name!r} is not the name of a header")
            elif isinstance(value, yaml.ScalarNode) and value.value in ("true", "false"):
                tests.append(HeaderTest(name.lower(), present=value.value == "true"))
            else:
                globs = self._globs(value, f"header {name}")
                if not all(part.isascii() for glob in globs for part in glob.parts):
                    self._reader.fail(value, "values of headers are compared as ASCII")
                tests.append(HeaderTest(name.lower(), globs=globs))
        return tuple(tests)
