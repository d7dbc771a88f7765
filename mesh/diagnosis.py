"""From where the time went to why, and what to try."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# A stage below both is nobody's problem.
_NOTABLE_SHARE = 0.15
_NOTABLE_MS = 20.0
_FULL_CACHE = 0.9
_LOW_HIT_RATE = 0.05
_MANY_FAILURES = 0.01
_LONG_TAIL = 5.0
# Two blocks: less is not worth a change.
_NOTABLE_TOKENS = 32


@dataclass(frozen=True)
class Finding:
    """One likely cause."""

    # Where; a stage, or "workers", "errors" and the like.
    stage: str
    what: str
    why: str
    to_try: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


# Why a stage takes long, and what to do about it.
_STAGES: Mapping[str, tuple[str, str]] = {
    "rules": (
        "rules and validation ran over a large body",
        "send smaller bodies; look at the rules with `pdmesh rules`",
    ),
    "tokenize": (
        "a long prompt, a slow chat template, or a tokenizer with much to do",
        "start more tokenizers and list them in tokenizer_addresses; raise encode_threads",
    ),
    "queue": (
        "every worker that could take it was full",
        "add decode workers (`pdmesh up --decode N`); raise max_num_seqs if KV use is low; "
        "give urgent requests a smaller `priority`",
    ),
    "prefill_wait": (
        "other prompts were being computed first",
        "add prefill workers; lower long_prefill_token_threshold so that long prompts share",
    ),
    "prefill_compute": (
        "the part of the prompt that no cache had was long, or the worker shared its cores",
        "put what prompts have in common first, byte for byte; add prefill workers; "
        "compare num_threads with the cores there are",
    ),
    "kv_transfer": (
        "the prompt's KV had to move, or the decode worker was inside a long step when it came",
        "keep prefill and decode on one machine or a fast link; lower max_num_batched_tokens of "
        "the decode workers; short prompts are cheaper without a prefill worker",
    ),
    "decode_wait": (
        "the decode worker had no room, or the worker went silent",
        "add decode workers or KV memory (kv_cache_memory_bytes); look for preemptions",
    ),
    "decode_steps": (
        "each token takes one step of the whole batch",
        "compare the time per token with the batch size: a smaller max_num_seqs makes single "
        "streams faster and the pool slower",
    ),
    "detokenize": (
        "the tokenizer answered later than the worker's next token",
        "start another tokenizer; look for a machine that is out of CPU",
    ),
    "write": (
        "the client, or a proxy before it, reads slowly",
        "switch response buffering off in proxies; look at the client's own event loop",
    ),
    "network": (
        "sockets and busy event loops between the services",
        "look for a machine that is out of CPU; give the gateway a core of its own",
    ),
}

_ERRORS: Mapping[str, tuple[str, str]] = {
    "QUEUE_FULL": (
        "the waiting line was full, or the first token could not come in time",
        "retry after the given delay; add workers; raise the scheduler's queue limits",
    ),
    "WORKER_UNAVAILABLE": (
        "a worker was lost, draining or silent, and no other could take over",
        "`pdmesh status`; the workers' logs; another worker of the same role",
    ),
    "KV_LEASE_EXPIRED": (
        "the decode worker came for the KV after its lease had ended",
        "raise lease_s of the prefill workers; find out why the decode worker was late",
    ),
    "KV_TRANSFER_FAILED": (
        "the KV could not be moved",
        "the transfer agents' logs; /dev/shm must be shared between the processes",
    ),
    "DEADLINE_EXCEEDED": (
        "it took longer than its deadline",
        "the longest stage says where; request_timeout_s, queue_timeout_s",
    ),
    "CANCELLED": ("the client went away", "nothing, unless clients give up because of the wait"),
    "INTERNAL": ("a bug, or a model that gave no usable distribution", "the logs have the error"),
}
_CLIENT_MISTAKE = ("the request was refused as it was sent", "the answer's error message says why")


def diagnose_request(request: Mapping[str, Any]) -> list[Finding]:
    """What made this request slow or fail, the largest cause first."""
    return [
        *_failure(request),
        *_incidents(request),
        *_slow_stages(request["stages_ms"], request["total_ms"], _stage_facts(request)),
    ]


def diagnose_now(live: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with the mesh at the moment, as its gateway sees it."""
    findings = [
        Finding("health", problem, "the gateway's health check says so", "`pdmesh status`")
        for problem in live["problems"]
    ]
    findings += _failures_now(live)
    findings += _pressure(live)
    for worker in live["workers"]:
        findings += _worker(worker)
    stages = live["mean_stages_ms"]
    findings += _slow_stages(stages, sum(stages.values()), {})
    return findings


