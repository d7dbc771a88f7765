"""`python -m kv_transfer_svc`: the transfer agent as a process."""

import sys

import uvloop

from kv_transfer_svc.app import run
from kv_transfer_svc.config import KvTransferConfig
from kv_transfer_svc.memory import reuse_freed_blocks
from kv_transfer_svc.transports.mooncake import MooncakeMissing
from mesh import metrics, telemetry
from mesh.config import load
from mesh.scheduling import answer_soon


def main() -> None:
    config = load(KvTransferConfig)
    telemetry.setup(
        config.service,
        log_level=config.log_level,
        otlp_endpoint=config.otlp_endpoint,
        worker_id=config.worker_id,
    )
    metrics.listen(config.metrics_listen, vllm_names=config.vllm_metrics)
    answer_soon()
    reuse_freed_blocks()
    try:
        uvloop.run(run(config))
    except MooncakeMissing as error:
        print(f"remote_transport: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
