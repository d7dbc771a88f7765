"""`python -m tokenizer_svc`: the tokenizer service as a process."""

import asyncio

from mesh import metrics, telemetry
from mesh.config import load
from tokenizer_svc.app import run
from tokenizer_svc.config import TokenizerConfig


def main() -> None:
    config = load(TokenizerConfig)
    telemetry.setup(
        config.service,
        log_level=config.log_level,
        otlp_endpoint=config.otlp_endpoint,
        worker_id=config.worker_id,
    )
    metrics.listen(config.metrics_listen, vllm_names=config.vllm_metrics)
    asyncio.run(run(config))


if __name__ == "__main__":
    main()
