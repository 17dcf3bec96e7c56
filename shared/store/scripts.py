"""Server-side scripts of the Redis store: what must be one step, or would be thousands of commands.

Redis 7.0 commands only; they also run on Valkey. Numbers travel as strings.
"""

WRITE_LEASE = """
-- KEYS lease, epoch   ARGV epoch, owner, lease ttl ms, epoch ttl s
local epoch, owner = tonumber(ARGV[1]), ARGV[2]
local known = redis.call('GET', KEYS[2])
if known then
  local e, o = string.match(known, '^(%d+) (.*)$')
  e = tonumber(e)
  if e and (epoch < e or (epoch == e and owner > o)) then return 0 end
end
local value = ARGV[1] .. ' ' .. owner
redis.call('SET', KEYS[2], value, 'EX', ARGV[4])
redis.call('SET', KEYS[1], value, 'PX', ARGV[3])
return 1
"""

RELEASE = """
-- KEYS key   ARGV value: delete it if it holds exactly this
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

HOLD = """
-- KEYS key   ARGV owner, ttl ms
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

SWAP_TABLE = """
-- KEYS index, live   ARGV old table, new table, live bits, ttl s: replace the table if it is still the old
local now = redis.call('GET', KEYS[1]) or ''
if now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
return 1
"""

ADD = """
-- KEYS live, block...   ARGV number, ttl s
if redis.call('GETBIT', KEYS[1], ARGV[1]) == 0 then return 0 end
for i = 2, #KEYS do
  redis.call('SETBIT', KEYS[i], ARGV[1], 1)
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
return 1
"""

REMOVE = """
-- KEYS live, block...   ARGV number
if redis.call('GETBIT', KEYS[1], ARGV[1]) == 0 then return 0 end
for i = 2, #KEYS do
  -- SETBIT would create a key that is not there.
  if redis.call('GETBIT', KEYS[i], ARGV[1]) == 1 then
    redis.call('SETBIT', KEYS[i], ARGV[1], 0)
    if redis.call('BITCOUNT', KEYS[i]) == 0 then redis.call('DEL', KEYS[i]) end
  end
end
return 1
"""

SWEEP = """
-- KEYS live, block...   ARGV ttl s: drop bits of numbers not in use, and bitmaps without any
local deleted = 0
for i = 2, #KEYS do
  redis.call('BITOP', 'AND', KEYS[i], KEYS[i], KEYS[1])
  if redis.call('BITCOUNT', KEYS[i]) == 0 then
    deleted = deleted + redis.call('DEL', KEYS[i])
  else
    redis.call('EXPIRE', KEYS[i], ARGV[1])
  end
end
return deleted
"""
