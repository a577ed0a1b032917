-- A clean end: gives the lease back if the replica has it, and takes it out of the register.
-- The others hear of a lease that is free by an empty letter.
-- KEYS: lease (hash), members (sorted set). ARGV: replica, what stands before a replica's name in its channel's.
-- Returns 1 if it led.
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HGET', KEYS[1], 'leader') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'leader', '', 'ends_at', '0')
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do redis.call('PUBLISH', ARGV[2] .. member, '') end
return 1
