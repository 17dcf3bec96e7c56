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
-- KEYS index, live, rows   ARGV old table, new table, live bits, ttl s [, number and token of a new row]
-- Replace the table if it is still the old. What is no string under its key counts as absent.
local now = redis.pcall('GET', KEYS[1])
if type(now) ~= 'string' then now = '' end
if now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
if ARGV[5] then
  if type(redis.pcall('HSET', KEYS[3], ARGV[5], ARGV[6])) == 'table' then
    redis.call('DEL', KEYS[3])
    redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
  end
end
redis.call('EXPIRE', KEYS[3], ARGV[4])
return 1
"""

_IS_ROW = """
if redis.pcall('GETBIT', KEYS[1], ARGV[1]) ~= 1 then return 0 end
if redis.pcall('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
"""

ADD = f"""
-- KEYS live, rows, block...   ARGV number, token, ttl s
{_IS_ROW}
for i = 3, #KEYS do
  if type(redis.pcall('SETBIT', KEYS[i], ARGV[1], 1)) == 'table' then
    -- No bitmap: nothing of ours.
    redis.call('DEL', KEYS[i])
    redis.call('SETBIT', KEYS[i], ARGV[1], 1)
  end
  redis.call('EXPIRE', KEYS[i], ARGV[3])
end
return 1
"""

REMOVE = f"""
-- KEYS live, rows, block...   ARGV number, token
{_IS_ROW}
for i = 3, #KEYS do
  -- SETBIT would create a key that is not there.
  if redis.pcall('GETBIT', KEYS[i], ARGV[1]) == 1 then
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
  local kept = redis.pcall('BITOP', 'AND', KEYS[i], KEYS[i], KEYS[1])
  if type(kept) == 'table' or redis.call('BITCOUNT', KEYS[i]) == 0 then
    deleted = deleted + redis.call('DEL', KEYS[i])
  else
    redis.call('EXPIRE', KEYS[i], ARGV[1])
  end
end
return deleted
"""
