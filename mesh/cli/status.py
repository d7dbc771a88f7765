"""`pdmesh status`: what runs in this home and how it does."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import grpc
import typer
from rich.table import Table

from mesh.cli.options import DEFAULT_HOME, HomeOption, fail, home_at, output_console
from mesh.home import MeshState, ServiceRecord
from mesh.probes import grpc_health, http_health
from mesh.supervisor import find_process, find_supervisor
from mesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)

CALL_TIMEOUT_S = 1.0

_ADVICE = {
    scheduler_pb2.DisaggregationVerdict.ADVICE_DISAGGREGATE: "disaggregate",
    scheduler_pb2.DisaggregationVerdict.ADVICE_LOCAL: "local",
    scheduler_pb2.DisaggregationVerdict.ADVICE_SHARED_CORES: "shared_cores",
}


def status(
    home: HomeOption = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every service: its process, its health, and what its engine holds."""
    state = home_at(home).read_state()
    if state is None:
        if as_json:
            typer.echo(json.dumps({"services": []}))
            return
        raise fail("nothing runs here; start it with `pdmesh up`")
    report = asyncio.run(_report(state))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = output_console()
    console.print(_table(report))
    for verdict in verdicts(report):
        console.print(verdict_line(verdict), highlight=False, soft_wrap=True)


async def _report(state: MeshState) -> dict[str, Any]:
    services = await asyncio.gather(*(_service(record, state) for record in state.services))
    return {
        "url": state.url,
        "grpc_address": state.grpc_address,
        "model": state.model,
        "supervised": find_supervisor(state) is not None,
        "services": list(services),
    }


async def _service(record: ServiceRecord, state: MeshState) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": record.name,
        "worker_id": record.worker_id,
        "pid": record.pid,
        "address": record.address,
        "metrics_address": record.metrics_address,
        "state": await _health(record),
        "restarts": record.restarts,
        "engine": None,
    }
    if f"http://{record.address}" == state.url:
        described["grpc_address"] = state.grpc_address
    details = _DETAILS.get(record.role)
    if details is not None and described["state"] in ("ok", "unhealthy"):
        try:
            async with grpc.aio.insecure_channel(record.address) as channel:
                described |= await details(channel)
        except grpc.aio.AioRpcError as error:
            described["state"] = "unhealthy"
            described["error"] = error.details()
    if described["engine"] is not None:
        described["progress"] = progress(described["state"], described["engine"])
    return described


def progress(state: str, engine: dict[str, int]) -> str:
    """Of a worker: `idle` without requests; with some `ok`, or `stalled` if it takes no step."""
    if engine["running"] + engine["waiting"] == 0:
        return "idle"
    return "ok" if state == "ok" else "stalled"


async def _health(record: ServiceRecord) -> str:
    """One of ok, unhealthy, starting, restarting, stopped, dead."""
    if find_process(record) is None:
        return "restarting" if record.state == "restarting" else "dead"
    if record.state != "running":
        return record.state
    if record.role == "redis":
        return "ok"
    if record.role == "gateway":
        healthy = await asyncio.to_thread(http_health, f"http://{record.address}") == 200
    else:
        healthy = await grpc_health(record.address) == "SERVING"
    return "ok" if healthy else "unhealthy"


