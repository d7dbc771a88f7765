"""What each kind of rule does, and that the client's word is final."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.body import parse_object
from gateway.rules.conditions import canonical
from gateway.rules.engine import Outcome, RuleRequest, actions_header, apply
from gateway.rules.loader import load, parse
from gateway.rules.model import Action, RuleSet
from tests.rules.bodies import BODIES
from tests.rules.reference import expected

CHAT = "/v1/chat/completions"
# Edits without conditions.
UNCONDITIONAL = {
    name: load(Path(__file__).parent / "rulesets" / f"{name}.yaml")
    for name in ("02-defaults", "03-clamps", "04-forces", "05-drops", "06-renames")
}


def run(rules: str | RuleSet, body: bytes | str, **about: Any) -> Outcome:
    raw = body.encode() if isinstance(body, str) else body
    rule_set = parse(rules) if isinstance(rules, str) else rules
    route = about.pop("route", CHAT)
    return apply(rule_set, RuleRequest(raw, parse_object(raw), route, **about))


def forwarded(rules: str, body: str, **about: Any) -> str:
    return run(rules, body, **about).body.decode()


def told(rules: str, body: str, **about: Any) -> str:
    return actions_header(run(rules, body, **about).actions)


@settings(max_examples=200)
@given(BODIES, st.sampled_from(sorted(UNCONDITIONAL)))
def test_edits_mean_what_they_mean_on_decoded_json(body: bytes, name: str) -> None:
    rules = UNCONDITIONAL[name]

    outcome = run(rules, body)

    assert canonical(parse_object(outcome.body)) == canonical(
        expected(list(rules.rules), parse_object(body))
    )


# GW-04
@given(BODIES)
@settings(max_examples=50)
def test_body_that_no_rule_touches_is_the_same_object(body: bytes) -> None:
    assert run("rules: [{when: {model: nobody}, force: {n: 1}}]", body).body is body
    assert run(RuleSet(), body).body is body


# GW-01
@pytest.mark.parametrize("zero", ["0", "0.0", "-0.0", "0e0"])
def test_zero_temperature_survives_a_default(zero: str) -> None:
    body = f'{{"model":"smol","messages":[],"temperature":{zero},"max_tokens":8}}'

    assert forwarded("rules: [{default: {temperature: 0.9}}]", body) == body


# GW-02
@pytest.mark.parametrize(
    "member",
    [
        *('"temperature":0', '"top_p":0', '"top_k":0', '"min_p":0', '"presence_penalty":0'),
        *('"frequency_penalty":0', '"seed":0', '"n":1', '"stream":false', '"logprobs":false'),
        *('"top_logprobs":0', '"stop":[]', '"stop":""', '"tools":[]', '"logit_bias":{}'),
        *('"user":""', '"ignore_eos":false', '"stream_options":{}'),
    ],
)
def test_falsy_values_are_explicit(member: str) -> None:
    rules = """
    rules:
      - default:
          {temperature: 0.9, top_p: 0.5, top_k: 5, min_p: 0.1, presence_penalty: 1,
           frequency_penalty: 1, seed: 7, n: 2, stream: true, logprobs: true, top_logprobs: 3,
           stop: [x], tools: [{}], logit_bias: {"5": 1}, user: u, ignore_eos: true,
           stream_options: {include_usage: true}}
    """

    text = forwarded(rules, f"{{{member}}}")

    assert text.startswith(f"{{{member},")
    assert len(parse_object(text.encode())) == 17


# GW-03
def test_null_is_explicit() -> None:
    body = '{"temperature":null,"max_tokens":null,"stop":null}'

    assert forwarded("rules: [{default: {temperature: 1, max_tokens: 2, stop: x}}]", body) == body


# GW-05
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"max_tokens":5}', '{"max_tokens":5}'),
        ("{}", '{"max_tokens":512}'),
        ('{"max_tokens":null}', '{"max_tokens":null}'),
        ('{"max_completion_tokens":9}', '{"max_completion_tokens":9}'),
    ],
)
def test_first_default_in_file_order_fills_the_slot(body: str, text: str) -> None:
    rules = "rules: [{default: {max_tokens: 512}}, {default: {max_completion_tokens: 64}}]"

    assert forwarded(rules, body) == text


def test_default_merges_into_objects_key_by_key() -> None:
    rules = """
    rules:
      - default: {stream_options: {include_usage: true}, metadata: {team: a, deep: {x: 1}}}
      - default: {stream_options.continuous_usage_stats: true, metadata: {team: b}}
    """
    body = '{ "stream_options" : {"include_usage" :false }, "metadata":{"deep":{"y":2.50}} }'

    assert forwarded(rules, body) == (
        '{ "stream_options" : {"include_usage" :false,"continuous_usage_stats":true }, '
        '"metadata":{"deep":{"y":2.50,"x":1},"team":"a"} }'
    )


def test_dropped_key_is_not_filled_again() -> None:
    rules = "rules: [{drop: [seed, metadata.a]}, {default: {seed: 1, metadata: {a: 1, b: 2}}}]"

    assert forwarded(rules, '{"seed":5,"metadata":{"a":0,"c":1}}') == '{"metadata":{"c":1,"b":2}}'


def test_inserted_numbers_keep_the_operators_digits() -> None:
    rules = "rules: [{default: {seed: 9007199254740993, temperature: 0.70}}]"

    assert forwarded(rules, "{}") == '{"seed":9007199254740993,"temperature":0.70}'


def test_clamp_bounds_numbers_and_nothing_else() -> None:
    rules = "rules: [{clamp: {max_tokens: {min: 1, max: 100}, top_p: {max: 0.9}}}]"

    assert forwarded(rules, '{"max_tokens":5e3,"top_p":0.90}') == '{"max_tokens":100,"top_p":0.90}'
    assert forwarded(rules, '{"max_completion_tokens":-1}') == '{"max_completion_tokens":1}'
    assert forwarded(rules, '{"max_tokens":null,"top_p":"x"}') == '{"max_tokens":null,"top_p":"x"}'


def test_clamp_bounds_a_default_too() -> None:
    rules = "rules: [{clamp: {max_tokens: {max: 100}}}, {default: {max_tokens: 512}}]"

    assert forwarded(rules, "{}") == '{"max_tokens":100}'
    assert told(rules, "{}") == "default:max_tokens, clamp:max_tokens"


def test_force_wins_in_every_spelling_of_the_slot() -> None:
    rules = "rules: [{force: {max_tokens: 16}}]"

    assert forwarded(rules, '{"max_completion_tokens":9}') == '{"max_completion_tokens":16}'
    assert forwarded(rules, '{"max_tokens":1,"max_completion_tokens":2}') == (
        '{"max_tokens":16,"max_completion_tokens":16}'
    )
    assert forwarded(rules, "{}") == '{"max_tokens":16}'
    assert told(rules, '{"max_tokens":16}') == ""


def test_force_reaches_into_objects_and_makes_them() -> None:
    rules = "rules: [{force: {stream_options.include_usage: true}}]"

    assert forwarded(rules, '{"stream_options":{"x":1}}') == (
        '{"stream_options":{"x":1,"include_usage":true}}'
    )
    assert (
        forwarded(rules, '{"stream_options":null}') == '{"stream_options":{"include_usage":true}}'
    )


def test_rename_keeps_value_and_place() -> None:
    rules = "rules: [{rename: {max_completion_tokens: max_tokens}}]"

    assert forwarded(rules, '{"a":1, "max_completion_tokens" : 5e0 ,"b":2}') == (
        '{"a":1, "max_tokens" : 5e0 ,"b":2}'
    )
    both = '{"max_completion_tokens":5,"max_tokens":5}'
    assert forwarded(rules, both) == both


def test_kinds_act_in_their_order_whatever_the_file_says() -> None:
    rules = """
    rules:
      - force: {c: 3}
      - clamp: {a: {max: 1}}
      - default: {a: 5, b: 6}
      - drop: b
      - rename: {old: b}
      - rewrite_model: smol
    """

    text = told(rules, '{"model":"m","old":1}')

    assert text == ("rewrite_model:smol, rename:old->b, drop:b, default:a, clamp:a, force:c")


def test_served_model_is_the_name_after_the_rewrite() -> None:
    rules = """
    rules:
      - rewrite_model: {"gpt-4*": smol}
      - {when: {served_model: smol}, default: {a: 1}}
      - {when: {model: smol}, default: {b: 1}}
      - {when: {model: gpt-4o}, default: {c: 1}}
    """

    assert forwarded(rules, '{"model":"gpt-4o"}') == '{"model":"smol","a":1,"c":1}'
    assert forwarded(rules, '{"model":"smol"}') == '{"model":"smol","a":1,"b":1}'
    assert forwarded(rules, '{"model":"SMOL"}') == '{"model":"SMOL"}'


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("{path: temperature}", True),
        ("{path: seed}", False),
        ("{path: seed, exists: false}", True),
        ("{path: temperature, equals: 0}", True),
        ("{path: temperature, equals: false}", False),
        ("{path: nothing, type: null}", True),
        ("{path: nothing, equals: null}", True),
        ("{path: max_tokens, equals: 9}", True),
        ("{path: max_completion_tokens, gt: 8, lt: 10}", True),
        ("{path: max_tokens, gt: 9}", False),
        ('{path: "messages[*].role", equals: tool}', True),
        ('{path: "messages[0].role", equals: tool}', False),
        ("{path: stop, in: [[a], [b, 1]]}", True),
        ("{path: user, like: [x*, 'a*b*c']}", True),
        ("{path: user, like: 'a*c*b*'}", False),
        ("{all: [{path: temperature}, {path: seed}]}", False),
        ("{any: [{path: temperature}, {path: seed}]}", True),
        ("{not: {path: seed}}", True),
        ("[{path: temperature}, {not: [{path: seed}]}]", True),
    ],
)
def test_predicates_see_the_clients_body(condition: str, holds: bool) -> None:
    body = (
        '{"temperature":-0.0,"nothing":null,"max_completion_tokens":9,"stop":["b",1.0],'
        '"messages":[{"role":"user"},{"role":"tool"}],"user":"a-b-b-c"}'
    )

    outcome = run(f"rules: [{{when: {{body: {condition}}}, force: {{hit: 1}}}}]", body)

    assert bool(outcome.actions) is holds


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("{route: chat}", True),
        ("{route: [completions, '/v1/*']}", True),
        ("{route: completions}", False),
        ("{key: ada, key_group: 're*'}", True),
        ("{key_group: batch}", False),
        ("{header: {X-Tenant: 't1*'}}", True),
        ("{header: {x-tenant: [a, t2]}}", True),
        ("{header: {x-other: true}}", False),
        ("{header: {x-other: false, x-tenant: true}}", True),
    ],
)
def test_rules_match_on_who_and_where(when: str, holds: bool) -> None:
    outcome = run(
        f"rules: [{{when: {when}, force: {{hit: 1}}}}]",
        "{}",
        headers=[("x-tenant", "t1-eu"), ("X-TENANT", "t2")],
        key="ada",
        key_group="research",
    )

    assert bool(outcome.actions) is holds


def test_key_conditions_do_not_hold_for_unknown_callers() -> None:
    assert not run("rules: [{when: {key: '*'}, force: {hit: 1}}]", "{}").actions


def test_reject_sees_the_body_as_it_would_be_forwarded() -> None:
    rules = """
    rules:
      - {when: {model: small}, clamp: {n: {max: 4}}}
      - name: too-many
        reject: {message: at most 4, if: {path: n, gt: 4}, param: n, code: n_too_large, status: 422}
    """

    refused = run(rules, '{"n":5}')
    clamped = run(rules, '{"model":"small","n":5}')

    assert refused.rejection is not None
    assert (refused.rejection.status, refused.rejection.param) == (422, "n")
    assert actions_header(refused.actions) == "reject:too-many"
    assert clamped.rejection is None


# GW-25
def test_only_allowed_headers_travel_on() -> None:
    rules = """
    headers: {forward: ["x-*", authorization]}
    rules:
      - headers: {set: {x-team: a}, remove: [user-agent]}
      - headers: {set: {x-team: b, user-agent: mine}}
    """
    sent = [
        ("AUTHORIZATION", "Bearer k-test"),
        ("Proxy-Authorization", "Basic eDp5"),
        ("Connection", "keep-alive, X-Trace-Secret"),
        ("X-Trace-Secret", "1"),
        ("Cookie", "a=b"),
        ("TE", "trailers"),
        ("Expect", "100-continue"),
        ("Host", "h"),
        ("Content-Length", "2"),
        ("x-internal", "t1"),
        ("X-Internal", "t2"),
        ("X-Stainless-Os", "Linux"),
        ("X-Pdmesh-Param-Actions", "forged"),
        ("x-api-key", "k"),
        ("X-Snake_Case", "1"),
        ("User-Agent", "curl"),
        ("Content-Type", "application/json"),
    ]

    outcome = run(rules, "{}", headers=sent)

    assert outcome.headers == (
        ("authorization", "Bearer k-test"),
        ("x-internal", "t1"),
        ("x-internal", "t2"),
        ("content-type", "application/json"),
        ("x-team", "a"),
    )
    assert actions_header(outcome.actions) == "remove_header:user-agent, set_header:x-team"


def test_credentials_pass_only_when_spelled_out() -> None:
    sent = [("authorization", "Bearer k"), ("x-api-key", "k")]

    assert run("headers: {forward: ['*']}", "{}", headers=sent).headers == ()


def test_actions_header_is_bounded_and_safe() -> None:
    many = [Action("default", f"k{number}", "r") for number in range(200)]

    text = actions_header([Action("default", 'né"w\r\nX: 1, b', "r"), *many])

    assert text.startswith("default:n%C3%A9%22w%0D%0AX:%201%2C%20b, default:k0, ")
    assert len(text) <= 1100
    assert text.rpartition(", +")[2].isdecimal()


def test_request_of_ten_megabytes_is_edited_in_place() -> None:
    prompt = json.dumps(["\\ud800 [{,"] * 500_000).encode()
    body = b'{"prompt":' + prompt + b',"n":5}'

    outcome = run("rules: [{force: {n: 1}}]", body)

    assert outcome.body == b'{"prompt":' + prompt + b',"n":1}'
