"""`python -m gateway`."""

import sys

import uvloop

from gateway.app import run
from gateway.config import GatewayConfig
from gateway.keys.model import KeyBookError
from gateway.rules.loader import RulesInvalid
from mesh import config, metrics, telemetry
from mesh.scheduling import answer_soon


def main() -> None:
    settings = config.load(GatewayConfig)
    telemetry.setup(
        settings.service,
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        worker_id=settings.worker_id,
    )
    metrics.RESUMPTIONS.begin()
    metrics.listen(settings.metrics_listen, vllm_names=settings.vllm_metrics)
    answer_soon()
    try:
        uvloop.run(run(settings))
    except RulesInvalid as error:
        print(f"gateway: the rules file is invalid\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyBookError as error:
        print(f"gateway: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
