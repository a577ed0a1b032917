"""The one tree of settings, and what they have to be for it to hold."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    Field,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from yarl import URL

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.limits import CacheConfig, EngineLimits
from proxy.core.ordering import AGING_SECONDS
from proxy.core.policies import PolicyName, configure
from proxy.core.request import RequestClass
from proxy.core.tiles import TileConfig
from proxy.entries import ClassSettings, Positive, Seconds, TenantSettings
from proxy.keys import KeyTable, read_keys
from proxy.mistakes import example
from proxy.sim.profiles import checked_profile
from proxy.store.address import check_url, has_password
from proxy.upstream.sources import check_entry, is_engine
from proxy.wire.tenants import Tenants, TenantSource

if TYPE_CHECKING:
    from proxy.wire.keys import Key

ENVIRONMENT_PREFIX = "SLAI_"
MAX_NAMED_TENANTS = 100


class Settings(BaseSettings):
    """The proxy's settings: flags, environment variables and keys of the YAML file, by the same names."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    config: Path | None = None
    """YAML file with further settings."""
    engines: Annotated[tuple[str, ...], NoDecode] = ()
    """Base URLs of the engines (without /v1), with commas between them, or where to find them: dns+http://NAME:PORT
    (all its addresses), srv+http://NAME, file:PATH (a list of URLs) or k8s+http://SERVICE.NAMESPACE:PORT, which are
    followed as they change. Left out: simulated engines are started."""
    discovery_interval_seconds: Seconds = 5.0
    """Time between two looks at DNS names and files that tell engines."""
    aliases: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Other names of models, like gpt-4=llama-70b,fast=llama-8b. /v1/models lists them; answers name the model."""
    engine_administration: bool = False
    """Pass paths that administer engines (/sleep, /reset_prefix_cache, /v1/load_lora_adapter, ...) also for clients
    without an API key. With API keys, those of admin: true may use them."""
    engine_drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0
    """How long streams may go on at an engine that is told of no more; then they are cut."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve the port, at best as many as the machine has cores to spare; all of them are one queue.
    More than one meet at --redis, or at a server of their own (extra slai-proxy[workers]), and need --engines. The
    debug port of the second is --debug-port + 1, and so on."""

    tls_cert: Path | None = None
    """PEM file with the certificate for clients, and those that vouch for it: https instead of http, TLS 1.2 or later.
    Read anew when it changes."""
    tls_key: Path | None = None
    """PEM file with its key, without a password; by default it is in the file of the certificate."""

    engine_key_file: Path | None = None
    """File with the API keys that engines want, which take the place of what clients send: a line with one for all
    engines, and lines with the URL of an engine and the key of that one."""
    engine_tls_ca: Path | None = None
    """PEM file with the only authorities that may vouch for https engines; by default those of the system."""
    engine_tls_cert: Path | None = None
    """PEM file with the certificate to show to https engines that ask for one."""
    engine_tls_key: Path | None = None
    """PEM file with its key; by default it is in the file of the certificate."""
    engine_tls_verify: bool = True
    """Check the certificates of https engines. Without it anybody on the way can read along."""

    token_budget: PositiveInt = 2048
    """The engines' --max-num-batched-tokens, which vLLM does not expose. Rather too large than too small."""
    max_num_seqs: PositiveInt = 256
    """The engines' --max-num-seqs."""
    kv_tokens: PositiveInt | None = None
    """Size of an engine's KV cache in tokens; by default read from its /metrics."""

    policy: Literal["fcfs", "spf", "slai", "rad"] = "spf"
    """Which waiting prompt goes next, and when. spf: the shortest first, halved in length with every --aging-seconds of
    waiting: best for the median TTFT. slai: spf, and a prompt waits when it would make streams miss their TBT deadline.
    fcfs: in order of arrival. rad: in order of arrival, for throughput: each engine is kept just full enough (fewer
    sequences, more even TBT), and TTFT waits; no TBT promise."""
    aging_seconds: Seconds = AGING_SECONDS
    """A waiting prompt counts as half as long after each such time."""
    max_wait_seconds: Seconds = 60.0
    """Who has waited this long goes first."""
    queue_timeout_seconds: Seconds = 300.0
    """Who has waited this long is refused (429); who would have to, at once (503)."""
    max_queue_requests: Annotated[int, Field(ge=0)] = 10_000
    """Most requests that wait; one more is refused (429)."""
    max_queue_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most prompt tokens that wait; by default as many as can be served within queue_timeout_seconds."""
    max_queue_bytes: Annotated[int, Field(ge=0)] = 512 << 20
    """Most bytes of request bodies that wait."""
    queue_comment_seconds: Seconds | None = None
    """How often a client that waits for a stream is sent a comment, which keeps its connection alive. Left out: never,
    since the status 200 goes out with the first, and a refusal that comes later is an event of the stream."""
    ask_usage: bool = False
    """Ask engines for the usage of every stream, and take the report out where the client did not ask: exact counts of
    tokens for shares, quotas, estimates of prompts and cached beginnings."""
    replays: Annotated[int, Field(ge=0, le=10)] = 0
    """How often a request is sent again whose engine failed before any of its answer came, to another one if there is
    one. It may have been at work on it, so that what is asked for may be done twice. x-slai-replayed marks answers."""
    backlog_factor: Positive = 1.5
    """Engine steps of prompt work released ahead. More: closer to the engine's own order; less: risk of idle steps."""
    kv_watermark: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of the KV cache kept free against preemptions, until the lengths of outputs and the engine's own /metrics
    tell how much it takes."""
    tenant_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of every engine (KV cache and slots) that a tenant with a queue leaves free while another, active in the
    last minute or two, has none: a fuller engine has longer steps, for everybody. 0 is all throughput. What a tenant is
    guaranteed need leave nothing free (see tenants)."""

    redis: SecretStr | None = None
    """URL of a Redis or Valkey server at which several proxies meet, to be one queue before the same engines:
    redis://, rediss:// (TLS), unix://, redis+cluster://HOST:PORT, redis+sentinel://HOST:PORT/NAME; a password
    in it is better told by SLAI_REDIS, or a file. Left out: this proxy is the only one. Needs the extra
    slai-proxy[redis]."""
    redis_password_file: Path | None = None
    """File with the password of that server, in place of one in its URL."""
    redis_pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    """Name of the fleet: proxies of one name, with the same engines and settings, are one queue."""

    tiles: bool = False
    """Cut long prompts into tiles, one per engine step (needs engines with prefix caching and a token budget of 2048
    or more; experimental)."""

    classes: Annotated[dict[str, ClassSettings], NoDecode] = Field(
        default_factory=lambda: {"strict": ClassSettings(tbt_seconds=0.1), "relaxed": ClassSettings(tbt_seconds=0.5)}
    )
    """Request classes by name, like {"fast": {"ttft_seconds": 1, "tbt_seconds": 0.1}}; an entry may have ttft_seconds
    and tbt_seconds (deadlines), ttft_limit_seconds (who would wait longer is refused) and weight (its share). Clients
    choose one by the header x-slo-class. It replaces strict and relaxed; name default_class too."""
    default_class: str = "relaxed"
    """Class of a request that names none."""

    tenants_from: TenantSource = TenantSource.NAMED
    """What tells tenants apart, who share the engines fairly: named, the API keys that tenants names (all others are
    one tenant); key, any API key, where something in front checks them; header, x-slai-tenant where a trusted front
    sets it; none, nothing.
    """
    tenants: Annotated[dict[str, TenantSettings], NoDecode] = Field(default_factory=dict)
    """Tenants by name, like {"acme": {"weight": 3}}; an entry may have weight (its share; others have 1),
    guaranteed_tokens_per_minute (prompt and output; up to that its work goes before what others do beyond theirs) and
    key_sha256 (a list of the SHA-256 of its API keys, in hex). Named ones have metrics of their own."""

    keys: Annotated[KeyTable, NoDecode] = Field(default_factory=dict)
    """API keys by name: {"acme-1": {"sha256": "...", "tenant": "acme"}}; slai-proxy key new makes one. An entry may
    also have classes, models, requests_per_minute, tokens_per_minute, concurrency and admin. With any, and with
    --keys-file, requests without a known key are refused (401)."""
    keys_file: Path | None = None
    """YAML file with further keys, as a table like that of keys. Left out, and without keys: anybody is let in."""

    max_body_bytes: PositiveInt = 32 << 20
    """Longest request body, inflated if it came compressed; a longer one is refused (413)."""
    max_upload_bytes: PositiveInt = 512 << 20
    """Most bytes held of bodies that are unfinished or pass the queue by, all together; one more is refused (429)."""
    head_timeout_seconds: Seconds = 15.0
    """How long a client may take for the head of a request; then the connection ends (408)."""
    body_timeout_seconds: Seconds = 120.0
    """How long a client may take for the body of a request; then it is refused (408)."""
    write_timeout_seconds: Seconds = 60.0
    """How long a client may leave unread what is ready for it; then the connection ends, and the request with it."""
    max_connections: PositiveInt | None = None
    """Most connections of clients; one more is turned away (503). By default half of the files that the process may
    open."""
    max_connections_per_address: PositiveInt | None = None
    """Most connections of one address (of a network of 64 bits in IPv6). Left out: no limit, as all clients behind a
    load balancer have its address."""
    connect_timeout_seconds: Seconds = 3.0
    """How long a connection to an engine may take."""
    idle_timeout_seconds: Seconds = 600.0
    """How long an engine may stay silent within an answer, the wait for its first byte included."""
    probe_interval_seconds: Seconds = 2.0
    """Time between two looks at an engine's /health and /metrics."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """After SIGTERM: how long streams in flight may go on. A second signal ends at once."""
    drain_grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """After SIGTERM, before the drain: how long all goes on as before while /readyz says that it is not ready. As long
    as a load balancer needs to see that; none after SIGINT (Ctrl-C)."""
    decision_log: Path | None = None
    """File for all that the scheduler is told and decides, for slai-proxy replay; no prompt text in it."""
    decision_log_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """Most bytes of decision logs kept, in eight files."""
    debug_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port for /debug/state and /debug/requests/ID (why requests wait), /metrics, the settings in force and what is
    known of them; /openapi.json there describes it. Left out: there is none."""
    debug_host: str = "127.0.0.1"
    """Address for --debug-port. On any but the loopback interface give --debug-key-file too."""
    debug_key_file: Path | None = None
    """File with the one key (Authorization: Bearer) that opens the debug port. Left out: it is open."""
    state_dir: Path | None = None
    """Directory where what is learnt about engines outlives a restart. Left out: nothing is kept."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector for traces and metrics, e.g. http://127.0.0.1:4318 (needs the extra slai-proxy[otlp]).
    The standard variables OTEL_* say the rest: protocol, headers, certificates, sampling, what is not to be sent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines to write."""

    sim_engines: PositiveInt = 2
    """Simulated engines to start when no engine is given."""
    sim_profile: str = "rtx6000ada"
    """GPU that they imitate: rtx6000ada, a100, h100, l40s, or a file that slai-proxy calibrate has written."""
    sim_speed: Positive = 1.0
    """How many times faster than real time they run."""

    @field_validator("sim_profile")
    @classmethod
    def _know_profile(cls, name: str) -> str:
        return checked_profile(name)

    @field_validator("classes", "tenants", "keys", mode="before")
    @classmethod
    def _read_json(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"not JSON; like {example(str(info.field_name))}") from None

    @field_validator("aliases", mode="before")
    @classmethod
    def _split_aliases(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(name.strip() and model.strip() for name, _, model in pairs):
            raise ValueError("an alias is NAME=MODEL, with commas between several")
        return {name.strip(): model.strip() for name, _, model in pairs}

    @field_validator("engines", mode="before")
    @classmethod
    def _split_engines(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, list | tuple):
            return tuple(part.strip().rstrip("/") for item in value for part in str(item).split(",") if part.strip())
        return value

    @field_validator("engines")
    @classmethod
    def _check_engines(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        value = tuple(map(check_entry, value))
        # Written in two ways it would get twice its share.
        if len(set(map(_place, value))) < len(value):
            raise ValueError("an engine is named twice")
        return value

    @model_validator(mode="after")
    def _check_classes(self) -> Settings:
        if self.default_class not in self.classes:
            raise ValueError(f"default_class {self.default_class!r} is none of the classes {', '.join(self.classes)}")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Settings:
        if self.workers > 1 and not self.engines:
            raise ValueError("several workers need engines: each would simulate its own")
        if self.workers > 1 and self.decision_log is not None:
            raise ValueError("a decision log is of one process: it does not go together with several workers")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Settings:
        if self.port and self.port == self.debug_port:
            raise ValueError(f"--debug-port and --port are both {self.port}")
        return self

    @model_validator(mode="after")
    def _check_files(self) -> Settings:
        for key, certificate in (("tls_key", "tls_cert"), ("engine_tls_key", "engine_tls_cert")):
            if getattr(self, key) is not None and getattr(self, certificate) is None:
                raise ValueError(f"{key} needs {certificate}")
        return self

    @field_validator("redis")
    @classmethod
    def _check_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_url(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _check_redis_password(self) -> Settings:
        if self.redis_password_file is None:
            return self
        if self.redis is None:
            raise ValueError("redis_password_file needs redis: whose password is it?")
        if has_password(self.redis.get_secret_value()):
            raise ValueError("there is a password in the URL of redis, and a redis_password_file: one of them")
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> Settings:
        if self.tiles and self.policy == "rad":
            raise ValueError("policy rad releases whole prompts: it does not go together with tiles")
        return self

    @model_validator(mode="after")
    def _check_tenants(self) -> Settings:
        digests = [digest for tenant in self.tenants.values() for digest in tenant.key_sha256]
        if len(set(digests)) < len(digests):
            raise ValueError("tenants: an API key belongs to one tenant only")
        if len(self.tenants) > MAX_NAMED_TENANTS:
            raise ValueError(f"tenants: at most {MAX_NAMED_TENANTS}, as each has metrics of its own")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic passes all by keyword
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # ``load_settings`` merges the sources itself, because only it can say afterwards where a value came from.
        return (init_settings,)

    def request_classes(self) -> dict[str, RequestClass]:
        return {
            name: RequestClass(name, c.ttft_seconds, c.tbt_seconds, c.weight, c.ttft_limit_seconds)
            for name, c in self.classes.items()
        }

    def tenant_reader(self, secret: bytes) -> Tenants:
        """What tells the tenant of a request; ``secret`` hides the API keys behind its names."""
        names = {digest: name for name, tenant in self.tenants.items() for digest in tenant.key_sha256}
        return Tenants(self.tenants_from, secret, names)

    @property
    def needs_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.keys) or self.keys_file is not None

    def read_keys(self) -> list[Key]:
        """The API keys, those of the file with them.

        Raises:
            ConfigError: as from ``keys.read_keys``.
        """
        return read_keys(self.keys, self.keys_file, self.classes)

    def engine_limits(self, cache: CacheConfig) -> EngineLimits:
        """The limits of an engine that reports ``cache``; a configured figure wins."""
        return EngineLimits(
            self.token_budget,
            self.max_num_seqs,
            self.kv_tokens or cache.kv_tokens,
            block_tokens=cache.block_tokens,
            caches_prefixes=cache.caches_prefixes,
        )

    def scheduler_config(self) -> SchedulerConfig:
        base = SchedulerConfig(
            gate=GateConfig(
                backlog_factor=self.backlog_factor,
                kv_watermark=self.kv_watermark,
                tenant_headroom=self.tenant_headroom,
            ),
            tiles=TileConfig() if self.tiles else None,
            max_wait_seconds=self.max_wait_seconds,
            queue_timeout_seconds=self.queue_timeout_seconds,
            max_queue_requests=self.max_queue_requests,
            max_queue_tokens=self.max_queue_tokens,
            max_queue_bytes=self.max_queue_bytes,
            tenant_weights={name: tenant.weight for name, tenant in self.tenants.items()},
            tenant_guarantees={
                name: tenant.guaranteed_tokens_per_minute
                for name, tenant in self.tenants.items()
                if tenant.guaranteed_tokens_per_minute is not None
            },
        )
        return configure(PolicyName(self.policy), base, self.aging_seconds)


def _place(entry: str) -> str:
    """The one way of many to write an engine's URL; a source of engines as it is."""
    if not is_engine(entry):
        return entry
    url = URL(entry)
    return str(url.with_port(url.port))
