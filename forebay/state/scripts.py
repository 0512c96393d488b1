"""What is done to a session in one stroke, as Lua for the store (decision 0009)."""

# Keys of all scripts: the session (a hash: owner, fence, dropped, bytes; record, if it was made by name), its turns (a
# list), its lease (a string, "<fence>:<idempotency>"), and what idempotency keys stand for (a hash: key -> number of
# the turn).

#: fence, lease ms, session's ms, owner, idempotency, there?, number of turns or ''
#: -> busy same? | done turn | begun dropped turns | foreign | absent | moved
BEGIN = """
local session, turns, lease, did = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner = redis.call('HGET', session, 'owner')
if owner and owner ~= ARGV[4] then return {'foreign'} end
if ARGV[6] == '1' and redis.call('HEXISTS', session, 'record') == 0 then return {'absent'} end
local dropped = tonumber(redis.call('HGET', session, 'dropped') or 0)
local number = ARGV[5] ~= '' and redis.call('HGET', did, ARGV[5])
if number then
  return {'done', tonumber(number) >= dropped and redis.call('LINDEX', turns, number - dropped) or ''}
end
if tonumber(ARGV[7] ~= '' and ARGV[7] or 0) > 0 and redis.call('EXISTS', turns) == 0 then return {'absent'} end
if ARGV[7] ~= '' and dropped + redis.call('LLEN', turns) ~= tonumber(ARGV[7]) then return {'moved'} end
local held = redis.call('GET', lease)
if held then return {'busy', (ARGV[5] ~= '' and string.sub(held, #ARGV[1] + 2) == ARGV[5]) and 1 or 0} end
redis.call('SET', lease, ARGV[1] .. ':' .. ARGV[5], 'PX', ARGV[2])
redis.call('HSET', session, 'owner', ARGV[4], 'fence', ARGV[1])
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[3]) end
return {'begun', dropped, redis.call('LRANGE', turns, 0, -1)}
"""

#: fence, lease ms, session's ms, idempotency -> 1 if held. One that ran out is taken back if nobody has begun since.
RENEW = """
local session, turns, lease, did = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('HGET', session, 'fence') ~= ARGV[1] then return 0 end
redis.call('SET', lease, ARGV[1] .. ':' .. ARGV[4], 'PX', ARGV[2])
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[3]) end
return 1
"""

#: fence, ttl ms, most turns, most bytes, idempotency, dropped before copied turns, turns... -> 1 if kept. The newest
#: turn is kept whatever its size.
COMMIT = """
local session, turns, lease, did = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('HGET', session, 'fence') ~= ARGV[1] then return 0 end
local count, bytes
for i = 7, #ARGV do
  count = redis.call('RPUSH', turns, ARGV[i])
  bytes = redis.call('HINCRBY', session, 'bytes', #ARGV[i])
end
local dropped = redis.call('HINCRBY', session, 'dropped', ARGV[6])
while count > 1 and (count > tonumber(ARGV[3]) or bytes > tonumber(ARGV[4])) do
  bytes = redis.call('HINCRBY', session, 'bytes', -#redis.call('LPOP', turns))
  dropped = redis.call('HINCRBY', session, 'dropped', 1)
  count = count - 1
end
if ARGV[5] ~= '' then
  redis.call('HSET', did, ARGV[5], dropped + count - 1)
  if redis.call('HLEN', did) > tonumber(ARGV[3]) + 1000 then  -- those whose answer is gone are forgotten at last
    local known = redis.call('HGETALL', did)
    for i = 1, #known, 2 do
      if tonumber(known[i + 1]) < dropped then redis.call('HDEL', did, known[i]) end
    end
  end
end
redis.call('HDEL', session, 'fence')
redis.call('DEL', lease)
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[2]) end
return 1
"""

#: fence -> 1 if it was held
ABORT = """
local session, turns, lease = KEYS[1], KEYS[2], KEYS[3]
if redis.call('HGET', session, 'fence') ~= ARGV[1] then return 0 end
redis.call('HDEL', session, 'fence')
redis.call('DEL', lease)
if redis.call('EXISTS', turns) + redis.call('HEXISTS', session, 'record') == 0 then redis.call('DEL', session) end
return 1
"""

#: owner -> read dropped turns record | foreign
READ = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return {'foreign'} end
local dropped, record = redis.call('HGET', KEYS[1], 'dropped') or 0, redis.call('HGET', KEYS[1], 'record') or ''
return {'read', dropped, redis.call('LRANGE', KEYS[2], 0, -1), record}
"""

#: -> 1 if there was one, and its turns
DELETE = """
local turns = redis.call('LRANGE', KEYS[2], 0, -1)
return {redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) > 0 and 1 or 0, turns}
"""

#: owner, record, session's ms, there? -> done | absent | foreign
DESCRIBE = """
local session, turns, did = KEYS[1], KEYS[2], KEYS[4]
local owner = redis.call('HGET', session, 'owner')
if owner and owner ~= ARGV[1] then return 'foreign' end
if ARGV[4] == '1' and redis.call('HEXISTS', session, 'record') == 0 then return 'absent' end
redis.call('HSET', session, 'owner', ARGV[1], 'record', ARGV[2])
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[3]) end
return 'done'
"""
