-- A letter of the leader: sent only while its lease holds.
-- KEYS: lease (hash). ARGV: replica, epoch, channel, letter. Returns 1 if it was sent, 0 if somebody else leads.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local held = redis.call('HMGET', KEYS[1], 'leader', 'epoch', 'ends_at')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] or (tonumber(held[3]) or 0) <= now then return 0 end
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 1
