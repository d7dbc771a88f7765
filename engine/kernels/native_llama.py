"""A Llama-family model on the kernels: one call into the library per step."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.library import (
    SAMPLING_DTYPE,
    BatchStruct,
    ConfigStruct,
    KernelError,
    LayerStruct,
    Library,
    LinearStruct,
    address,
    linear_struct,
)
from engine.kernels.pack import (
    ALIGNMENT,
    Arena,
    PackedMatrix,
    gate_up_order,
    pack,
)
from engine.kernels.quantize import MatrixWeights, by_channel, concatenate, quantize

Array = npt.NDArray[Any]
# A torch tensor, an array, or weights that are quantized already and are taken as they are.
Weight = Any
_INTEGERS = (WeightFormat.INT8, WeightFormat.INT4)
# What the embedding and the output head have where four bits would cost too much.
EMBEDDING_FORMATS = {
    WeightFormat.INT4: WeightFormat.INT8_GROUPED,
    WeightFormat.INT4_CHANNEL: WeightFormat.INT8,
}


class ModelShape(Protocol):
    """The part of engine.config.ModelConfig that the kernels need."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


class Batch(Protocol):
    """engine.forward_batch.ForwardBatch; tensors or arrays."""

    @property
    def token_ids(self) -> Any: ...
    @property
    def positions(self) -> Any: ...
    @property
    def slot_mapping(self) -> Any: ...
    @property
    def query_starts(self) -> Sequence[int]: ...
    @property
    def seq_lens(self) -> Sequence[int]: ...
    @property
    def block_tables(self) -> Any: ...
    @property
    def logits_rows(self) -> Any: ...


class NativeLlama:
    """Owns the packed weights, the threads and the buffers of one model.

    Not thread-safe: one call at a time. `close()`, or the context manager, ends its threads.
    """

    def __init__(
        self,
        library: Library,
        config: ModelShape,
        weights: "PackedModel",
        rope: tuple[Array, Array],
        *,
        kv_format: KvFormat = KvFormat.BFLOAT16,
        block_size: int = 16,
        num_threads: int = 1,
        level: str | None = None,
    ) -> None:
        """`rope`: cosine and sine, float32[positions, head_dim / 2], scaling applied."""
        self._library = library
        self._weights = weights
        self._rope = tuple(np.ascontiguousarray(table, dtype=np.float32) for table in rope)
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self._hidden_size = config.hidden_size
        self.kv_format = kv_format
        self.block_bytes = library.block_bytes(
            kv_format, config.num_layers, config.num_kv_heads, config.head_dim, block_size
        )
        self._layers = (LayerStruct * config.num_layers)(
            *(weights.layer(i) for i in range(config.num_layers))
        )
        struct = ConfigStruct(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_positions=len(self._rope[0]),
            block_size=block_size,
            rms_norm_eps=config.rms_norm_eps,
            kv_format=kv_format,
            cosine=address(self._rope[0]),
            sine=address(self._rope[1]),
            embedding=weights.linear("embedding"),
            final_norm=address(weights.arena["final_norm"]),
            head=weights.linear("embedding" if config.tie_word_embeddings else "head"),
            layers=self._layers,
            level=level.encode() if level else None,
            num_threads=num_threads,
        )
        status = ctypes.c_int32()
        self._model = library.functions.pdmesh_model_create(struct, status)
        library.check(status.value)
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)
        self._hidden = _aligned(0, config.hidden_size)

    def forward(self, batch: Batch, kv_cache: Array | int, num_blocks: int) -> Array:
        """Compute a step: keys and values into the cache, float32 logits out.

        `kv_cache`: the address or the memory of `num_blocks` blocks. The logits, one row per
        entry of `logits_rows`, are valid (and may be overwritten) until the next call.
        """
        num_rows = len(batch.token_ids)
        if num_rows > len(self._hidden):
            self._hidden = _aligned(num_rows, self._hidden_size)
        whole = NativePass(self, batch, kv_cache, num_blocks, self._hidden)
        logits = whole.advance(self.num_layers)
        assert logits is not None
        return logits

    def begin(self, batch: Batch, kv_cache: Array | int, num_blocks: int) -> "NativePass":
        """Compute a step in parts: other steps may come in between."""
        hidden = _aligned(len(batch.token_ids), self._hidden_size)
        return NativePass(self, batch, kv_cache, num_blocks, hidden)

    def sample(self, logits: Array, params: Array) -> Array:
        """A token id per row of processed logits; -1 where the largest one is not finite.

        `params`: SAMPLING_DTYPE, one per row.
        """
        if params.dtype != SAMPLING_DTYPE or logits.dtype != np.float32:
            raise ValueError("logits must be float32 and params SAMPLING_DTYPE")
        if logits.shape != (len(params), self.vocab_size) or logits.strides[1] != 4:
            raise ValueError("logits must have one contiguous row per entry of params")
        token_ids = np.empty(len(params), dtype=np.int64)
        contiguous = np.ascontiguousarray(params)
        stride = logits.strides[0] // 4
        arguments = (address(logits), len(params), stride, address(contiguous), address(token_ids))
        self._library.check(self._library.functions.pdmesh_model_sample(self._open(), *arguments))
        return token_ids

    def close(self) -> None:
        if self._model:
            self._library.functions.pdmesh_model_destroy(self._model)
            self._model = None

    def __enter__(self) -> "NativeLlama":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def compute(self, struct: BatchStruct) -> None:
        """A part of a pass, which calls this."""
        self._library.check(self._library.functions.pdmesh_model_forward(self._open(), struct))

    def logits_for(self, num_rows: int) -> Array:
        """Memory for so many rows, the same in each call."""
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self.vocab_size), dtype=np.float32)
        return self._logits[:num_rows]

    def _open(self) -> Any:
        if not self._model:
            raise KernelError("the model is closed")
        return self._model


