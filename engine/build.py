"""An engine from its settings: model, cache, queues and what computes, put together."""

from collections.abc import Callable, Mapping

from engine.batcher import Batcher
from engine.block_pool import BlockHasher, BlockPool
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.layered_prefill import LayeredPrefill
from engine.model_runner import ModelRunner
from engine.models.registry import LoadedModel, load_model
from engine.sampling import Sampler
from engine.speculation import COSTS_BY_ROWS, Speculator


def build_engine(
    config: EngineConfig,
    hasher_factory: Callable[[Mapping[str, str | int]], BlockHasher],
) -> Engine:
    """Load a model and give it a KV cache.

    `hasher_factory` gets what the engines that exchange blocks must have in common.
    """
    model_config = ModelConfig.from_folder(config.model_path)
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_model_len}, "
            f"but the model was made for {model_config.max_position_embeddings} tokens"
        )
    loaded = load_model(config, model_config, max_model_len)
    layout = loaded.layout
    num_blocks = config.num_blocks or config.kv_cache_memory_bytes // layout.block_bytes
    kv_cache = KvCache(layout, num_blocks, config.segment_path, config.device)
    pool = BlockPool(
        num_blocks,
        config.block_size,
        hasher_factory(layout.fields()),
        enable_prefix_caching=config.enable_prefix_caching,
        marks=kv_cache.marks,
    )
    batcher = Batcher(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        speculator=_speculator(config, loaded, max_model_len),
    )
    runner = ModelRunner(loaded.model, kv_cache)
    layered = None
    if config.step_objective_ms:
        layered = LayeredPrefill(runner.begin, config.step_objective_ms / 1000)
    runner.warm_up(config.max_num_batched_tokens, max_model_len)
    engine = Engine(
        runner,
        Sampler(model_config.eos_token_ids, loaded.draw),
        batcher,
        pool,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=max_model_len,
        max_num_waiting=config.max_num_waiting,
        layered=layered,
    )
    if config.segment_path is not None:
        engine.generations_offset = layout.generations_offset(num_blocks)
        engine.on_filled = kv_cache.marks.bell.ring
        engine.block_marks = kv_cache.marks
    return engine


def _speculator(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> Speculator | None:
    method = config.speculative_method
    if method == "auto":
        method = "none" if loaded.costs is None else "ngram"
    if method == "none":
        return None
    return Speculator(config.speculation, max_model_len, loaded.costs or COSTS_BY_ROWS)
