"""`python -m decode_svc`: one decode worker."""

import uvloop

from decode_svc.config import DecodeConfig
from decode_svc.service import decode_service
from mesh import metrics, telemetry
from mesh.config import load
from worker.host import run_worker


def main() -> None:
    config = load(DecodeConfig)
    telemetry.setup(
        config.service,
        log_level=config.log_level,
        otlp_endpoint=config.otlp_endpoint,
        worker_id=config.worker_id,
    )
    metrics.listen(config.metrics_listen, vllm_names=config.vllm_metrics)
    uvloop.run(run_worker(config, "decode", decode_service(config)))


if __name__ == "__main__":
    main()
