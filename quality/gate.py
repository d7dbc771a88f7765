"""The gate: what a change to anything numeric must pass before it may be a default."""

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.registry import Choice
from engine.sampling import SamplingParams
from mesh import model_store
from mesh.bench.machine import describe_machine
from mesh.block_keys import BlockKeys, layout_fingerprint
from quality.generate import generate
from quality.prompts import SIX_QUESTIONS, VARIED_PROMPTS
from quality.settings import describe
from quality.text_quality import SliceRunner, TextQuality, Window, compare_on_texts
from tokenizer_svc.chat_template import ChatPrompt
from tokenizer_svc.encoder import Encoder, TextPrompt
from tokenizer_svc.models import TokenizerModel, load_model
from tokenizer_svc.renderer import RenderLimits

FORMAT = "pdmesh-gate/1"
TEXTS = ("english", "code")

_MAX_WINDOW = 2048
_ANSWER_TOKENS = 24
_IDENTITY_TOKENS = 48
_GREEDY = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
# Greedy, and a draw that would show a shifted probability.
_IDENTITY_PARAMS = {
    "greedy": SamplingParams(max_tokens=_IDENTITY_TOKENS, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(
        max_tokens=_IDENTITY_TOKENS, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True
    ),
}


@dataclass(frozen=True)
class Limits:
    """What a lossy candidate may lose against the reference."""

    max_perplexity_increase: float
    max_mean_kl: float
    min_top1_agreement: float


@dataclass(frozen=True)
class Answer:
    """One of the six questions, answered."""

    prompt: str
    expected: str
    answer: str

    @property
    def is_right(self) -> bool:
        return self.expected in self.answer


@dataclass(frozen=True)
class Identity:
    """Whether two configurations make the same tokens."""

    num_prompts: int
    num_tokens: int
    # Sampling, prompt and the first position that differs.
    differences: tuple[str, ...]


@dataclass(frozen=True)
class GateResult:
    """A verdict, and everything that it is bound to."""

    model: str
    revision: str
    candidate: Mapping[str, Any]
    reference: Mapping[str, Any]
    questions: tuple[Answer, ...]
    # Of a lossless change.
    identity: Identity | None
    # Of any other.
    quality: Mapping[str, TextQuality] | None
    limits: Limits | None
    texts_sha256: str
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "format": FORMAT,
            "passed": self.passed,
            "failures": list(self.failures),
            "model": {"name": self.model, "revision": self.revision},
            "candidate": dict(self.candidate),
            "reference": dict(self.reference),
            "questions": [{**vars(each), "right": each.is_right} for each in self.questions],
            "identity": None if self.identity is None else vars(self.identity),
            "quality": None
            if self.quality is None
            else {name: vars(quality) for name, quality in self.quality.items()},
            "limits": None if self.limits is None else vars(self.limits),
            "texts_sha256": self.texts_sha256,
            "machine": describe_machine(),
            "versions": {"pdmesh": metadata.version("pdmesh"), "torch": torch.__version__},
        }


def limits_for(candidate: Choice) -> Limits:
    """What each format may lose; a quantized KV cache may lose half a percent more."""
    increase = 0.015 if candidate.weights == "int8" else 0.01
    if candidate.kv_dtype in ("int8", "fp8"):
        increase += 0.005
    return Limits(increase, max_mean_kl=0.01, min_top1_agreement=0.95)


def run_gate(
    name: str,
    candidate: EngineConfig,
    reference: EngineConfig,
    *,
    limits: Limits | None,
    texts: Mapping[str, str] | None = None,
    prompts: Sequence[str] = VARIED_PROMPTS,
) -> GateResult:
    """Ask, compare and judge. No `limits` means that the change is lossless.

    Texts or prompts of one's own are for tests: verdicts on them compare with no others.
    """
    texts = read_texts() if texts is None else texts
    text = _Text(candidate.model_path)
    with closing(text), _engine(candidate) as tested, _engine(reference) as trusted:
        quality = identity = None
        if limits is not None:
            # First: it writes to blocks that the engines' own pools do not know of.
            token_ids = {key: text.encode(value) for key, value in texts.items()}
            window = _window(tested, trusted)
            quality = compare_on_texts(_runner(trusted), _runner(tested), token_ids, window)
        else:
            identity = _compare_tokens(trusted, tested, text, prompts)
        questions = _ask(tested, text)
    return GateResult(
        model=name,
        revision=revision_of(candidate.model_path),
        candidate=describe(candidate),
        reference=describe(reference),
        questions=questions,
        identity=identity,
        quality=quality,
        limits=limits,
        texts_sha256=hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest(),
        failures=tuple(failures(questions, identity, quality, limits)),
    )