async def _prefill_load(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    request = prefill_pb2.PrefillServiceGetLoadRequest()
    return {"engine": _engine((await stub.GetLoad(request, timeout=CALL_TIMEOUT_S)).load)}


async def _decode_load(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    request = decode_pb2.DecodeServiceGetLoadRequest()
    return {"engine": _engine((await stub.GetLoad(request, timeout=CALL_TIMEOUT_S)).load)}


async def _scheduler_state(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    response = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=CALL_TIMEOUT_S)
    return {
        "waiting": response.num_waiting,
        "placements": response.num_placements,
        # Also those that run elsewhere.
        "workers": [
            {
                "worker_id": worker.worker_id,
                "role": worker.role,
                "address": worker.address,
                "placements": worker.num_placements,
                # Whether this scheduler places anything on it.
                "breaker": _breaker(worker.breaker),
            }
            for worker in response.workers
        ],
        "disaggregation": [describe_verdict(verdict) for verdict in response.verdicts],
    }


def _breaker(state: scheduler_pb2.BreakerState.ValueType) -> str:
    name = scheduler_pb2.BreakerState.Name(state)
    return name.removeprefix("BREAKER_STATE_").lower()


def describe_verdict(verdict: scheduler_pb2.DisaggregationVerdict) -> dict[str, Any]:
    """Whether separate prefill workers pay for a model, as measured by one scheduler."""
    return {
        "model": verdict.model,
        "advice": _ADVICE.get(verdict.advice, "unknown"),
        "placements": verdict.num_placements,
        "local_ms": round(verdict.local_ms, 1),
        "remote_ms": round(verdict.remote_ms, 1),
        "prefill_tokens_per_s": round(verdict.prefill_tokens_per_second, 1),
        "transfer_tokens_per_s": round(verdict.transfer_tokens_per_second, 1),
    }


async def _transfer_stats(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
    response = await stub.GetStats(kv_transfer_pb2.GetStatsRequest(), timeout=CALL_TIMEOUT_S)
    return {
        "segments": response.num_segments,
        "pulls": response.num_pulls,
        "payload_bytes": response.payload_bytes,
        "copy_seconds": response.copy_seconds,
    }


_DETAILS: dict[str, Callable[[grpc.aio.Channel], Awaitable[dict[str, Any]]]] = {
    "prefill": _prefill_load,
    "decode": _decode_load,
    "scheduler": _scheduler_state,
    "kv_transfer": _transfer_stats,
}


def _engine(load: types_pb2.EngineLoad) -> dict[str, int]:
    return {
        "blocks_total": load.num_blocks,
        "blocks_free": load.num_free_blocks,
        "leases": load.num_leases,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "preemptions": load.num_preemptions,
        "prefix_cache_queries": load.num_prefix_cache_queries,
        "prefix_cache_hits": load.num_prefix_cache_hits,
    }


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for service in report["services"] for one in service.get("disaggregation", ())]


def elsewhere(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Workers that get requests and do not run under this home's supervisor."""
    ours = {service["worker_id"] for service in report["services"]}
    known = {
        worker["worker_id"]: worker
        for service in report["services"]
        for worker in service.get("workers", ())
    }
    return [worker for worker_id, worker in known.items() if worker_id not in ours]


def verdict_line(verdict: dict[str, Any]) -> str:
    """What the measurements say of separate prefill workers, in a sentence."""
    model, placements = verdict["model"], verdict["placements"]
    costs = (
        f"to the first token {verdict['local_ms']:.0f} ms on the decode worker alone, "
        f"{verdict['remote_ms']:.0f} ms with a prefill worker (mean of {placements} placements)"
    )
    match verdict["advice"]:
        case "local":
            return f"{model}: do not disaggregate here: {costs}"
        case "shared_cores":
            return (
                f"{model}: do not disaggregate here: prefill and decode workers compute on the "
                f"same cores: {costs}"
            )
        case "disaggregate":
            return f"{model}: disaggregation pays: {costs}"
        case _:
            return f"{model}: too little is measured to say whether disaggregation pays"


def _shown_state(service: dict[str, Any]) -> str:
    state, made = service["state"], service.get("progress")
    return f"{state} ({made})" if made in ("idle", "stalled") else str(state)


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['model']} at {report['url']}", box=None, title_justify="left")
    for heading in ("service", "state", "pid", "address", "blocks free", "running", "waiting"):
        table.add_column(heading)
    for service in report["services"]:
        engine = service["engine"] or {}
        blocks = f"{engine['blocks_free']}/{engine['blocks_total']}" if engine else ""
        table.add_row(
            service["name"],
            _shown_state(service),
            str(service["pid"] or ""),
            service["address"],
            blocks,
            str(engine.get("running", "")),
            str(engine.get("waiting", "")),
        )
    for worker in elsewhere(report):
        table.add_row(worker["worker_id"], "elsewhere", "", worker["address"])
    return table
