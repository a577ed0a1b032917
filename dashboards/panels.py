"""Every dashboard: its panels, what each of them tells, and the queries behind it."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS, RATIO, PER_SECOND, TOKENS, PLAIN, BYTES = "s", "percentunit", "reqps", "none", "short", "bytes"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and how its series are named."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time; a ``stat`` shows the last value alone."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    stat: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: rows of panels under their names."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


WINDOW = "$__rate_interval"
CONTENDED = f'sum(rate(slai_queue_turns_total{{turn!="alone"}}[{WINDOW}]))'
OVERTAKING = f'sum(rate(slai_queue_turns_total{{turn=~"length|deadline|share"}}[{WINDOW}]))'


def quantiles(metric: str, by: str = "class") -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket[{WINDOW}])))",
            f"p{q * 100:g} {{{{{by}}}}}",
        )
        for q in (0.5, 0.99)
    )


def rate(metric: str, by: str, legend: str = "", where: str = "") -> Query:
    return Query(
        f"sum by ({by}) (rate({metric}{where}[{WINDOW}]))", legend or " ".join(f"{{{{{b}}}}}" for b in by.split(", "))
    )


def kept(of: str) -> tuple[Query, ...]:
    """Shares of the deadlines that fell due and were kept, by engine or tenant."""

    def per_second(what: str) -> str:
        return f"sum by ({of}, kind) (rate(slai_{of}_{what}_total[{WINDOW}]))"

    share = f"1 - {per_second('deadline_misses')} / ({per_second('deadlines')} > 0)"
    return (Query(share, f"{{{{{of}}}}} {{{{kind}}}}"),)


def per_engine(metric: str) -> Query:
    return Query(metric, "{{engine}}")


OVERVIEW = Board(
    "slai-overview",
    "slai-proxy: overview",
    "Are the deadlines kept, for whom not, and what do clients see?",
    (
        (
            "Promises",
            (
                Panel(
                    "Tokens in time",
                    "Share of gaps between tokens within their class's TBT deadline, over the last 5 minutes.",
                    RATIO,
                    (Query("slai:tbt_in_time:ratio_rate5m", "{{class}}"),),
                    stat=True,
                ),
                Panel(
                    "First tokens in time",
                    "Share of requests with a TTFT deadline whose first token came within it, over the last 5 minutes; "
                    "classes without one are not shown.",
                    RATIO,
                    (Query("slai:ttft_in_time:ratio_rate5m", "{{class}}"),),
                    stat=True,
                ),
                Panel(
                    "Engines",
                    "Engines that get requests, of all that are known.",
                    PLAIN,
                    (Query("sum(slai_engine_up)", "up"), Query("count(slai_engine_up)", "known")),
                    stat=True,
                ),
                Panel(
                    "Waiting",
                    "Requests that wait in the proxy, and their prompt tokens.",
                    PLAIN,
                    (Query("sum(slai_queue_requests)", "requests"), Query("sum(slai_queue_tokens)", "tokens")),
                    stat=True,
                ),
            ),
        ),
        (
            "What clients see",
            (
                Panel(
                    "Time to first token",
                    "From the arrival of a request to the first token that its client can see, queue included.",
                    SECONDS,
                    quantiles("gen_ai_server_time_to_first_token_seconds"),
                ),
                Panel(
                    "Time between tokens",
                    "Gaps between the tokens of all streams, pooled.",
                    SECONDS,
                    quantiles("slai_tbt_seconds"),
                ),
                Panel(
                    "Late tokens, by cause",
                    "prefill: a step held more prompt tokens than the deadline allowed (tiles or a smaller token budget help). "
                    "stall: the engine took far longer than for steps like it. preemption: the engine made steps without "
                    "the stream and told of a preemption. passed_over: it told of none, or too late. delivery: the steps were short, tokens were held back on "
                    "their way. step: the decodes alone take about as long as the deadline (fewer sequences help).",
                    PER_SECOND,
                    (rate("slai_tbt_breaches_total", "class, cause"),),
                ),
                Panel(
                    "Time in the queue",
                    "From the arrival of a request to its dispatch to an engine.",
                    SECONDS,
                    quantiles("slai_queue_duration_seconds"),
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Requests, by outcome",
                    "Requests that ended, by how.",
                    PER_SECOND,
                    (rate("slai_requests_total", "outcome"),),
                    stacked=True,
                ),
                Panel(
                    "Refusals and failures, by reason",
                    "Requests that were refused or failed, by reason: queue_full, ttft_limit, no_engine and others.",
                    PER_SECOND,
                    (Query(f"sum by (reason) (rate(slai_failures_total[{WINDOW}])) or vector(0)", "{{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Tokens",
                    "Prompt and output tokens of completed requests, per second.",
                    TOKENS,
                    (rate("slai_tokens_total", "direction"),),
                ),
                Panel(
                    "Deadlines missed",
                    "Missed deadlines, by kind: first tokens (ttft) and gaps between tokens (tbt), counted when a request ends.",
                    PER_SECOND,
                    (rate("slai_deadline_misses_total", "class, kind"),),
                ),
            ),
        ),
    ),
)

ENGINES = Board(
    "slai-engines",
    "slai-proxy: engines",
    "What the proxy believes of each engine, and how near that is to the truth.",
    (
        (
            "State",
            (
                Panel(
                    "Condition",
                    "1 for the condition that an engine is in: healthy, slow_start, ejected, probation or stalled.",
                    PLAIN,
                    (Query("slai_engine_condition == 1", "{{engine}} {{condition}}"),),
                ),
                Panel(
                    "Requests", "Requests dispatched to it and not over.", PLAIN, (per_engine("slai_engine_requests"),)
                ),
                Panel("Decodes", "Streams past their first token.", PLAIN, (per_engine("slai_engine_decodes"),)),
                Panel(
                    "Queue inside the engine",
                    "Sequences that wait in the engine itself, by its own word. Kept small, the order is the proxy's.",
                    PLAIN,
                    (per_engine("slai_engine_reported_waiting"),),
                ),
                Panel(
                    "Backlog",
                    "Prompt tokens released to it and not worked on yet, as the proxy believes.",
                    TOKENS,
                    (per_engine("slai_engine_backlog_tokens"),),
                ),
            ),
        ),
        (
            "Steps",
            (
                Panel(
                    "Step duration",
                    "How long its usual step takes, as the tokens tell.",
                    SECONDS,
                    (per_engine("slai_engine_step_duration_seconds"),),
                ),
                Panel(
                    "TBT slack",
                    "By how much the step under way is going to keep the strictest deadline in flight, the step model's p95 "
                    "error deducted. Below 0 a token will probably be late.",
                    SECONDS,
                    (Query("slai_engine_tbt_slack_seconds or vector(0)", "{{engine}}"),),
                ),
                Panel(
                    "Error of the step model",
                    "Mean error and p95 of how much longer steps with prompts take than predicted, as shares of the "
                    "prediction. Above .3 tiles get small and slack is overestimated.",
                    RATIO,
                    (
                        Query("slai_engine_step_model_prompt_error_mean", "mean {{engine}}"),
                        Query("slai_engine_step_model_prompt_error_p95", "p95 {{engine}}"),
                    ),
                ),
                Panel(
                    "Delay",
                    "From a release to the step that takes the prompt in, and how many steps the engine composes ahead.",
                    SECONDS,
                    (per_engine("slai_engine_feedback_duration_seconds"),),
                ),
            ),
        ),
        (
            "Served",
            (
                Panel(
                    "Deadlines kept",
                    "Share of the deadlines that fell due at an engine and were kept: first tokens (ttft), gaps (tbt).",
                    RATIO,
                    kept("engine"),
                ),
                Panel(
                    "Time to first token",
                    "From arrival to first token, by the engine that gave it.",
                    SECONDS,
                    quantiles("slai_engine_time_to_first_token_seconds", "engine"),
                ),
                Panel(
                    "Time between tokens",
                    "Gaps between tokens of streams that have ended, by engine: is one slower than the others?",
                    SECONDS,
                    quantiles("slai_engine_tbt_seconds", "engine"),
                ),
                Panel(
                    "Mean time between tokens",
                    "Of each completed request (TPOT), by engine.",
                    SECONDS,
                    quantiles("slai_engine_time_per_output_token_seconds", "engine"),
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel(
                    "KV cache",
                    "Share of the KV cache in use, by the proxy's own account.",
                    RATIO,
                    (Query("slai_engine_kv_tokens / (slai_engine_kv_capacity_tokens > 0)", "{{engine}}"),),
                ),
                Panel(
                    "KV cache beyond our account",
                    "Tokens in use by the engine's own account beyond ours: others' requests, or lengths misjudged.",
                    TOKENS,
                    (per_engine("slai_engine_kv_error_tokens"),),
                ),
                Panel(
                    "Prompt tokens believed cached",
                    "Prefixes that the engine is believed to hold, which decide placement.",
                    TOKENS,
                    (per_engine("slai_engine_prefix_tokens"),),
                ),
                Panel(
                    "Hit rate of slices",
                    "Share of prompts' earlier slices that the engine found cached. Below .95 tiles fall back to whole prompts.",
                    RATIO,
                    (per_engine("slai_engine_slice_hit_rate"),),
                ),
            ),
        ),
    ),
)

SCHEDULING = Board(
    "slai-scheduling",
    "slai-proxy: scheduling",
    "What waits and why, who goes first, and how the queue empties.",
    (
        (
            "What waits, and why",
            (
                Panel(
                    "Waiting requests, by class",
                    "Requests that wait in the proxy.",
                    PLAIN,
                    (Query("sum by (class) (slai_queue_class_requests)", "{{class}}"),),
                    stacked=True,
                ),
                Panel(
                    "Why: engines, by what keeps the next request from them",
                    "How many engines each reason keeps who is next from; none while nobody waits. backlog: it has as much prompt "
                    "work as it can do for now. slots, kv_cache: it is full. tile, tbt: TBT deadlines of its streams leave no "
                    "room. tenants: the rest is kept for others. throughput: busy enough (rad). down, backing_off, unwell: it "
                    "gets nothing. order: others go first.",
                    PLAIN,
                    (Query("sum by (reason) (slai_engine_obstacle)", "{{reason}}"),),
                    stacked=True,
                ),
                Panel("Waiting tokens", "Prompt tokens that wait.", TOKENS, (Query("slai_queue_tokens", "tokens"),)),
                Panel(
                    "Waiting bytes",
                    "Memory of waiting requests' bodies.",
                    BYTES,
                    (Query("slai_queue_size_bytes", "bytes"),),
                ),
                Panel(
                    "Outflow",
                    "Prompt tokens released per second while somebody waits: what refusals and Retry-After are computed from.",
                    TOKENS,
                    (Query("slai_queue_outflow_rate", "tokens/s"),),
                ),
            ),
        ),
        (
            "Order against first come, first served",
            (
                Panel(
                    "Who went first, and why",
                    "Requests that left the queue, by why they went before those that still waited. arrival: they had come first. "
                    "length, deadline, share: before an older one, as they were shorter, their first token was due, or it was "
                    "their tenant's or class's turn. age, overdue: see aging. alone: nobody else waited.",
                    PER_SECOND,
                    (rate("slai_queue_turns_total", "turn"),),
                    stacked=True,
                ),
                Panel(
                    "Out of the order of arrival",
                    "Share of the requests that went before an older one, of all that left while others waited: 0 is first come, "
                    "first served.",
                    RATIO,
                    (Query(f"{OVERTAKING} / clamp_min({CONTENDED}, 1e-9)", "overtook"),),
                ),
                Panel(
                    "By how much",
                    "How much later than the oldest request that still waited those had come that went before it, on average.",
                    SECONDS,
                    (
                        Query(
                            f"sum(rate(slai_queue_overtaking_seconds_total[{WINDOW}])) / clamp_min({OVERTAKING}, 1e-9)",
                            "later",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Aging",
            (
                Panel(
                    "Longest wait",
                    "How long whoever waits longest has waited. A prompt counts as half as long after each aging_seconds, and "
                    "after max_wait_seconds it goes first.",
                    SECONDS,
                    (Query("slai_queue_longest_seconds", "longest"),),
                ),
                Panel(
                    "Went first by their age",
                    "age: the oldest request went before a shorter one, which by length alone it would wait for. overdue: one had "
                    "waited for max_wait_seconds, so that nothing could overtake it any more; many of these are too many requests.",
                    PER_SECOND,
                    (rate("slai_queue_turns_total", "turn", where='{turn=~"age|overdue"}'),),
                ),
            ),
        ),
        (
            "Releases",
            (
                Panel(
                    "Time in the queue, distribution",
                    "Requests per second by how long they waited.",
                    PER_SECOND,
                    (Query(f"sum by (le) (rate(slai_queue_duration_seconds_bucket[{WINDOW}]))", "{{le}} s"),),
                ),
                Panel(
                    "Slices",
                    "Slices of prompts sent ahead per second (tiles), and the tokens in them.",
                    PER_SECOND,
                    (
                        Query(f"sum(rate(slai_slices_total[{WINDOW}])) or vector(0)", "slices"),
                        Query(f"sum(rate(slai_slice_tokens_total[{WINDOW}])) or vector(0)", "tokens"),
                    ),
                ),
                Panel(
                    "Releases, by what made it the time",
                    "Whole prompts and slices of them released, by the event that let them go: arrival (of the request itself, "
                    "or of another), step (a token told that an engine's step had ended), end (of another request), slice, "
                    "timer, turned_away, or engine (it came up, or told of its state).",
                    PER_SECOND,
                    (rate("slai_releases_total", "what, cause"),),
                    stacked=True,
                ),
                Panel(
                    "Harmful releases",
                    "Prompts released although they were to overrun a TBT deadline, as no engine could have spared it (policy slai).",
                    PER_SECOND,
                    (Query(f"sum(rate(slai_release_harmful_total[{WINDOW}]))", "releases"),),
                ),
            ),
        ),
    ),
)

PROXY = Board(
    "slai-proxy",
    "slai-proxy: the proxy itself",
    "Its own health: processor, memory, connections, configuration.",
    (
        (
            "Process",
            (
                Panel(
                    "Processor",
                    "Cores in use. One process uses one core at most: near 1 everything gets slower.",
                    PLAIN,
                    (Query(f"rate(process_cpu_seconds_total[{WINDOW}])", "cores"),),
                ),
                Panel(
                    "Memory",
                    "Resident memory: under a steady load it should stay flat.",
                    BYTES,
                    (Query("process_resident_memory_bytes", "resident"),),
                ),
                Panel(
                    "Open files",
                    "Open descriptors: two for each stream, one towards the client and one towards the engine.",
                    PLAIN,
                    (Query("process_open_fds", "open"), Query("process_max_fds", "limit")),
                ),
                Panel(
                    "Configuration",
                    "0 if the configuration as it lies on disk does not hold and the old one is in force.",
                    PLAIN,
                    (Query("slai_config_last_reload_successful", "holds"),),
                    stat=True,
                ),
            ),
        ),
        (
            "Loop",
            (
                Panel(
                    "Lag of the event loop",
                    "How late timers are, looked at ten times a second: whatever holds up the loop holds up every token. "
                    "A millisecond is its clock's.",
                    SECONDS,
                    tuple(
                        Query(
                            f"histogram_quantile({q}, sum by (le) (rate(slai_loop_lag_seconds_bucket[{WINDOW}])))",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Time of a decision",
                    "How long the scheduler thinks about an event (arrivals, ends, timers; tokens are not timed).",
                    SECONDS,
                    tuple(
                        Query(
                            f"histogram_quantile({q}, sum by (le) (rate(slai_decision_duration_seconds_bucket[{WINDOW}])))",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Open streams",
                    "Streams past their first token, and all requests at engines.",
                    PLAIN,
                    (Query("slai_streams", "streams"), Query("sum(slai_engine_requests)", "requests at engines")),
                ),
            ),
        ),
        (
            "Connections",
            (
                Panel("Clients", "Open connections of clients.", PLAIN, (Query("slai_connections", "connections"),)),
                Panel(
                    "Connections refused",
                    "By limit: of the process, or of one address.",
                    PER_SECOND,
                    (rate("slai_connections_refused_total", "limit"),),
                ),
                Panel(
                    "Connections ended",
                    "Connections that were too slow, by what they were waited for.",
                    PER_SECOND,
                    (rate("slai_connections_ended_total", "waited_for"),),
                ),
            ),
        ),
    ),
)

TENANTS = Board(
    "slai-tenants",
    "slai-proxy: tenants",
    "Who uses what: the tenants that the settings name; all others are one, 'other'.",
    (
        (
            "Tenants",
            (
                Panel(
                    "Requests",
                    "Requests that ended, by tenant and how.",
                    PER_SECOND,
                    (rate("slai_tenant_requests_total", "tenant, outcome"),),
                    stacked=True,
                ),
                Panel(
                    "Tokens",
                    "Prompt and output tokens per second.",
                    TOKENS,
                    (rate("slai_tenant_tokens_total", "tenant, direction"),),
                ),
                Panel(
                    "Time to first token",
                    "From arrival to first token, by tenant: is one held up by another?",
                    SECONDS,
                    quantiles("slai_tenant_time_to_first_token_seconds", "tenant"),
                ),
            ),
        ),
        (
            "Promises",
            (
                Panel(
                    "Deadlines kept",
                    "Share of a tenant's deadlines that fell due and were kept: first tokens (ttft), gaps between tokens (tbt).",
                    RATIO,
                    kept("tenant"),
                ),
                Panel(
                    "Time between tokens",
                    "Gaps between tokens of streams that have ended, by tenant.",
                    SECONDS,
                    quantiles("slai_tenant_tbt_seconds", "tenant"),
                ),
                Panel(
                    "Time in the queue",
                    "From arrival to dispatch, by tenant.",
                    SECONDS,
                    quantiles("slai_tenant_queue_duration_seconds", "tenant"),
                ),
            ),
        ),
    ),
)

BOARDS = (OVERVIEW, SCHEDULING, ENGINES, TENANTS, PROXY)