class NativePass:
    """A batch on its way through the layers, and all memory that it needs until its end."""

    def __init__(
        self,
        llama: NativeLlama,
        batch: Batch,
        kv_cache: Array | int,
        num_blocks: int,
        hidden: Array,
    ) -> None:
        self._llama = llama
        self._memory = (kv_cache, hidden)
        if isinstance(kv_cache, int):
            cache_address = kv_cache
        else:
            if kv_cache.nbytes < num_blocks * llama.block_bytes:
                raise ValueError("the KV cache is smaller than its blocks")
            cache_address = address(kv_cache)
        self._inputs = [
            _int64(value)
            for value in (
                batch.token_ids,
                batch.positions,
                batch.slot_mapping,
                batch.query_starts,
                batch.seq_lens,
                batch.block_tables,
                batch.logits_rows,
            )
        ]
        token_ids, positions, slots, starts, lens, tables, logits_rows = self._inputs
        _check_shapes(token_ids, positions, slots, starts, lens, tables)
        self._struct = BatchStruct(
            len(token_ids),
            len(lens),
            len(logits_rows),
            tables.shape[1],
            *map(address, self._inputs),
            cache_address,
            num_blocks,
            hidden=address(hidden),
        )

    @property
    def num_layers_left(self) -> int:
        return max(0, self._llama.num_layers - int(self._struct.end_layer))

    def advance(
        self, num_layers: int, on_kv_written: Callable[[], None] | None = None
    ) -> Array | None:
        """Compute so many layers more; after the last one, the logits, as `forward` has them.

        `on_kv_written` is called between the two.
        """
        struct = self._struct
        struct.first_layer = struct.end_layer
        struct.end_layer += min(num_layers, self.num_layers_left)
        if self.num_layers_left:
            self._llama.compute(struct)
            return None
        if on_kv_written is not None:
            self._llama.compute(struct)
            on_kv_written()
            struct.first_layer = struct.end_layer
        # The output head counts as a layer there.
        struct.end_layer = self._llama.num_layers + 1
        logits = self._llama.logits_for(len(self._inputs[-1]))
        struct.logits = address(logits)
        self._llama.compute(struct)
        return logits


class PackedModel:
    """A model's weights in the kernels' layout, in memory of their own."""

    def __init__(self, matrices: Mapping[str, PackedMatrix], norms: Mapping[str, Array]) -> None:
        arrays: dict[str, Array] = dict(norms)
        for name, matrix in matrices.items():
            arrays[f"{name}.data"] = matrix.data
            if matrix.scales is not None:
                arrays[f"{name}.scales"] = matrix.scales
        self.arena = Arena(arrays)
        self._matrices = {
            name: PackedMatrix(
                matrix.format,
                matrix.n,
                matrix.k,
                self.arena[f"{name}.data"],
                self.arena.get(f"{name}.scales"),
            )
            for name, matrix in matrices.items()
        }

    @property
    def num_bytes(self) -> int:
        return self.arena.num_bytes

    def linear(self, name: str) -> LinearStruct:
        return linear_struct(self._matrices[name])

    def layer(self, index: int) -> LayerStruct:
        return LayerStruct(
            address(self.arena[f"{index}.input_norm"]),
            address(self.arena[f"{index}.post_attention_norm"]),
            *(self.linear(f"{index}.{name}") for name in ("qkv", "output", "gate_up", "down")),
        )


