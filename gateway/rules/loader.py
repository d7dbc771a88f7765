"""The rules file: YAML in, a RuleSet or every problem of the file out."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml

from gateway.rules import headers as header_rules
from gateway.rules.condition_reader import ConditionReader
from gateway.rules.default_tree import graft, is_same_place, leaves, to_fills
from gateway.rules.model import (
    Clamp,
    Fill,
    Force,
    ModelRewrite,
    Reject,
    Rename,
    Rule,
    RuleSet,
    SetHeader,
    Target,
)
from gateway.rules.paths import Glob, Path
from gateway.rules.yaml_reader import Problem, Reader

_FILE_KEYS = ("version", "headers", "rules")
_KINDS = ("rewrite_model", "rename", "drop", "default", "clamp", "force", "reject", "headers")
_RULE_KEYS = ("name", "when", *_KINDS)
_REJECT_KEYS = ("message", "status", "code", "param", "if")
_STATUSES = (400, 403, 404, 422, 429)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MODEL = "model"


class RulesInvalid(Exception):
    """A rules file with problems; its text has one line for each, `FILE:LINE: problem`."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        super().__init__(
            "\n".join(
                f"{source}:{problem.line}: {problem.message}"
                if problem.line
                else f"{source}: {problem.message}"
                for problem in self.problems
            )
        )


