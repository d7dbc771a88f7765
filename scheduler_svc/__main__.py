"""`python -m scheduler_svc`: the scheduler as a process."""

import uvloop

from mesh import metrics, telemetry
from mesh.config import load
from mesh.scheduling import answer_soon
from scheduler_svc.app import run
from scheduler_svc.config import SchedulerConfig


def main() -> None:
    config = load(SchedulerConfig)
    telemetry.setup(
        config.service,
        log_level=config.log_level,
        otlp_endpoint=config.otlp_endpoint,
        worker_id=config.worker_id,
    )
    metrics.listen(config.metrics_listen, vllm_names=config.vllm_metrics)
    answer_soon()
    uvloop.run(run(config))


if __name__ == "__main__":
    main()