def pack_model(
    config: ModelShape, weights: Mapping[str, Weight], weight_format: WeightFormat
) -> PackedModel:
    """Pack weights under their Hugging Face names.

    With INT4, the embedding and the output head are INT8_GROUPED, unless they come quantized; with
    INT4_CHANNEL they are INT8.
    """
    return PackedModel(_pack_matrices(config, weights, weight_format), _norms(config, weights))


def _pack_matrices(
    config: ModelShape, weights: Mapping[str, Weight], weight_format: WeightFormat
) -> dict[str, PackedMatrix]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    embedding_format = EMBEDDING_FORMATS.get(weight_format, weight_format)

    def join(
        names: Sequence[str], shapes: Sequence[tuple[int, int]], as_format: WeightFormat
    ) -> MatrixWeights:
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            part = in_format(weights[f"{name}.weight"], as_format)
            if part.shape != shape:
                raise ValueError(f"{name}.weight is {part.shape}, expected {shape}")
            parts.append(part)
        if len({part.format for part in parts}) > 1:
            parts = [quantize(part.dequantize(), as_format) for part in parts]
        return concatenate(parts)

    vocabulary = [(config.vocab_size, hidden)]
    packed = {"embedding": pack(join(["model.embed_tokens"], vocabulary, embedding_format))}
    if not config.tie_word_embeddings:
        packed["head"] = pack(join(["lm_head"], vocabulary, embedding_format))
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        packed[f"{i}.qkv"] = pack(
            join(
                [f"{attention}.{name}_proj" for name in "qkv"],
                [(queries, hidden), (keys, hidden), (keys, hidden)],
                weight_format,
            )
        )
        packed[f"{i}.output"] = pack(
            join([f"{attention}.o_proj"], [(hidden, queries)], weight_format)
        )
        gate_up = join(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [(intermediate, hidden)] * 2, weight_format
        )
        packed[f"{i}.gate_up"] = pack(gate_up.rows(gate_up_order(intermediate)))
        packed[f"{i}.down"] = pack(
            join([f"{mlp}.down_proj"], [(hidden, intermediate)], weight_format)
        )
    return packed


def _norms(config: ModelShape, weights: Mapping[str, Weight]) -> dict[str, Array]:
    norms = {"final_norm": _float32(weights["model.norm.weight"])}
    for i in range(config.num_layers):
        for name, key in (
            ("input_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
        ):
            norms[f"{i}.{name}"] = _float32(weights[f"model.layers.{i}.{key}.weight"])
    for name, norm in norms.items():
        if norm.shape != (config.hidden_size,):
            raise ValueError(f"{name} is {norm.shape}, expected ({config.hidden_size},)")
    return norms


def in_format(weight: Weight, weight_format: WeightFormat) -> MatrixWeights:
    if not isinstance(weight, MatrixWeights):
        return quantize(_float32(weight), weight_format)
    if weight_format in (WeightFormat.INT4, weight.format):
        return weight
    if weight_format is WeightFormat.INT4_CHANNEL and weight.format is WeightFormat.INT4:
        return by_channel(weight)
    if weight_format is WeightFormat.INT8_GROUPED and weight.format in _INTEGERS:
        return weight
    return quantize(weight.dequantize(), weight_format)


def _float32(weight: Weight) -> Array:
    if hasattr(weight, "detach"):
        weight = weight.detach().to("cpu").float().numpy()
    return np.ascontiguousarray(weight, dtype=np.float32)


def _aligned(num_rows: int, num_columns: int) -> Array:
    """float32 memory that begins with a cache line."""
    memory = np.empty(num_rows * num_columns * 4 + ALIGNMENT, dtype=np.uint8)
    begin = -address(memory) % ALIGNMENT
    floats = memory[begin : begin + num_rows * num_columns * 4].view(np.float32)
    return floats.reshape(num_rows, num_columns)


def _int64(value: Any) -> Array:
    return np.ascontiguousarray(value, dtype=np.int64)


def _check_shapes(
    token_ids: Array, positions: Array, slots: Array, starts: Array, lens: Array, tables: Array
) -> None:
    if not len(token_ids) == len(positions) == len(slots):
        raise ValueError("token_ids, positions and slot_mapping have different lengths")
    if len(starts) != len(lens) + 1 or tables.ndim != 2 or len(tables) != len(lens):
        raise ValueError("query_starts, seq_lens and block_tables do not fit together")
