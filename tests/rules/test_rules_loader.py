"""The rules file: every problem at once, each with its line."""

from pathlib import Path

import pytest

from gateway.rules.loader import RulesInvalid, load, parse
from gateway.rules.model import RuleSet

ROOT = Path(__file__).parents[2]


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(RulesInvalid) as caught:
        parse(text)
    return [(problem.line, problem.message) for problem in caught.value.problems]


@pytest.mark.parametrize("text", ["", "# nothing\n", "rules: []", "version: 1"])
def test_empty_files_are_rules_without_effect(text: str) -> None:
    assert parse(text) == RuleSet()


def test_all_problems_are_told_at_once_with_their_lines() -> None:
    text = """\
version: 2
rules:
  - name: first
    defualt: {a: 1}
  - clamp:
      max_tokens: {min: 5, max: 1}
      top_p: {}
  - when: {modle: x}
    force: {n: 0x10}
"""

    assert [line for line, _ in problems(text)] == [1, 3, 4, 6, 7, 8, 9]
    assert problems(text)[2][1] == "a rule has no 'defualt'; did you mean 'default'?"


def test_text_of_the_error_is_one_line_a_problem() -> None:
    with pytest.raises(RulesInvalid) as caught:
        parse("rules:\n  - {}\n  - {}\n", "edge.yaml")

    assert str(caught.value).splitlines()[1].startswith("edge.yaml:3: a rule should have one of")


@pytest.mark.parametrize(
    "rules",
    [
        "[{default: {temperature: 1}}, {force: {temperature: 0}}]",
        "[{default: {max_tokens: 1}, force: {max_completion_tokens: 2}}]",
        "[{default: {metadata: {a: 1}}}, {force: {metadata.a: 2}}]",
        "[{default: {metadata.a.b: 1}}, {force: {metadata: {}}}]",
        "[{when: {model: a}, default: {stop: x}}, {when: {model: b}, force: {stop_sequences: y}}]",
    ],
)
def test_default_and_force_of_one_path_are_an_error(rules: str) -> None:
    [(_, message)] = problems(f"rules: {rules}")

    assert "is forced here and has a default in line 1" in message


def test_neighbours_may_have_default_and_force() -> None:
    parse("rules: [{default: {metadata.a: 1}, force: {metadata.b: 2}}]")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{drop: model}", "model is changed by rewrite_model only"),
        ("{force: {model: x}}", "model is changed by rewrite_model only"),
        ("{rename: {a: model}}", "model is changed by rewrite_model only"),
        ("{rename: {a: a}}", "the new name is the old one"),
        ("{drop: 'a[0]'}", "'a[0]': elements of arrays cannot be edited"),
        ("{drop: 'a..b'}", "'a..b' is not a path"),
        ("{drop: []}", "drop is empty"),
        ("{default: {a: .nan}}", "write numbers as in JSON"),
        ("{default: {a: 010}}", "write numbers as in JSON"),
        ("{default: {a: 1e999}}", "is too large for a number"),
        ("{default: {a: {b: 1}, a.b: 2}}", "a.b overlaps another default of this rule"),
        ("{default: {a: {b: 1, b: 2}}}", "'b' occurs twice in the value"),
        ("{default: {a: &x {b: 1}, c: {<<: *x}}}", "merge keys (<<) are not supported"),
        ("{default: {a: &x [*x]}}", "nests deeper than 50 levels"),
        ("{clamp: {a: {max: x}}}", "max should be a number"),
        ("{reject: {status: 400}}", "reject should have a message"),
        ("{reject: {message: x, status: 500}}", "status should be one of"),
        ("{name: 'a b', drop: a}", "name should consist of"),
        ("{when: {route: chats}, drop: a}", "route should be a path, or one of chat"),
        ("{when: {served_model: a}, rewrite_model: b}", "a rule cannot have both"),
        ("{when: {body: {path: a, exists: false, gt: 1}}, drop: a}", "cannot be combined"),
        ("{when: {body: {all: [], any: []}}, drop: a}", "exactly one of all, any and not"),
        ("{when: {body: {path: a, type: int}}, drop: a}", "type should be one of null"),
        ("{when: {header: {x_y: 1}}, drop: a}", "'x_y' is not the name of a header"),
        ("{headers: {set: {Host: a}}}", "the header 'Host' is reserved"),
        ("{headers: {set: {authorization: a}}}", "the header 'authorization' is reserved"),
        ("{headers: {remove: content-length}}", "the header 'content-length' is reserved"),
        ("{headers: {set: {x-pdmesh-a: a}}}", "the header 'x-pdmesh-a' is reserved"),
        ('{headers: {set: {x-a: "b\\r\\nc"}}}', "a header's value should be printable ASCII"),
    ],
)
def test_faults_of_a_rule_are_named(rule: str, message: str) -> None:
    found = problems(f"rules:\n  - {rule}\n")

    assert any(message in text and line == 2 for line, text in found), found


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("rules: {", 1, "not valid YAML"),
        ("- a", 1, "the file should be a mapping"),
        ("rules:\n  - drop: a\n    drop: b\n", 3, "'drop' occurs twice in a rule"),
        ("headers: {forward: [cookie]}", 1, "the header 'cookie' is never forwarded"),
        ("rules:\n  - {name: a, drop: a}\n  - {name: a, drop: b}\n", 3, "two rules have the name"),
    ],
)
def test_faults_of_the_file_are_named(text: str, line: int, message: str) -> None:
    assert any(message in said and line == at for at, said in problems(text))


def test_plain_words_are_texts_and_numbers_keep_their_spelling() -> None:
    rules = parse("rules: [{default: {a: no, b: 1e5, c: True, d: 2024-01-01, e: ~, f: '1'}}]")

    assert [fill.value for fill in rules.rules[0].default] == [
        *('"no"', "1e5", "true", '"2024-01-01"', "null", '"1"')
    ]


def test_missing_and_undecodable_files_are_problems(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"rules: [\xe9]")

    for name, message in (("none.yaml", "No such file"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(RulesInvalid, match=message):
            load(tmp_path / name)


def test_rules_that_we_publish_are_valid() -> None:
    blocks = (ROOT / "docs" / "rules.md").read_text().split("```yaml\n")[1:]
    whole_file, condition = (block.partition("```")[0] for block in blocks)

    assert [rule.name for rule in parse(whole_file).rules][:2] == ["alias", "chat"]
    assert parse(f"rules:\n- drop: a\n  {condition.replace(chr(10), chr(10) + '  ')}").rules
    assert load(ROOT / "deploy" / "openresty" / "rules.yaml").forward_headers
