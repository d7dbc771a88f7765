"""A pull: what is wanted, what both ends must have in common for it, and what it came to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.runs import BlockRun, to_runs
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports.segment_copy import CopyProgress
from mesh.block_keys import layout_difference
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch

_ALL = slice(None)

TransportName = Literal["shared_memory", "tcp", "mooncake"]


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks wanted: the n-th of the source becomes the n-th of the destination."""

    source_engine_id: str
    source_block_ids: Sequence[int]
    destination_engine_id: str
    destination_block_ids: Sequence[int]
    # One for each source block, or none if the source keeps none.
    source_generations: Sequence[int] = ()
    # The agent of the source, for when that is not this one.
    source_address: str = ""
    # Whoever wants them can ask whether that still goes on.
    request_id: str = ""
    # The source is still filling them, in this order.
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """What a pull did."""

    num_bytes: int
    num_runs: int
    copy_s: float
    transport: TransportName = "shared_memory"
    # What the source sampled after the last block, where the pull followed it.
    next_token_id: int | None = None

    @classmethod
    def of(cls, progress: CopyProgress, transport: TransportName) -> Self:
        return cls(
            progress.num_bytes,
            progress.num_runs,
            progress.copy_s,
            transport,
            progress.next_token_id,
        )

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.copy_s / 1e9 if self.copy_s > 0 else 0.0


class BlockLayout(Protocol):
    """What two engines must have in common, and how many blocks one has."""

    @property
    def engine_id(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def layout_fingerprint(self) -> str: ...
    @property
    def layout(self) -> Mapping[str, str]: ...


def check_layouts(source: BlockLayout, destination: BlockLayout) -> None:
    """Raise LayoutMismatch if a block of one engine means something else to the other."""
    if source.layout_fingerprint != destination.layout_fingerprint:
        difference = layout_difference(destination.layout, source.layout)
        raise LayoutMismatch(
            f"engine {destination.engine_id!r} here cannot use blocks of engine "
            f"{source.engine_id!r} there: "
            + (
                difference
                or f"their layouts are {destination.layout_fingerprint} and "
                f"{source.layout_fingerprint}"
            )
        )
    if source.block_bytes != destination.block_bytes:
        raise LayoutMismatch(
            f"blocks of engine {source.engine_id!r} have {source.block_bytes} bytes, those of "
            f"engine {destination.engine_id!r} have {destination.block_bytes}"
        )


def to_pull_runs(
    pull: Pull, source: BlockLayout, destination: Segment, part: slice = _ALL
) -> list[BlockRun]:
    """What a pull, or a part of it, comes to in these segments; raises InvalidRequest."""
    return to_runs(
        pull.source_block_ids[part],
        pull.destination_block_ids[part],
        source.num_blocks,
        destination.spec.num_blocks,
    )


def generations_of(pull: Pull) -> NDArray[np.uint32]:
    if pull.source_generations and len(pull.source_generations) != len(pull.source_block_ids):
        raise InvalidRequest(
            f"{len(pull.source_generations)} generations for {len(pull.source_block_ids)} blocks"
        )
    return np.asarray(pull.source_generations, np.uint32)


def check_complete(num_bytes: int, pull: Pull, destination: Segment) -> None:
    expected = len(pull.destination_block_ids) * destination.spec.block_bytes
    if num_bytes != expected:
        raise KvTransferFailed(f"{num_bytes} of {expected} bytes arrived")
