"""From settings to an engine whose blocks other engines can recognise."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.build import build_engine
from engine.engine import Engine
from engine.model_revision import model_revision
from mesh.block_keys import BlockKeys, layout_fingerprint
from mesh.v1 import kv_transfer_pb2
from worker.config import WorkerConfig


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and what the mesh has to know about it."""

    engine: Engine
    engine_id: str
    layout_fingerprint: str
    # What the fingerprint stands for.
    layout: Mapping[str, str]
    # None: its KV cache is not in shared memory.
    segment: kv_transfer_pb2.AttachSegmentRequest | None


def load_engine(config: WorkerConfig, incarnation: str) -> LoadedEngine:
    """Takes as long as reading the model does; blocks meanwhile."""
    fingerprint = ""
    layout: dict[str, str] = {}

    def make_hasher(fields: Mapping[str, str | int]) -> BlockKeys:
        nonlocal fingerprint
        fields = {**fields, "model": model_revision(config.model_path)}
        fingerprint = layout_fingerprint(fields)
        layout.update((name, str(value)) for name, value in fields.items())
        return BlockKeys(fingerprint)

    engine_config = config.engine_config(incarnation)
    engine = build_engine(engine_config, make_hasher)
    engine_id = f"{config.worker_id}@{incarnation}"
    segment = None
    if engine_config.segment_path is not None:
        segment = kv_transfer_pb2.AttachSegmentRequest(
            engine_id=engine_id,
            path=engine_config.segment_path,
            block_bytes=engine.block_bytes,
            num_blocks=engine.load().num_blocks,
            layout_fingerprint=fingerprint,
            generations_offset=engine.generations_offset,
            has_marks=engine.block_marks is not None,
            layout=layout,
        )
    return LoadedEngine(engine, engine_id, fingerprint, layout, segment)
