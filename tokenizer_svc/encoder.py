"""Encodes prompts in threads, so that the event loop only waits; short ones at once."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Tokenizer

from mesh.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from tokenizer_svc.chat_template import ChatPrompt
from tokenizer_svc.messages import ChatError
from tokenizer_svc.models import TokenizerModel

Result = TypeVar("Result")

# Encoding takes about 200 times a text's size in memory. A text above this is
# first counted piece by piece, so that only one that fits is encoded as a whole.
_MAX_UNCOUNTED_BYTES = 1 << 20
_PIECE_CHARS = 1 << 17
# How many tokens, at the very most, a cut can add to those of the uncut text.
_MAX_TOKENS_PER_CUT = 512

_RETRY_AFTER_S = 1.0

# A prompt this short is encoded in less time than it takes to wake a thread for it and to hear
# of the result.
_MAX_INLINE_CHARS = 2048


@dataclass(frozen=True)
class TextPrompt:
    """Plain text to encode."""

    text: str
    # Encode control tokens that the text spells as such.
    allow_special_tokens: bool = False


@dataclass(frozen=True)
class EncodedPrompt:
    """What the engine gets."""

    token_ids: list[int]
    bad_words: list[list[int]]


class Encoder:
    """Owns the threads in which prompts are encoded; bounds how many wait for one."""

    def __init__(self, *, num_threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "encode")
        self._max_calls = num_threads + max_waiting
        self._num_calls = 0

    async def encode(
        self,
        model: TokenizerModel,
        prompt: TextPrompt | ChatPrompt,
        bad_words: Sequence[str],
        max_prompt_tokens: int,
    ) -> EncodedPrompt:
        """Encode a prompt; cancelling discards the result.

        Raises:
            InvalidRequest: no tokens, a malformed chat, an empty bad word.
            ContextLengthExceeded: more than `max_prompt_tokens`.
            QueueFull: too many prompts wait already.
        """
        if self._num_calls >= self._max_calls:
            raise QueueFull("too many prompts wait to be encoded", retry_after_s=_RETRY_AFTER_S)
        self._num_calls += 1
        try:
            text: str | bytes
            if isinstance(prompt, ChatPrompt):
                text = await _render(model, prompt)
                param, trusting = "messages", False
            else:
                text, param, trusting = prompt.text, "prompt", prompt.allow_special_tokens
            job = _EncodeJob(model, text, param, max_prompt_tokens, trusting, bad_words)
            if len(text) + sum(map(len, bad_words)) <= _MAX_INLINE_CHARS:
                return job()
            return await self.run(job)
        finally:
            self._num_calls -= 1

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run other heavy work in the same threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for the threads; work that has not begun is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)


async def _render(model: TokenizerModel, prompt: ChatPrompt) -> bytes:
    if model.renderer is None:
        raise InvalidRequest(f"the model {model.name} has no chat template", param="messages")
    try:
        return await model.renderer.render(prompt)
    except ChatError as error:
        raise InvalidRequest(str(error), param=error.param) from error


@dataclass(frozen=True)
class _EncodeJob:
    """The part of an encoding that runs in a thread."""

    model: TokenizerModel
    # A rendered chat comes as UTF-8, and holds its own control tokens.
    text: str | bytes
    param: str
    max_prompt_tokens: int
    trusting: bool
    bad_words: Sequence[str]

    def __call__(self) -> EncodedPrompt:
        model = self.model
        text = self.text if isinstance(self.text, str) else self.text.decode()
        tokenizer = model.trusting_tokenizer if self.trusting else model.guarded_tokenizer
        self._refuse_if_certainly_too_long(tokenizer, text)
        # A template writes the beginning itself; for text the tokenizer's own rule holds.
        is_text = isinstance(self.text, str)
        token_ids = _encode(tokenizer, text, add_special_tokens=is_text)
        if token_ids[:2] == [model.bos_token_id] * 2 and self.trusting:
            del token_ids[0]  # the text had spelled it already
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens", param=self.param)
        if len(token_ids) > self.max_prompt_tokens:
            raise self._too_long(str(len(token_ids)))
        return EncodedPrompt(token_ids, encode_bad_words(model.guarded_tokenizer, self.bad_words))

    def _refuse_if_certainly_too_long(self, tokenizer: Tokenizer, text: str) -> None:
        bound = self.model.length_bound
        # In a rendered chat the control tokens are longer than they read.
        if bound is not None and isinstance(self.text, str):
            at_least = bound.least_num_tokens(text)
            if at_least > self.max_prompt_tokens:
                raise self._too_long(f"at least {at_least}")
        if len(text) <= _MAX_UNCOUNTED_BYTES // 4 or len(text.encode()) <= _MAX_UNCOUNTED_BYTES:
            return
        at_least = 0
        for piece in _pieces(text):
            at_least += len(_encode(tokenizer, piece, add_special_tokens=False))
            at_least -= _MAX_TOKENS_PER_CUT
            if at_least > self.max_prompt_tokens:
                raise self._too_long(f"at least {at_least}")

    def _too_long(self, num_tokens: str) -> ContextLengthExceeded:
        limit = self.max_prompt_tokens
        # OpenAI's words: some clients know by them that another model may do.
        is_window = limit == self.model.max_model_len
        whose = "This model's maximum context length" if is_window else "The limit"
        return ContextLengthExceeded(
            f"{whose} is {limit} tokens, however the prompt has {num_tokens} tokens.",
            param=self.param,
        )


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Every way in which the words can appear: at a beginning, and after a space."""
    encodings: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        bare = word.strip(" ")
        if not bare:
            raise InvalidRequest("a bad word must not be empty", param=f"bad_words[{i}]")
        for spelling in (word, bare, f" {bare}"):
            encodings[tuple(_encode(tokenizer, spelling, add_special_tokens=False))] = None
    return [list(encoding) for encoding in encodings]


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # Unlike `encode`, the batch form lets other threads run meanwhile.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]
