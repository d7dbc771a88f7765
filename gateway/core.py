"""Everything behind the two front doors, REST and gRPC, wired together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.dashboard.recent import RecentRequests
from gateway.detokenize import Detokenizer
from gateway.health import HealthMonitor
from gateway.in_flight import InFlight
from gateway.pipeline import Pipeline
from gateway.placement import Scheduler
from gateway.rules.source import RuleSource
from gateway.token_source import Workers
from gateway.tokenizer import ModelCatalog, Tokenizer
from mesh import metrics
from mesh.client import Channels, connect


@dataclass(frozen=True)
class Core:
    """What a front door needs."""

    config: GatewayConfig
    rules: RuleSource
    tokenizer: Tokenizer
    catalog: ModelCatalog
    pipeline: Pipeline
    health: HealthMonitor
    in_flight: InFlight
    recent: RecentRequests


@asynccontextmanager
async def open_core(config: GatewayConfig) -> AsyncIterator[Core]:
    """Connect to the mesh; everything is closed again when the context is left.

    Raises RulesInvalid.
    """
    rules = RuleSource(config.rules_path, check_interval_s=config.rules_check_interval_s)
    async with AsyncExitStack() as stack:
        tokenizer_channel = connect(config.tokenizer_addresses)
        stack.push_async_callback(tokenizer_channel.close)
        scheduler_channel = connect(config.scheduler_addresses)
        stack.push_async_callback(scheduler_channel.close)
        channels = await stack.enter_async_context(Channels())

        tokenizer = Tokenizer(tokenizer_channel, encode_timeout_s=config.encode_timeout_s)
        catalog = ModelCatalog(tokenizer)
        scheduler = Scheduler(scheduler_channel, queue_timeout_s=config.queue_timeout_s)
        stack.push_async_callback(scheduler.close)
        workers = Workers(
            channels,
            start_timeout_s=config.start_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
        )
        stack.push_async_callback(workers.close)
        detokenizer = await stack.enter_async_context(Detokenizer(tokenizer_channel))
        health = await stack.enter_async_context(
            HealthMonitor(
                catalog,
                scheduler,
                interval_s=config.health_interval_s,
                stall_s=config.health_stall_s,
            )
        )
        in_flight = InFlight()
        stack.callback(metrics.NUM_STREAMS.watch(lambda: in_flight.num_requests))
        yield Core(
            config=config,
            rules=rules,
            tokenizer=tokenizer,
            catalog=catalog,
            pipeline=Pipeline(
                tokenizer,
                scheduler,
                workers,
                detokenizer,
                max_choices=config.max_choices,
                max_attempts=config.max_attempts,
            ),
            health=health,
            in_flight=in_flight,
            recent=RecentRequests(config.dashboard_requests),
        )
