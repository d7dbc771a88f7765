"""`python -m gateway`."""

import uvloop

from gateway.app import run
from gateway.config import GatewayConfig
from mesh import config, metrics, telemetry


def main() -> None:
    settings = config.load(GatewayConfig)
    telemetry.setup(
        settings.service,
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        worker_id=settings.worker_id,
    )
    metrics.listen(settings.metrics_listen, vllm_names=settings.vllm_metrics)
    uvloop.run(run(settings))


if __name__ == "__main__":
    main()