def diagnose_prefixes(prefixes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Keys whose prompts stop sharing a prefix although they go on alike."""
    return [
        Finding(
            "cache",
            f"prompts of {_of_key(one['key'])} stop sharing a prefix at token "
            f"{one['num_shared_tokens'] + 1}: after {one['shared_text']!r} "
            f"{_alternatives(one['next_texts'])}",
            f"a cache finds nothing behind a difference, and {one['num_same_after']} of "
            f"{one['num_prompt_tokens']} tokens behind it are the same in all",
            "move what changes (a time, a name, a number) to the end of the prompt",
        )
        for one in prefixes
        if one["num_same_after"] >= max(_NOTABLE_TOKENS, 0.1 * one["num_prompt_tokens"])
    ]


def _of_key(key: str) -> str:
    return f"key {key!r}" if key else "requests without a key"


def _alternatives(texts: Sequence[str]) -> str:
    return "comes " + " or ".join(map(repr, texts)) if texts else "they end"


def _failure(request: Mapping[str, Any]) -> Iterator[Finding]:
    reason = request.get("error")
    if reason:
        why, to_try = _ERRORS.get(reason, _CLIENT_MISTAKE)
        yield Finding("error", f"it failed with {reason}", why, to_try)


def _incidents(request: Mapping[str, Any]) -> Iterator[Finding]:
    if request.get("attempts", 0) > 1:
        yield Finding(
            "attempts",
            f"it took {request['attempts']} attempts",
            "a worker failed or was full on the way; its stages are those of all attempts",
            "the trace has a span for each attempt; the workers' logs",
        )
    if request.get("preemptions", 0):
        yield Finding(
            "preemptions",
            f"it was preempted {request['preemptions']} times and computed again",
            "the decode worker's KV cache was too small for its batch",
            "raise kv_cache_memory_bytes or lower max_num_seqs",
        )


def _stage_facts(request: Mapping[str, Any]) -> dict[str, str]:
    """What the request's own numbers add to a stage's story."""
    facts: dict[str, str] = {}
    if request.get("prompt_tokens"):
        cached, prompt = request.get("cached_tokens") or 0, request["prompt_tokens"]
        facts["prefill_compute"] = f"{prompt - cached} of {prompt} prompt tokens were not cached"
    if request.get("kv_transfer_bytes"):
        facts["kv_transfer"] = f"{request['kv_transfer_bytes'] / 1e6:.1f} MB moved"
    if request.get("tpot_ms") is not None:
        facts["decode_steps"] = (
            f"{request['completion_tokens']} tokens at {request['tpot_ms']:.1f} ms, "
            f"in a batch of {request.get('batch_size', 0):.1f}"
        )
    return facts


def _slow_stages(
    stages_ms: Mapping[str, float], total_ms: float, facts: Mapping[str, str]
) -> Iterator[Finding]:
    for stage, duration_ms in sorted(stages_ms.items(), key=lambda item: -item[1]):
        share = duration_ms / total_ms if total_ms else 0.0
        if share < _NOTABLE_SHARE or duration_ms < _NOTABLE_MS or stage not in _STAGES:
            continue
        why, to_try = _STAGES[stage]
        fact = f": {facts[stage]}" if stage in facts else ""
        what = f"{stage.replace('_', ' ')} took {duration_ms:.0f} ms, {share:.0%} of all{fact}"
        yield Finding(stage, what, why, to_try)


def _failures_now(live: Mapping[str, Any]) -> Iterator[Finding]:
    num_requests, num_failed = live["num_requests"], live["num_failed"]
    if num_failed > num_requests * _MANY_FAILURES:
        yield Finding(
            "errors",
            f"{num_failed} of {num_requests} requests of the last minute failed",
            "the reasons are in the requests' log lines",
            "`pdmesh doctor REQUEST_ID` for one of them",
        )


def _pressure(live: Mapping[str, Any]) -> Iterator[Finding]:
    if live["queued"]:
        why, to_try = _STAGES["queue"]
        yield Finding("queue", f"{live['queued']} requests wait for a placement", why, to_try)
    hit_rate = live["cache_hit_rate"]
    if hit_rate is not None and hit_rate < _LOW_HIT_RATE and live["num_requests"] > 1:
        yield Finding(
            "cache",
            f"only {hit_rate:.1%} of the prompt tokens were cached",
            "prompts differ from their first tokens on, or the cache is too small to keep them",
            "put what prompts have in common first; raise kv_cache_memory_bytes",
        )
    for name, title in (("ttft_ms", "first token"), ("tpot_ms", "time per token")):
        spread = live[name]
        if spread is not None and spread["p99"] > _LONG_TAIL * spread["p50"]:
            yield Finding(
                name,
                f"{title}: p99 {spread['p99']:.0f} ms, p50 {spread['p50']:.0f} ms",
                "few requests wait for others: long prompts, full queues, preemptions",
                "open the slowest requests on /dashboard",
            )


def _worker(worker: Mapping[str, Any]) -> Iterator[Finding]:
    name = worker["worker_id"]
    if worker["kv_cache_usage"] > _FULL_CACHE:
        yield Finding(
            "workers",
            f"{name}: {worker['kv_cache_usage']:.0%} of the KV cache is held",
            "requests will wait for room, or be preempted",
            "add workers or KV memory (kv_cache_memory_bytes)",
        )
    if worker["waiting"]:
        yield Finding(
            "workers",
            f"{name}: {worker['waiting']} requests wait, {worker['running']} run",
            "it gets more than it computes",
            f"add {worker['role']} workers",
        )
