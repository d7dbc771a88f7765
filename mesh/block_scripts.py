"""The block index in Redis: its keys and the scripts that change them together."""

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class IndexKeys:
    """The keys of one model, in one slot of a Redis Cluster by their hash tag.

    A shelf is what one process holds in one tier, `worker_id@incarnation#tier`:

        leases        sorted set of shelves by the time in ms at which they stop counting
        seqs          hash: shelf -> number of its last event
        run           a random id, new when Redis has lost its data
        events        stream of the publications of late
        held:SHELF    set of the blocks on a shelf
        block:KEY     hash: shelf -> ""
    """

    model: str

    @property
    def tag(self) -> str:
        return "mesh:{" + quote(self.model) + "}:"

    @property
    def leases(self) -> str:
        return self.tag + "leases"

    @property
    def events(self) -> str:
        return self.tag + "events"

    @property
    def shared(self) -> list[str]:
        """The first keys of most scripts."""
        return [self.leases, self.tag + "seqs", self.tag + "run", self.events]

    def held(self, shelf: str) -> str:
        return f"{self.tag}held:{shelf}"

    def block(self, hex_key: str) -> str:
        return f"{self.tag}block:{hex_key}"


_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# Takes up to `batch` blocks off a shelf; its last step tells the followers.
_CLEAR = """
local function clear(shelf, tag, batch, max_events)
  local held = tag .. 'held:' .. shelf
  for _, key in ipairs(redis.call('SPOP', held, batch)) do
    redis.call('HDEL', tag .. 'block:' .. key, shelf)
  end
  local left = redis.call('SCARD', held)
  if left == 0 then
    redis.call('ZREM', KEYS[1], shelf)
    if redis.call('HDEL', KEYS[2], shelf) == 1 then
      redis.call('XADD', KEYS[4], 'MAXLEN', '~', max_events, '*', 'shelf', shelf, 'seq', 0,
        'run', redis.call('GET', KEYS[3]) or '', 'drop', '')
    end
  end
  return left
end
"""

# Both directions, the lease, the number and the event change together.
#
# KEYS: shared, held, blocks to remove, blocks to store.
# ARGV: shelf, lease in ms, keep in ms, most blocks, most events, a new run id, number of
# blocks to remove, their keys joined, the stored keys joined, hex keys in order of KEYS.
# Returns 0 when the lease had ended, for then some of the shelf may be cleared away.
PUBLISH = (
    _NOW
    + """
local shelf, keep, num_removed = ARGV[1], ARGV[3], tonumber(ARGV[7])
local had_ended = tonumber(redis.call('ZSCORE', KEYS[1], shelf) or now) < now
local room = ARGV[4] - redis.call('SCARD', KEYS[5])
local stored = ARGV[9]
for i = 6, #KEYS do
  local key, number = ARGV[i + 4], i - 5
  if number <= num_removed then
    redis.call('HDEL', KEYS[i], shelf)
    room = room + redis.call('SREM', KEYS[5], key)
  elseif room > 0 or redis.call('SISMEMBER', KEYS[5], key) == 1 then
    redis.call('HSET', KEYS[i], shelf, '')
    redis.call('PEXPIRE', KEYS[i], keep)
    room = room - redis.call('SADD', KEYS[5], key)
  else
    stored = string.sub(stored, 1, 16 * (number - num_removed - 1))
    break
  end
end
redis.call('SET', KEYS[3], ARGV[6], 'NX')
local seq = redis.call('HINCRBY', KEYS[2], shelf, 1)
redis.call('ZADD', KEYS[1], now + ARGV[2], shelf)
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[5], '*', 'shelf', shelf, 'seq', seq,
  'run', redis.call('GET', KEYS[3]), 'stored', stored, 'removed', ARGV[8])
for i = 1, 5 do
  redis.call('PEXPIRE', KEYS[i], keep)
end
return had_ended and 0 or seq
"""
)

# KEYS: shared, held. ARGV: shelf, lease in ms, keep in ms, tag, batch, most events.
# Returns the number of the shelf's last event, 0 when it has none or its lease had ended.
RENEW = (
    _NOW
    + _CLEAR
    + """
local seq = redis.call('HGET', KEYS[2], ARGV[1])
if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 0) < now then
  seq = nil
end
if seq then
  redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
  for i = 1, 5 do
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
  end
end
local ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now, 'LIMIT', 0, 1)[1]
if ended then
  clear(ended, ARGV[4], ARGV[5], ARGV[6])
end
return tonumber(seq or 0)
"""
)

# KEYS: shared, held. ARGV: shelf, tag, batch, most events. Returns how many are left.
DROP = (
    _CLEAR
    + """
return clear(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
"""
)

# Walks the chain while some holder has every block so far. A shelf whose lease has
# ended is forgotten on the way.
#
# KEYS: leases, blocks in order.
# Returns {holder, leading blocks on its device, in host memory, on disk} for each holder.
LONGEST_PREFIX = (
    _NOW
    + """
local ranks = {device = 1, host = 2, disk = 3}
local alive, counts, leading = {}, {}, nil
for i = 2, #KEYS do
  local warmest, any = {}, false
  for _, shelf in ipairs(redis.call('HKEYS', KEYS[i])) do
    if alive[shelf] == nil then
      alive[shelf] = tonumber(redis.call('ZSCORE', KEYS[1], shelf) or 0) >= now
    end
    local holder, tier = string.match(shelf, '^(.*)#(%a+)$')
    local rank = ranks[tier]
    if not alive[shelf] then
      redis.call('HDEL', KEYS[i], shelf)
    elseif rank and (leading == nil or leading[holder]) then
      warmest[holder] = math.min(rank, warmest[holder] or rank)
      any = true
    end
  end
  if not any then
    break
  end
  for holder, rank in pairs(warmest) do
    counts[holder] = counts[holder] or {0, 0, 0}
    counts[holder][rank] = counts[holder][rank] + 1
  end
  leading = warmest
end
local result = {}
for holder, count in pairs(counts) do
  result[#result + 1] = {holder, count[1], count[2], count[3]}
end
return result
"""
)

# KEYS: shared. Returns run id, last event id, shelf, number of its last event, shelf, ...
STATE = (
    _NOW
    + """
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
local result = {redis.call('GET', KEYS[3]) or '', last and last[1] or '0-0'}
for _, shelf in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  result[#result + 1] = shelf
  result[#result + 1] = redis.call('HGET', KEYS[2], shelf) or '0'
end
return result
"""
)
