-- A sign of life: registers a replica, forgets those that gave none, and hands the lease to whom it is due.
-- KEYS: lease (hash), members (sorted set: replica -> when it is forgotten, in us)
-- ARGV: replica, life of the entry and of the lease in us, whether the replica would lead ('1')
-- Returns leader ('' for none), epoch, us that the lease still holds, the members, and for how many us it has known
-- who leads: a store that was emptied knows nothing of whoever led just before.
local LARGEST = 2 ^ 53 - 1  -- of the whole numbers that are told apart from the next
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local life = tonumber(ARGV[2])

redis.call('ZADD', KEYS[2], string.format('%.0f', now + life), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
-- What would live for longer than anybody may was left by a clock that has been set back, or is not ours.
redis.call('ZREMRANGEBYSCORE', KEYS[2], string.format('(%.0f', now + 2 * life), '+inf')
redis.call('PEXPIRE', KEYS[2], math.ceil(life / 1000))

local held = redis.call('HMGET', KEYS[1], 'leader', 'epoch', 'ends_at', 'born')
local leader, epoch, ends_at = held[1] or '', tonumber(held[2] or 0) or 0, tonumber(held[3] or 0) or 0
if not (epoch >= 0 and epoch < LARGEST) then epoch = 0 end
if not (ends_at <= now + life) then  -- here, too: whoever holds it counts on no more than that
  ends_at = now + life
  redis.call('HSET', KEYS[1], 'ends_at', string.format('%.0f', ends_at))
end
if ends_at <= now then leader = '' end
if leader == '' and ARGV[3] == '1' then
  -- By the time, so that it grows even if the key was lost; never twice the same, even if the clock was set back.
  leader, epoch = ARGV[1], math.max(now, epoch + 1)
end
if leader == ARGV[1] then
  ends_at = now + life
  redis.call('HSET', KEYS[1], 'leader', leader, 'epoch', string.format('%.0f', epoch),
    'ends_at', string.format('%.0f', ends_at))
end
local born = tonumber(held[4] or '')
if not (born and born >= 0 and born <= now) then
  born = now
  redis.call('HSET', KEYS[1], 'born', string.format('%.0f', born))
end
return {leader, string.format('%.0f', epoch), string.format('%.0f', math.max(0, ends_at - now)),
  redis.call('ZRANGE', KEYS[2], 0, -1), string.format('%.0f', now - born)}
