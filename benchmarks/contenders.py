"""How each server is started for a load, in the configuration that serves it best."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.points import BenchPoint
from benchmarks.settings import BenchmarkSettings

OURS = "pdmesh"
_GGUF = "SmolLM2-135M-Instruct-{}.gguf"
# What vLLM reserves for its cache, in GiB.
_VLLM_KV_GIB = 4


@dataclass(frozen=True)
class Launch:
    """One server process tree. Points with equal launches share a start."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    # The name under which the model is asked for.
    model: str
    # Files that must be there.
    needs: tuple[Path, ...]
    start_timeout_s: float = 60.0

    @property
    def missing(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]


@dataclass(frozen=True)
class Place:
    """Where one server runs."""

    port: int
    # Empty, and its own.
    folder: Path


@dataclass(frozen=True)
class Contender:
    """One server in one precision."""

    name: str
    precision: str
    launch: Callable[[BenchPoint, Place], Launch]


def contenders(
    settings: BenchmarkSettings, pdmesh_arguments: tuple[str, ...] = ()
) -> dict[str, Contender]:
    """All of them, by name. `pdmesh_arguments` go to `pdmesh up`."""
    all_of_them = [
        Contender(
            OURS,
            " ".join(pdmesh_arguments) or "defaults",
            lambda point, place: _pdmesh(settings, place, pdmesh_arguments),
        ),
        *(_llama_cpp(settings, precision) for precision in ("Q4_1", "Q8_0", "BF16")),
        Contender("vllm", "bfloat16", lambda point, place: _vllm(settings, point, place)),
    ]
    return {contender.name: contender for contender in all_of_them}


def _pdmesh(settings: BenchmarkSettings, place: Place, arguments: tuple[str, ...]) -> Launch:
    command = Path(sys.executable).parent / "pdmesh"
    model = settings.model_folder
    return Launch(
        argv=(
            *(str(command), "up", "--home", str(place.folder), "--model", str(model)),
            *("--port", str(place.port), "--log-level", "WARNING", *arguments),
        ),
        environment={},
        model=model.name,
        needs=(command, model / "config.json"),
        start_timeout_s=180.0,
    )


def _llama_cpp(settings: BenchmarkSettings, precision: str) -> Contender:
    gguf = settings.gguf_folder / _GGUF.format(precision)

    def launch(point: BenchPoint, place: Place) -> Launch:
        return Launch(
            argv=(
                *(str(settings.llama_server), "-m", str(gguf), "--host", "127.0.0.1"),
                *("--port", str(place.port), "-t", "2", "--no-kv-unified", "--alias", "m"),
                *_llama_cpp_flags(point),
            ),
            environment={},
            model="m",
            needs=(settings.llama_server, gguf),
        )

    return Contender(f"llama.cpp-{precision}", precision, launch)


def _llama_cpp_flags(point: BenchPoint) -> tuple[str, ...]:
    if point.is_interference:
        # Small batches keep the decoding streams going while a long prompt is computed.
        return ("-np", "5", "-c", "40960", "-b", "256", "-ub", "256", "-fa", "off")
    if point.concurrency == 1:
        # Faster for one short stream, much slower for several long ones.
        return ("-np", "1", "-c", "2048", "-fa", "on")
    num_slots = 8 if point.concurrency <= 8 else point.concurrency
    return ("-np", str(num_slots), "-c", str(2048 * num_slots), "-fa", "off")


def _vllm(settings: BenchmarkSettings, point: BenchPoint, place: Place) -> Launch:
    model = settings.model_folder
    command = settings.vllm / "bin" / "vllm"
    # As for llama.cpp: with its default a long prompt stops the others for seconds.
    chunk = ("--max-num-batched-tokens", "512") if point.is_interference else ()
    return Launch(
        argv=(
            *(str(command), "serve", str(model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(place.port), "--dtype", "bfloat16"),
            *("--max-model-len", "8192", "--enable-prefix-caching"),
            *("--enable-prompt-tokens-details", *chunk),
        ),
        environment={
            "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": settings.vllm_preload,
        },
        model="m",
        needs=(command, model / "config.json", settings.tcmalloc),
        start_timeout_s=400.0,
    )
