"""Where inputs come from: grammar, mutation of real bodies, noise."""

import json

from hypothesis import strategies as st

from tests.rules.bodies import BODIES, STRINGS, VALUES, broken_bodies

_REAL = [
    json.dumps(body).encode()
    for body in (
        {
            "model": "smol",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be é"}]},
                {"role": "user", "content": "hi", "name": "ada"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "seen"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto",
            "logprobs": True,
            "top_logprobs": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "continue_final_message": False,
        },
        {
            "model": "smol",
            "prompt": [[1, 2], [3]],
            "max_tokens": 5,
            "max_completion_tokens": 5,
            "temperature": 0.7,
            "top_p": 1,
            "top_k": -1,
            "min_p": 0,
            "seed": -9223372036854775808,
            "logit_bias": {"5": -100, "6": 1.5},
            "stop": ["\n", "x"],
            "stop_token_ids": [256],
            "bad_words": ["no"],
            "min_tokens": 1,
            "n": 2,
            "echo": True,
            "logprobs": 2,
            "best_of": 1,
            "metadata": {"a": "b"},
        },
        {"model": "smol", "prompt": "hi", "add_special_tokens": True, "tokens": [1, 2]},
    )
]
_PIECES = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"\\ud800", b"\xff", b"\x00"),
    *(b"null", b"true", b"NaN", b"1e400", b"-0", b"1.0", b"9" * 30, b"[]", b"{}", b'""', b" "),
    *(b"2.5", b"-1", b"4294967296", b'"a"', b"[[]]", b'{"a":1}', b"\xef\xbb\xbf", b"\xc2\x85"),
]


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A real body with some places changed."""
    body = draw(st.sampled_from(_REAL))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.sampled_from([0, 0, 1, 2, 4, 9])))
        piece = draw(st.sampled_from([b"", *_PIECES]) | st.binary(max_size=3))
        body = body[:start] + piece + body[end:]
    return body


@st.composite
def typed_mutants(draw: st.DrawFn) -> bytes:
    """A real body in which some parameters have values of any type: valid JSON, odd requests."""
    body = json.loads(draw(st.sampled_from(_REAL)))
    for name in draw(st.lists(st.sampled_from(sorted(body)), min_size=1, max_size=3)):
        body[name] = json.loads(draw(VALUES))
    return json.dumps(body).encode()


ANY_BODY = st.one_of(BODIES, broken_bodies(), mutants(), typed_mutants(), st.binary(max_size=60))

_TEXTS = st.text(
    st.one_of(
        st.sampled_from('a \n\r\t\x00\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\ufeff\ufffd:{}"\\é😀'),
        st.characters(codec="utf-8"),
    ),
    max_size=30,
)
PAYLOADS = st.lists(
    st.one_of(
        st.builds(lambda text: {"choices": [{"delta": {"content": text}}]}, _TEXTS),
        st.builds(lambda key, text: {key: [text, None, 1.5]}, _TEXTS, _TEXTS),
        STRINGS.map(json.loads),
    ),
    max_size=5,
)
CUTS = st.lists(st.integers(0, 4000), max_size=8)
