"""What a fleet costs, measured: ``python -m fleet.cost --help``.

``latency``
    What a release takes from the client to an idle engine: through no proxy, one alone, a leader, a follower.
``traffic``
    Commands and bytes at Redis, and CPU, for each request and token at each replica, and when nothing happens.
``capacity``
    How many letters a second one Redis carries.
``queue``
    What the leader's decisions take with how many requests waiting.
"""