def read_texts() -> dict[str, str]:
    """The fixed texts, by name."""
    folder = files("quality") / "text"
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS}


def revision_of(folder: Path) -> str:
    """The same for two folders exactly when they hold the same model."""
    manifest = model_store.read_manifest(folder)
    if manifest is not None:
        return manifest.revision
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(f"{path.name}={hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


class _Text:
    """Text to token ids and back, as the tokenizer service does it."""

    def __init__(self, folder: Path) -> None:
        self._model: TokenizerModel = load_model("gate", folder, RenderLimits(num_processes=1))
        self._encoder = Encoder(num_threads=1, max_waiting=1)

    def encode(self, text: str) -> list[int]:
        return self._encode(TextPrompt(text))

    def encode_question(self, kind: str, prompt: str) -> list[int]:
        if kind != "chat":
            return self.encode(prompt)
        return self._encode(ChatPrompt(json.dumps([{"role": "user", "content": prompt}])))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._model.trusting_tokenizer.decode(list(token_ids)))

    def close(self) -> None:
        self._encoder.close()
        self._model.close()

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        encoded = self._encoder.encode(self._model, prompt, (), max_prompt_tokens=1 << 20)
        return asyncio.run(encoded).token_ids


@contextmanager
def _engine(config: EngineConfig) -> Iterator[Engine]:
    engine = build_engine(config, lambda fields: BlockKeys(layout_fingerprint(fields)))
    try:
        yield engine
    finally:
        engine.close()


def _runner(engine: Engine) -> SliceRunner:
    runner = engine.runner
    assert isinstance(runner, SliceRunner), f"{type(runner).__name__} runs no slices"
    return runner


def _window(*engines: Engine) -> Window:
    # A cache may hold less than the model was made for.
    limits = [engine.max_model_len for engine in engines]
    return Window(
        num_tokens=min(_MAX_WINDOW, *limits),
        chunk=min(engine.max_num_batched_tokens for engine in engines),
        # Of the larger ones it takes more than there are tokens for.
        block_size=min(engine.block_size for engine in engines),
    )


def _ask(engine: Engine, text: _Text) -> tuple[Answer, ...]:
    prompts = {
        question.prompt: text.encode_question(question.kind, question.prompt)
        for question in SIX_QUESTIONS
    }
    answers = generate(engine, prompts, _GREEDY)
    return tuple(
        Answer(question.prompt, question.answer, text.decode(answers[question.prompt]))
        for question in SIX_QUESTIONS
    )


def _compare_tokens(
    trusted: Engine, tested: Engine, text: _Text, prompts: Sequence[str]
) -> Identity:
    encoded = {f"prompt {index}": text.encode(each) for index, each in enumerate(prompts)}
    longest = min(engine.max_model_len for engine in (trusted, tested)) - _IDENTITY_TOKENS
    fitting = {name: token_ids for name, token_ids in encoded.items() if len(token_ids) <= longest}
    differences: list[str] = []
    num_tokens = 0
    for sampling, params in _IDENTITY_PARAMS.items():
        expected = generate(trusted, fitting, params)
        produced = generate(tested, fitting, params)
        for name, token_ids in expected.items():
            num_tokens += len(token_ids)
            if produced[name] != token_ids:
                at = _first_difference(token_ids, produced[name])
                differences.append(f"{sampling}, {name}: token {at} differs")
    return Identity(len(fitting), num_tokens, tuple(differences))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )


def failures(
    questions: Sequence[Answer],
    identity: Identity | None,
    quality: Mapping[str, TextQuality] | None,
    limits: Limits | None,
) -> Iterator[str]:
    """Why a candidate does not pass; nothing if it does. A NaN never passes."""
    for answer in questions:
        if not answer.is_right:
            yield f"{answer.prompt!r}: {answer.answer!r} lacks {answer.expected!r}"
    if identity is not None:
        yield from identity.differences
    if quality is None or limits is None:
        return
    whole = quality["all"]
    if not whole.perplexity_increase <= limits.max_perplexity_increase:
        yield (
            f"perplexity is {whole.perplexity_increase:.2%} above the reference's, "
            f"at most {limits.max_perplexity_increase:.2%} is allowed"
        )
    if not whole.mean_kl <= limits.max_mean_kl:
        yield f"mean KL is {whole.mean_kl:.4f} nats, at most {limits.max_mean_kl} is allowed"
    if not whole.top1_agreement >= limits.min_top1_agreement:
        yield (
            f"top-1 agreement is {whole.top1_agreement:.2%}, "
            f"at least {limits.min_top1_agreement:.2%} is needed"
        )
