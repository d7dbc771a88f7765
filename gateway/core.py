"""Everything behind the two front doors, REST and gRPC, wired together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive

from gateway.attempts import AttemptLimits
from gateway.body import read_body
from gateway.config import GatewayConfig
from gateway.dashboard.recent import RecentRequests
from gateway.detokenize import Detokenizer
from gateway.generation import GenerationRequest
from gateway.health import HealthMonitor
from gateway.in_flight import InFlight
from gateway.keys.model import Caller
from gateway.keys.ring import KeyRing
from gateway.keys.stores import FileStore, KeyStore, RedisStore
from gateway.limits.estimate import estimate_tokens
from gateway.limits.limiter import Limiter
from gateway.pipeline import Pipeline
from gateway.placement import Scheduler
from gateway.record import RequestRecord
from gateway.rules.source import RuleSource
from gateway.token_source import Workers
from gateway.tokenizer import ModelCatalog, Tokenizer
from mesh import metrics
from mesh.client import Channels, connect
from mesh.errors import MeshError
from mesh.redis_client import MeshRedis, connect_redis

# Longer than others wait: a busy moment of this process should not look like a Redis that is
# gone, for then every gateway would decide about limits alone.
_REDIS_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Core:
    """What a front door needs."""

    config: GatewayConfig
    rules: RuleSource
    keys: KeyRing
    limits: Limiter
    tokenizer: Tokenizer
    catalog: ModelCatalog
    pipeline: Pipeline
    health: HealthMonitor
    in_flight: InFlight
    recent: RecentRequests

    async def read_body(self, headers: Headers, receive: Receive) -> bytes:
        """The body of a request, within the bounds of the settings."""
        return await read_body(
            headers, receive, self.config.max_body_bytes, self.config.body_timeout_s
        )

    @asynccontextmanager
    async def admitted(
        self, caller: Caller, generation: GenerationRequest, record: RequestRecord
    ) -> AsyncIterator[Mapping[str, str]]:
        """Hold what the caller's limits allow; the headers that tell what is left of them."""
        num_tokens = estimate_tokens(generation, self.config.limits_default_output_tokens)
        async with self.limits.admitted(caller, num_tokens) as admission:
            has_failed = False
            try:
                yield admission.headers
            except MeshError:
                has_failed = True
                raise
            finally:
                counts = record.counts()
                # Who got nothing pays nothing; but a client that left has cost something.
                if counts.completion_tokens or not has_failed:
                    admission.num_used = counts.prompt_tokens + counts.completion_tokens


@asynccontextmanager
async def open_core(config: GatewayConfig) -> AsyncIterator[Core]:
    """Connect to the mesh; everything is closed again when the context is left.

    Raises RulesInvalid, or KeyBookError.
    """
    async with AsyncExitStack() as stack:
        rules = await stack.enter_async_context(
            RuleSource(config.rules_path, check_interval_s=config.rules_check_interval_s)
        )
        # Connects when it is first needed: by keys or by limits.
        redis = connect_redis(config.redis_url, timeout_s=_REDIS_TIMEOUT_S)
        stack.push_async_callback(redis.aclose)
        keys = await stack.enter_async_context(
            KeyRing(_key_store(config, redis), check_interval_s=config.keys_check_interval_s)
        )
        limits = await stack.enter_async_context(
            Limiter(redis, local_share=config.limits_local_share)
        )
        tokenizer_channel = connect(config.tokenizer_addresses, calls_locally=True)
        stack.push_async_callback(tokenizer_channel.close)
        scheduler_channel = connect(config.scheduler_addresses, calls_locally=True)
        stack.push_async_callback(scheduler_channel.close)
        # No call to a worker outlives its request.
        channels = await stack.enter_async_context(
            Channels(calls_locally=True, max_rest_s=2 * config.request_timeout_s)
        )

        tokenizer = Tokenizer(
            tokenizer_channel,
            encode_timeout_s=config.encode_timeout_s,
            patience_s=config.reconnect_wait_s,
        )
        catalog = ModelCatalog(tokenizer)
        scheduler = Scheduler(
            scheduler_channel,
            queue_timeout_s=config.queue_timeout_s,
            patience_s=config.reconnect_wait_s,
        )
        stack.push_async_callback(scheduler.close)
        workers = Workers(
            channels,
            start_timeout_s=config.start_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
        )
        stack.push_async_callback(workers.close)
        detokenizer = await stack.enter_async_context(
            Detokenizer(tokenizer_channel, catalog.token_bytes)
        )
        health = await stack.enter_async_context(
            HealthMonitor(
                catalog,
                scheduler,
                interval_s=config.health_interval_s,
                stall_s=config.health_stall_s,
            )
        )
        in_flight = InFlight(config.max_concurrent_requests)
        stack.callback(metrics.NUM_STREAMS.watch(lambda: in_flight.num_requests))
        yield Core(
            config=config,
            rules=rules,
            keys=keys,
            limits=limits,
            tokenizer=tokenizer,
            catalog=catalog,
            pipeline=Pipeline(
                tokenizer,
                scheduler,
                workers,
                detokenizer,
                max_choices=config.max_choices,
                attempt_limits=AttemptLimits(config.max_attempts, config.failover_wait_s),
            ),
            health=health,
            in_flight=in_flight,
            recent=RecentRequests(config.dashboard_requests),
        )


def _key_store(config: GatewayConfig, redis: MeshRedis) -> KeyStore | None:
    if config.keys_in_redis:
        return RedisStore(redis)
    return None if config.keys_path is None else FileStore(config.keys_path)
