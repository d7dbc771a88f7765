"""The tokenizer service as the gateway uses it: models, prompts to ids, ids to text."""

import logging
import time
from collections.abc import Sequence

import grpc

from gateway.generation import ChatPrompt, Deadline, TextPrompt
from gateway.keys.model import ANYONE, Caller
from gateway.peers import ask_any, first_answer
from mesh import metrics
from mesh.client import mesh_errors
from mesh.errors import MeshError, ModelNotFound
from mesh.text.token_bytes import TokenBytes
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc

logger = logging.getLogger(__name__)

_LIST_TIMEOUT_S = 5.0
# An unknown name may belong to a model that was just loaded; asking is bounded.
_REFRESH_INTERVAL_S = 1.0


class Tokenizer:
    """Calls with deadlines; owns nothing."""

    def __init__(
        self, channel: grpc.aio.Channel, *, encode_timeout_s: float, patience_s: float
    ) -> None:
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._encode_timeout_s = encode_timeout_s
        self._patience_s = patience_s

    async def list_models(
        self, timeout_s: float = _LIST_TIMEOUT_S
    ) -> list[tokenizer_pb2.ModelInfo]:
        async def ask(left_s: float) -> tokenizer_pb2.ListModelsResponse:
            with mesh_errors():
                return await self._stub.ListModels(
                    tokenizer_pb2.ListModelsRequest(), timeout=left_s
                )

        return list((await first_answer(ask, timeout_s=timeout_s)).models)

    async def token_bytes(
        self, model: str, timeout_s: float = _LIST_TIMEOUT_S
    ) -> tokenizer_pb2.GetTokenBytesResponse:
        async def ask(left_s: float) -> tokenizer_pb2.GetTokenBytesResponse:
            with mesh_errors():
                return await self._stub.GetTokenBytes(
                    tokenizer_pb2.GetTokenBytesRequest(model=model), timeout=left_s
                )

        return await first_answer(ask, timeout_s=timeout_s)

    async def encode(
        self,
        model: str,
        prompt: TextPrompt | ChatPrompt,
        deadline: Deadline,
        bad_words: Sequence[str] = (),
        *,
        max_prompt_tokens: int = 0,
    ) -> tokenizer_pb2.EncodeResponse:
        """With `max_prompt_tokens` 0 the prompt has to fit the model's window."""
        request = tokenizer_pb2.EncodeRequest(
            model=model, bad_words=bad_words, max_prompt_tokens=max_prompt_tokens
        )
        if isinstance(prompt, TextPrompt):
            request.text = prompt.text
        else:
            request.chat.CopyFrom(prompt.chat)

        async def ask() -> tokenizer_pb2.EncodeResponse:
            with mesh_errors():
                return await self._stub.Encode(
                    request, timeout=deadline.remaining_s(self._encode_timeout_s)
                )

        return await ask_any(ask, patience_s=self._patience_s)

    async def decode(
        self,
        model: str,
        token_ids: Sequence[int],
        deadline: Deadline,
        *,
        return_token_bytes: bool = False,
    ) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
        request = tokenizer_pb2.TokenizerServiceDecodeRequest(
            model=model, token_ids=token_ids, return_token_bytes=return_token_bytes
        )

        async def ask() -> tokenizer_pb2.TokenizerServiceDecodeResponse:
            with mesh_errors():
                return await self._stub.Decode(
                    request, timeout=deadline.remaining_s(self._encode_timeout_s)
                )

        return await ask_any(ask, patience_s=self._patience_s)


class ModelCatalog:
    """The models that are served, as last heard from the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._models: dict[str, tokenizer_pb2.ModelInfo] = {}
        self._refreshed_at = float("-inf")
        # Where each token is a run of bytes. Changes with the models.
        self.token_bytes: dict[str, TokenBytes] = {}

    async def get(self, name: str, caller: Caller = ANYONE) -> tokenizer_pb2.ModelInfo:
        """The model of exactly this name."""
        if name not in self._models:
            await self._refresh_if_old()
        model = self._models.get(name)
        if model is None or not caller.may_use(name):
            # One answer for both: what others use is nobody's business.
            raise ModelNotFound(
                f"The model {name[:200]!r} does not exist or you do not have access to it.",
                param="model",
            )
        return model

    async def default(self, caller: Caller = ANYONE) -> tokenizer_pb2.ModelInfo:
        """The first model that the caller may use: for those who name none."""
        models = await self.all(caller)
        if not models:
            raise ModelNotFound("No model is served.", param="model")
        return models[0]

    async def all(self, caller: Caller = ANYONE) -> list[tokenizer_pb2.ModelInfo]:
        await self._refresh_if_old()
        return [model for model in self._models.values() if caller.may_use(model.name)]

    async def refresh(self, timeout_s: float = _LIST_TIMEOUT_S) -> None:
        """Ask the tokenizer; what was known stays known when it does not answer."""
        models = await self._tokenizer.list_models(timeout_s)
        await self._learn_tokens(models, timeout_s)
        self._models = {model.name: model for model in models}
        self._refreshed_at = time.monotonic()
        metrics.MODELS.allow(*self._models)

    async def _learn_tokens(
        self, models: Sequence[tokenizer_pb2.ModelInfo], timeout_s: float
    ) -> None:
        """Have the bytes of the tokens of these models, and of no others; what cannot be had is
        asked for later."""
        for name in self.token_bytes.keys() - {model.name for model in models}:
            del self.token_bytes[name]
        for model in models:
            known = self._models.get(model.name)
            is_known = known is not None and known.tokenizer_sha256 == model.tokenizer_sha256
            if is_known and model.name in self.token_bytes:
                continue
            self.token_bytes.pop(model.name, None)
            if not model.has_byte_tokens:
                continue
            try:
                tokens = await self._tokenizer.token_bytes(model.name, timeout_s)
            except MeshError as error:
                logger.warning("no token bytes", extra={"model": model.name, "reason": str(error)})
                continue
            if tokens.tokenizer_sha256 == model.tokenizer_sha256:
                self.token_bytes[model.name] = TokenBytes(
                    list(tokens.token_bytes), frozenset(tokens.special_token_ids)
                )

    async def _refresh_if_old(self) -> None:
        if time.monotonic() - self._refreshed_at < _REFRESH_INTERVAL_S:
            return
        try:
            await self.refresh()
        except MeshError:
            # A name is only unknown to someone who knows the known ones.
            if not self._models:
                raise
