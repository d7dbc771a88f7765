"""Puts the tokenizer service together from its settings, and takes it apart again."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mesh import metrics
from mesh.server import MeshServer, serve
from mesh.telemetry import Stopwatch
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.encoder import Encoder
from tokenizer_svc.models import InvalidModel, TokenizerModel, load_model
from tokenizer_svc.sequence_table import SequenceLimits
from tokenizer_svc.service import TokenizerServicer

logger = logging.getLogger(__name__)


async def run(config: TokenizerConfig) -> None:
    """Serve until told to stop; a model that cannot be served ends the process with 1."""
    try:
        with open_service(config) as (server, servicer):
            await serve(
                server,
                drain=servicer.drain,
                drain_timeout_s=config.drain_timeout_s,
                parent_pid=config.parent_pid,
            )
    except InvalidModel as error:
        logger.error("a model cannot be served", extra={"problem": str(error)})
        raise SystemExit(1) from error


@contextmanager
def open_service(config: TokenizerConfig) -> Iterator[tuple[MeshServer, TokenizerServicer]]:
    """A server that is ready to start; threads and child processes end with the block.

    Raises:
        InvalidModel: a model folder cannot be served.
    """
    with ExitStack() as stack:
        models = [_load(name, config, stack) for name in config.models]
        encoder = Encoder(num_threads=config.encode_threads, max_waiting=config.max_waiting_encodes)
        stack.callback(encoder.close)
        servicer = TokenizerServicer(
            models,
            encoder,
            sequence_limits=SequenceLimits(
                max_open_sequences=config.max_open_sequences,
                max_stop_strings=config.max_stop_strings,
                max_stop_chars=config.max_stop_chars,
            ),
            max_bad_words=config.max_bad_words,
            max_message_bytes=config.max_message_bytes,
        )
        stack.callback(metrics.NUM_SEQUENCES.watch(lambda: servicer.num_sequences))
        server = MeshServer(config.listen, max_message_bytes=config.max_message_bytes)
        servicer.add_to(server)
        yield server, servicer


def _load(name: str, config: TokenizerConfig, stack: ExitStack) -> TokenizerModel:
    stopwatch = Stopwatch()
    model = load_model(
        name,
        Path(config.models[name]).expanduser(),
        config.render_limits,
        max_prompt_chars=config.max_message_bytes,
        max_model_len=config.max_model_len,
    )
    stack.callback(model.close)
    logger.info(
        "model loaded",
        extra={
            "model": name,
            "tokenizer_sha256": model.tokenizer_sha256,
            "duration_ms": round(stopwatch.elapsed_ms, 1),
        },
    )
    return model
