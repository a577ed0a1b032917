-- A clean end: gives the lease back if the replica has it, and takes it out of the register.
-- KEYS: lease (hash), members (sorted set). ARGV: replica. Returns 1 if it led.
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HGET', KEYS[1], 'leader') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'leader', '', 'ends_at', '0')
return 1