def load(path: FilePath) -> RuleSet:
    """Read a rules file. Raises RulesInvalid."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RulesInvalid(str(path), [Problem(0, error.strerror or str(error))]) from None
    except UnicodeDecodeError as error:
        raise RulesInvalid(str(path), [Problem(0, f"not UTF-8: {error}")]) from None
    return parse(text, str(path))


def parse(text: str, source: str = "rules") -> RuleSet:
    """The rules in `text`. Raises RulesInvalid with all problems at once."""
    loader = _Loader()
    rules = loader.file(text)
    if loader.reader.problems:
        raise RulesInvalid(source, loader.reader.problems)
    return rules


class _Loader:
    def __init__(self) -> None:
        self.reader = Reader()
        self._conditions = ConditionReader(self.reader)
        # Lines of the paths that are given defaults or forced, to refuse those that are both.
        self._defaults: dict[tuple[str, ...], int] = {}
        self._forces: dict[tuple[str, ...], int] = {}

    def file(self, text: str) -> RuleSet:
        node = self.reader.compose(text)
        if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")):
            return RuleSet()
        rules: tuple[Rule, ...] = ()
        forward: tuple[Glob, ...] = ()
        for key, _, value in self.reader.mapping(node, "the file", _FILE_KEYS):
            if key == "version" and self.reader.json(value) != "1":
                self.reader.fail(value, "version should be 1")
            elif key == "headers":
                forward = self._forward_headers(value)
            elif key == "rules":
                rules = self._rules(value)
        self._refuse_conflicts(node)
        return RuleSet(rules, forward)

    def _rules(self, node: yaml.Node) -> tuple[Rule, ...]:
        rules = []
        names: set[str] = set()
        for position, one in enumerate(self.reader.sequence(node, "rules"), 1):
            rule = self._rule(one, f"rule-{position}")
            if rule.name in names:
                self.reader.fail(one, f"two rules have the name {rule.name!r}")
            names.add(rule.name)
            rules.append(rule)
        return tuple(rules)

    def _rule(self, node: yaml.Node, default_name: str) -> Rule:
        fields: dict[str, Any] = {"name": default_name}
        readers: dict[str, Callable[[yaml.Node], Any]] = {
            "name": self._name,
            "when": self._conditions.when,
            "rewrite_model": self._rewrite_model,
            "rename": self._rename,
            "drop": self._drop,
            "default": self._default,
            "clamp": self._clamp,
            "force": self._force,
            "reject": self._reject,
        }
        kinds = 0
        for key, key_node, value in self.reader.mapping(node, "a rule", _RULE_KEYS):
            kinds += key in _KINDS
            if key == "headers":
                fields |= self._rule_headers(value)
            elif (read := readers[key](value)) is not None:
                fields[key] = read
            if key in _KINDS and isinstance(value, yaml.CollectionNode) and not value.value:
                self.reader.fail(key_node, f"{key} is empty")
        if not kinds and isinstance(node, yaml.MappingNode):
            self.reader.fail(node, f"a rule should have one of {', '.join(_KINDS)}")
        rule = Rule(**fields)
        if rule.rewrite_model and rule.when.served_model is not None:
            self.reader.fail(
                node, "served_model is the name after rewrite_model: a rule cannot have both"
            )
        return rule

    def _name(self, node: yaml.Node) -> str | None:
        name = self.reader.text(node, "name")
        if name is not None and not _NAME.fullmatch(name):
            self.reader.fail(node, "name should consist of letters, digits, '.', '_' and '-'")
            return None
        return name

    def _rewrite_model(self, node: yaml.Node) -> tuple[ModelRewrite, ...]:
        if not isinstance(node, yaml.MappingNode):
            name = self.reader.text(node, "rewrite_model")
            return () if name is None else (ModelRewrite(Glob.parse("*"), name),)
        rewrites = []
        for pattern, key_node, value in self.reader.mapping(node, "rewrite_model"):
            name = self.reader.text(value, "a model name")
            if not pattern:
                self.reader.fail(key_node, "a model name should not be empty")
            elif name is not None:
                rewrites.append(ModelRewrite(Glob.parse(pattern), name))
        return tuple(rewrites)

    def _rename(self, node: yaml.Node) -> tuple[Rename, ...]:
        renames = []
        for text, key_node, value in self.reader.mapping(node, "rename"):
            target = self._target(key_node, text)
            new_key = self.reader.text(value, "the new name")
            if new_key == _MODEL and target is not None and len(target.keys) == 1:
                self.reader.fail(value, "model is changed by rewrite_model only")
            elif target is not None and new_key is not None:
                if target.keys[-1] == new_key:
                    self.reader.fail(value, "the new name is the old one")
                renames.append(Rename(target, new_key))
        return tuple(renames)

    def _drop(self, node: yaml.Node) -> tuple[Target, ...]:
        targets = []
        for one in self.reader.one_or_more(node):
            text = self.reader.text(one, "a key to drop")
            target = None if text is None else self._target(one, text)
            if target is not None:
                targets.append(target)
        return tuple(targets)

    def _default(self, node: yaml.Node) -> tuple[Fill, ...]:
        tree: dict[str, Any] = {}
        for text, key_node, value in self.reader.mapping(node, "default"):
            target = self._target(key_node, text, may_be_model=True)
            filled = self.reader.json(value)
            if target is None or filled is None:
                continue
            if not graft(tree, target.keys, filled):
                self.reader.fail(key_node, f"{text} overlaps another default of this rule")
            for leaf in leaves(target.keys, filled):
                self._defaults.setdefault(leaf, key_node.start_mark.line + 1)
        return to_fills(tree)

    def _clamp(self, node: yaml.Node) -> tuple[Clamp, ...]:
        clamps = []
        for text, key_node, value in self.reader.mapping(node, "clamp"):
            target = self._target(key_node, text)
            bounds: dict[str, str] = {}
            for key, _, bound in self.reader.mapping(value, f"clamp of {text}", ("min", "max")):
                number = self.reader.number(bound, key)
                if number is not None:
                    bounds[key] = number
            low, high = bounds.get("min"), bounds.get("max")
            if low is not None and high is not None and float(low) > float(high):
                self.reader.fail(value, f"min {low} is above max {high}")
            if low is None and high is None:
                self.reader.fail(value, f"clamp of {text} should have min, max or both")
            if target is not None:
                clamps.append(
                    Clamp(
                        target,
                        min=None if low is None else float(low),
                        min_text=low or "",
                        max=None if high is None else float(high),
                        max_text=high or "",
                    )
                )
        return tuple(clamps)

    def _force(self, node: yaml.Node) -> tuple[Force, ...]:
        forces = []
        for text, key_node, value in self.reader.mapping(node, "force"):
            target = self._target(key_node, text)
            forced = self.reader.json(value)
            if target is not None and forced is not None:
                self._forces.setdefault(target.keys, key_node.start_mark.line + 1)
                forces.append(Force(target, forced))
        return tuple(forces)

    def _reject(self, node: yaml.Node) -> Reject | None:
        if not isinstance(node, yaml.MappingNode):
            message = self.reader.text(node, "reject")
            return None if message is None else Reject(message)
        fields: dict[str, Any] = {}
        for key, _, value in self.reader.mapping(node, "reject", _REJECT_KEYS):
            if key == "if":
                fields["condition"] = self._conditions.predicate(value)
            elif key == "status":
                status = self.reader.number(value, "status")
                if status is not None and status not in map(str, _STATUSES):
                    self.reader.fail(value, f"status should be one of {_STATUSES}")
                elif status is not None:
                    fields["status"] = int(status)
            else:
                fields[key] = self.reader.text(value, key)
        if fields.get("message") is None:
            self.reader.fail(node, "reject should have a message")
            return None
        return Reject(**fields)

    def _rule_headers(self, node: yaml.Node) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, _, value in self.reader.mapping(node, "headers", ("set", "remove")):
            if key == "remove":
                names = [self._header_name(one) for one in self.reader.one_or_more(value)]
                fields["remove_headers"] = tuple(name for name in names if name is not None)
                continue
            changes = []
            for _, name_node, value_node in self.reader.mapping(value, "set"):
                name = self._header_name(name_node)
                header_value = self.reader.text(value_node, "the value of a header")
                if header_value is not None and not header_rules.VALUE.fullmatch(header_value):
                    self.reader.fail(value_node, "a header's value should be printable ASCII")
                elif name is not None and header_value is not None:
                    changes.append(SetHeader(name, header_value))
            fields["set_headers"] = tuple(changes)
        return fields

    def _header_name(self, node: yaml.Node) -> str | None:
        name = self.reader.text(node, "the name of a header")
        if name is None:
            return None
        if not header_rules.NAME.fullmatch(name.lower()):
            self.reader.fail(node, f"{name!r} is not the name of a header")
            return None
        if header_rules.is_reserved(name.lower()):
            self.reader.fail(node, f"the header {name!r} is reserved: rules cannot change it")
            return None
        return name.lower()

    def _forward_headers(self, node: yaml.Node) -> tuple[Glob, ...]:
        globs = []
        for key, _, value in self.reader.mapping(node, "headers", ("forward",)):
            for one in self.reader.one_or_more(value):
                name = self.reader.text(one, f"the name of a header in {key}")
                if name is None:
                    continue
                if not header_rules.NAME.fullmatch(name.lower().replace("*", "a")):
                    self.reader.fail(one, f"{name!r} is not the name of a header, or a glob")
                elif not header_rules.can_be_allowed(name.lower()):
                    self.reader.fail(one, f"the header {name!r} is never forwarded")
                else:
                    globs.append(Glob.parse(name.lower()))
        return tuple(globs)

    def _target(self, node: yaml.Node, text: str, *, may_be_model: bool = False) -> Target | None:
        try:
            keys = Path.parse(text).keys()
        except ValueError as error:
            self.reader.fail(node, str(error))
            return None
        if keys is None:
            self.reader.fail(node, f"{text!r}: elements of arrays cannot be edited")
            return None
        if keys[0] == _MODEL and not may_be_model:
            self.reader.fail(node, "model is changed by rewrite_model only")
            return None
        return Target(".".join(keys), keys)

    def _refuse_conflicts(self, node: yaml.Node) -> None:
        for forced, line in self._forces.items():
            for filled, default_line in self._defaults.items():
                if is_same_place(forced, filled):
                    self.reader.problems.append(
                        Problem(
                            line,
                            f"{'.'.join(forced)} is forced here and has a default in line "
                            f"{default_line}: one of them can never count",
                        )
                    )
                    break
