"""`python -m prefill_svc`: one prefill worker."""

import uvloop

from mesh import metrics, telemetry
from mesh.config import load
from prefill_svc.config import PrefillConfig
from prefill_svc.service import prefill_service
from worker.host import run_worker


def main() -> None:
    config = load(PrefillConfig)
    telemetry.setup(
        config.service,
        log_level=config.log_level,
        otlp_endpoint=config.otlp_endpoint,
        worker_id=config.worker_id,
    )
    metrics.listen(config.metrics_listen, vllm_names=config.vllm_metrics)
    uvloop.run(run_worker(config, "prefill", prefill_service(config)))


if __name__ == "__main__":
    main()
