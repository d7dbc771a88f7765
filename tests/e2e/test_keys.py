"""Keys on a real mesh; and nothing that it was told, in confidence or at all, is written down."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import grpc
import openai
import pytest

from mesh.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.harness import MODEL, Collector, RunningMesh, pdmesh, start_mesh

PROMPT = "The quixotic zebra of Novosibirsk asked for marmalade. What did the zebra ask for?"
WRONG_KEY = "pdm_wrongwrong_" + "z9" * 21 + "z"


@dataclass(frozen=True)
class Locked:
    """A mesh that wants keys, tells all that it ever tells, and a key to it."""

    mesh: RunningMesh
    key: str


@pytest.fixture(scope="module")
def locked(
    tmp_path_factory: pytest.TempPathFactory, model_home: Path, collector: tuple[Collector, str]
) -> Iterator[Locked]:
    home = tmp_path_factory.mktemp("locked")
    key = pdmesh(home, "key", "add", "ada", "--group", "research", "--rpm", "1000").strip()
    rules = home / "rules.yaml"
    rules.write_text("rules: [{when: {key_group: research}, clamp: {max_tokens: {max: 24}}}]")
    mesh = start_mesh(
        home,
        model_home,
        # With keys, others may be let in.
        *("--host", "0.0.0.0"),
        *("--rules", str(rules)),
        *("--log-level", "DEBUG"),
        *("--set", "scheduler.mode=disaggregated"),
        *("--otlp-endpoint", collector[1]),
    )
    yield Locked(mesh, key)
    pdmesh(home, "down")


def test_key_opens_the_mesh_and_is_refused_seconds_after_it_was_revoked(locked: Locked) -> None:
    guest = locked.mesh.pdmesh("key", "add", "guest").strip()
    with locked.mesh.client(api_key="none") as nobody, pytest.raises(openai.AuthenticationError):
        nobody.models.list()
    with locked.mesh.client(api_key=guest) as client:
        _within(5, lambda: bool(_models(client)))

        locked.mesh.pdmesh("key", "revoke", "guest")

        _within(5, lambda: _models(client) is None)
    with locked.mesh.client(api_key=locked.key) as client:
        assert _models(client) == [MODEL]


def test_nothing_of_keys_prompts_and_completions_is_logged_or_traced(
    locked: Locked, collector: tuple[Collector, str]
) -> None:
    with locked.mesh.client(timeout=60, api_key=locked.key) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            max_tokens=100,
            user="mrs-user-4711",
            metadata={"case": "case-4712"},
        )
        chunks = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=PROMPT * 2000, max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=PROMPT, logit_bias={"x": 1})
    with (
        locked.mesh.client(api_key=WRONG_KEY) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.completions.create(model=MODEL, prompt=PROMPT)
    internal = _over_grpc(locked)
    whole = answer.choices[0].message.content or ""
    assert len(whole) > 20
    assert len(streamed) > 20
    assert internal

    # Closing the mesh writes what is still in buffers.
    pdmesh(locked.mesh.home, "down")

    told = _logs(locked.mesh.home) + _spans(collector[0])
    assert '"key_group":"research"' in told.replace(" ", "")
    assert "clamp:max_tokens" in told
    for secret in (
        locked.key,
        locked.key.split("_")[2],
        WRONG_KEY,
        "quixotic zebra",
        "Novosibirsk",
        whole[:20],
        streamed[:20],
        internal[:20],
        "mrs-user-4711",
        "case-4712",
    ):
        assert secret not in told, secret


def _models(client: openai.OpenAI) -> list[str] | None:
    """None for a key that is refused."""
    try:
        return [model.id for model in client.models.list()]
    except openai.AuthenticationError:
        return None


def _within(seconds: float, is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def _over_grpc(locked: Locked) -> str:
    with grpc.insecure_channel(locked.mesh.state.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        responses = stub.Generate(
            inference_pb2.GenerateRequest(
                model=MODEL,
                text=PROMPT,
                sampling_params=types_pb2.SamplingParams(max_tokens=20, temperature=0),
            ),
            metadata=(("authorization", f"Bearer {locked.key}"),),
        )
        return "".join(response.delta.text for response in responses)


def _logs(home: Path) -> str:
    texts = [path.read_text(errors="replace") for path in sorted((home / "logs").iterdir())]
    assert sum('"level":"debug"' in text for text in texts) >= 3, "debug lines are looked at too"
    # JSON may write a character as its escape.
    return "\n".join(texts).encode().decode("unicode_escape", "replace")


def _spans(collector: Collector) -> str:
    parts = []
    try:
        while True:
            service, span = collector.spans.get(timeout=1)
            parts.append(f"{service} {span}")
    except Empty:
        assert any("gateway.request" in part for part in parts)
        return "\n".join(parts)
