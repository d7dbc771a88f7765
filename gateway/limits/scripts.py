"""Limits in Redis: each decision is one script, at the time of Redis.

A scope (a key, or a group) has two keys:

    bucket   hash: `requests` and `tokens` left, and `at`, when that was so, in ms
    slots    sorted set: leases of running requests by the time in ms at which they end

Both levels rise evenly to the limit within a minute. A level below zero is a debt: tokens
that a request used beyond its estimate. A scope without a bucket has everything left.
"""

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class ScopeKeys:
    """The Redis keys of one scope. Those of one group share a slot of a cluster."""

    bucket: str
    slots: str


def scope_keys(group: str, key_id: str = "") -> ScopeKeys:
    """Of a group, or of one of its keys."""
    tag = "mesh:{limits-" + quote(group) + "}:"
    scope = f"key:{key_id}" if key_id else "group"
    return ScopeKeys(f"{tag}{scope}:bucket", f"{tag}{scope}:slots")


TIME = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_LEVELS = """
local MINUTE = 60000
local function risen(level, limit, elapsed)
  if not level or level == '' then return limit end
  return math.min(limit, tonumber(level) + elapsed * limit / MINUTE)
end
local function levels(bucket, max_requests, max_tokens)
  local stored = redis.call('HMGET', bucket, 'requests', 'tokens', 'at')
  local elapsed = stored[3] and math.max(0, now - tonumber(stored[3])) or 0
  return risen(stored[1], max_requests, elapsed), risen(stored[2], max_tokens, elapsed)
end
local function store(bucket, requests, max_requests, tokens, max_tokens)
  -- What has no limit now is full when it gets one.
  redis.call('HSET', bucket, 'at', now,
    'requests', max_requests > 0 and string.format('%.17g', requests) or '',
    'tokens', max_tokens > 0 and string.format('%.17g', tokens) or '')
  -- By then every level has risen to its limit, a debt included.
  redis.call('PEXPIRE', bucket, 2 * MINUTE + 1000)
end
"""

# KEYS: bucket and slots of each scope.
# ARGV: lease, its life in ms, tokens; for each scope its limits of requests, tokens and
# requests at a time, 0 for none.
# Answers: 1 if admitted, else 0; which limit refused; of which scope; ms until another try
# can succeed, -1 for never. For each scope: requests and tokens left, ms until each is full.
ADMIT_BODY = (
    _LEVELS
    + """
local lease, lease_ms, cost = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local scopes = {}
local refused, refused_scope, wait = '', 0, 0
local function refuse(limit, scope, ms)
  if refused == '' or (wait >= 0 and (ms < 0 or ms > wait)) then
    refused, refused_scope, wait = limit, scope, ms
  end
end
for i = 1, #KEYS / 2 do
  local at = 3 * i
  local scope = {
    bucket = KEYS[2 * i - 1], slots = KEYS[2 * i],
    max_requests = tonumber(ARGV[at + 1]),
    max_tokens = tonumber(ARGV[at + 2]),
    max_slots = tonumber(ARGV[at + 3]),
  }
  scopes[i] = scope
  scope.requests, scope.tokens = levels(scope.bucket, scope.max_requests, scope.max_tokens)
  if scope.max_requests > 0 and scope.requests < 1 then
    refuse('requests', i, math.ceil((1 - scope.requests) * MINUTE / scope.max_requests))
  end
  if scope.max_tokens > 0 and scope.tokens < cost then
    local ms = -1
    if cost <= scope.max_tokens then
      ms = math.ceil((cost - scope.tokens) * MINUTE / scope.max_tokens)
    end
    refuse('tokens', i, ms)
  end
  if scope.max_slots > 0 then
    redis.call('ZREMRANGEBYSCORE', scope.slots, '-inf', now)
    if redis.call('ZCARD', scope.slots) >= scope.max_slots then
      refuse('concurrency', i, 1000)
    end
  end
end
local answer = {refused == '' and 1 or 0, refused, refused_scope - 1, wait}
for _, scope in ipairs(scopes) do
  if refused == '' then
    if scope.max_requests > 0 then scope.requests = scope.requests - 1 end
    if scope.max_tokens > 0 then scope.tokens = scope.tokens - cost end
    if scope.max_requests > 0 or scope.max_tokens > 0 then
      store(scope.bucket, scope.requests, scope.max_requests, scope.tokens, scope.max_tokens)
    end
    if scope.max_slots > 0 then
      redis.call('ZADD', scope.slots, now + lease_ms, lease)
      redis.call('PEXPIRE', scope.slots, 2 * lease_ms)
    end
  end
  local function until_full(level, limit)
    return limit > 0 and math.ceil((limit - level) * MINUTE / limit) or 0
  end
  table.insert(answer, math.max(0, math.floor(scope.requests)))
  table.insert(answer, until_full(scope.requests, scope.max_requests))
  table.insert(answer, math.max(0, math.floor(scope.tokens)))
  table.insert(answer, until_full(scope.tokens, scope.max_tokens))
end
return answer
"""
)

# KEYS as above. ARGV: lease, life (unused), tokens that were reserved too many (or, below zero,
# too few); limits as above.
SETTLE_BODY = (
    _LEVELS
    + """
local lease, surplus = ARGV[1], tonumber(ARGV[3])
for i = 1, #KEYS / 2 do
  local bucket, slots, at = KEYS[2 * i - 1], KEYS[2 * i], 3 * i
  local max_requests, max_tokens = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  redis.call('ZREM', slots, lease)
  if max_tokens > 0 and surplus ~= 0 then
    local requests, tokens = levels(bucket, max_requests, max_tokens)
    tokens = math.max(-max_tokens, math.min(max_tokens, tokens + surplus))
    store(bucket, requests, max_requests, tokens, max_tokens)
  end
end
return 1
"""
)

# KEYS: slots of one scope. ARGV: life in ms; leases.
RENEW_BODY = """
local lease_ms = tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + lease_ms, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * lease_ms)
return 1
"""
