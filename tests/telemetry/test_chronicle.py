"""The life of single requests: what happened, why it was released when it was, and how much is kept."""

from typing import Any

from builders import make_limits, make_request

from proxy.core.actions import Slice
from proxy.core.config import SchedulerConfig
from proxy.core.events import (
    Arrived,
    DrainStarted,
    Ended,
    EngineDown,
    EngineUp,
    Event,
    NotStarted,
    SliceEnded,
    Tokenized,
    TokensProduced,
)
from proxy.core.request import Outcome, RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.tiles import TileConfig
from proxy.telemetry.chronicle import MOST_MOMENTS, Chronicle, Story
from proxy.telemetry.report import RequestReport

RELAXED = RequestClass("relaxed")


class Stage:
    """A scheduler whose chronicle is kept, with engines of one sequence each."""

    def __init__(self, *engines: str, kept: int = 1000, **config: Any) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self.chronicle = Chronicle(kept)
        self.now = 0.0
        for engine in engines or ("e0",):
            self.feed(EngineUp(engine, make_limits(max_num_seqs=1)))

    def feed(self, event: Event | None, at: float | None = None) -> None:
        self.now = self.now if at is None else at
        actions = self.scheduler.tick(self.now) if event is None else self.scheduler.handle(event, self.now)
        if actions or not isinstance(event, TokensProduced):
            self.chronicle.observe(event, actions, self.now)

    def arrive(self, request_id: str, at: float | None = None, prompt_tokens: int = 100, **fields: Any) -> None:
        self.feed(Arrived(make_request(request_id, prompt_tokens, **fields)), at)

    def story(self, id_: str) -> Story:
        found = self.chronicle.find(id_)
        assert found is not None
        return found

    def cause(self, request_id: str) -> str | None:
        """Why the last decision on a request was taken when it was."""
        return next(moment.cause for moment in reversed(self.story(request_id).moments) if moment.cause)

    def whats(self, request_id: str) -> list[str]:
        return [moment.what for moment in self.story(request_id).moments]


class TestCauses:
    def test_its_own_arrival(self) -> None:
        stage = Stage()
        stage.arrive("a")
        assert stage.cause("a") == "its own arrival"
        assert stage.whats("a") == ["queued", "dispatched"]

    def test_the_end_of_another_request(self) -> None:
        stage = Stage()
        stage.arrive("a", 1.0)
        stage.arrive("b", 2.0)
        assert (stage.story("b").stage, stage.whats("b")) == ("waiting", ["queued"])
        stage.feed(Ended("a"), 3.0)
        assert stage.cause("b") == "the end of request a, on e0"

    def test_the_end_of_an_engines_step(self) -> None:
        stage = Stage()
        stage.feed(EngineUp("e0", make_limits(token_budget=100)))
        stage.arrive("a", 1.0, prompt_tokens=400)
        stage.arrive("b", 1.001, prompt_tokens=10)
        stage.feed(TokensProduced("a"), 1.1)
        assert stage.cause("b") == "the end of a step of e0, told by a token of request a"

    def test_an_engine_that_turns_another_away(self) -> None:
        stage = Stage("e0", "e1")
        stage.arrive("a", 1.0)
        stage.feed(NotStarted("a", 1.0), 2.0)
        assert stage.cause("a") == "e0 turning it away"
        assert stage.whats("a") == ["queued", "dispatched", "turned away by the engine", "dispatched"]
        assert stage.story("a").engine_id == "e1"

    def test_the_timer_after_a_back_off(self) -> None:
        stage = Stage()
        stage.arrive("a", 1.0)
        stage.feed(NotStarted("a", 1.0), 2.0)
        assert stage.story("a").stage == "waiting"
        stage.feed(None, 3.0)
        assert str(stage.cause("a")).startswith("the timer")
        assert stage.story("a").stage == "waiting for its first token"

    def test_an_engine_that_comes_up_or_goes_down(self) -> None:
        stage = Stage("e0")
        stage.arrive("a", 1.0)
        stage.arrive("b", 1.0)
        stage.feed(EngineUp("e1", make_limits()), 2.0)
        assert str(stage.cause("b")).startswith("e1 coming up")
        stage.feed(EngineUp("e1", make_limits(max_num_seqs=1)))
        stage.arrive("c", 3.0)
        for engine in ("e0", "e1"):
            stage.feed(EngineDown(engine), 4.0)
        assert stage.whats("c") == ["queued", "refused: no_engine"]
        assert stage.cause("c") == "e1 going down"

    def test_a_drain(self) -> None:
        stage = Stage()
        stage.arrive("a", 1.0)
        stage.arrive("b", 1.0)
        stage.feed(DrainStarted(), 2.0)
        assert (stage.whats("b")[-1], stage.cause("b")) == ("refused: draining", "the drain of the proxy")

    def test_slices(self) -> None:
        stage = Stage(tiles=TileConfig())
        stage.feed(EngineUp("e0", make_limits(token_budget=2048, caches_prefixes=True)))
        stage.arrive("a", 1.0, 50)
        stage.feed(TokensProduced("a"), 1.03)
        stage.arrive("b", 1.04, 6000, sliceable=True)
        stage.feed(None, 1.06)  # by then it goes, if nobody shorter has come
        sent = stage.story("b").moments[-1]
        assert (sent.what, sent.engine_id) == ("slice sent", "e0")
        assert sent.tokens
        assert stage.story("b").stage == "waiting"
        stage.feed(SliceEnded(Slice("b", "e0", sent.tokens, 0, 0)), 1.07)
        assert "slice cached" in stage.whats("b")

    def test_a_prompt_that_is_tokenized_while_it_waits(self) -> None:
        stage = Stage()
        stage.arrive("a", 1.0)
        stage.arrive("b", 1.0)
        stage.feed(Tokenized("b", 77), 2.0)
        assert stage.whats("b") == ["queued", "tokenized"]
        assert stage.story("b").prompt_tokens == 77


def test_a_story_in_terms_of_json_counts_from_the_arrival() -> None:
    stage = Stage()
    stage.arrive("a", 10.0)
    stage.feed(Arrived(make_request("b", 30, model="m"), 10.25), 10.5)
    stage.feed(Ended("a"), 12.0)
    told = stage.story("b").tell(12.5)
    assert (told["class"], told["model"], told["prompt_tokens"], told["engine"]) == ("relaxed", "m", 30, "e0")
    assert told["stage"] == "waiting for its first token"
    assert told["age_seconds"] == 2.25
    assert told["stage_seconds"] == {"body": 0.25, "queue": 1.5, "engine": 0.5}
    assert told["moments"] == [
        {"seconds": 0.25, "what": "queued"},
        {"seconds": 1.75, "what": "dispatched", "engine": "e0", "cause": "the end of request a, on e0"},
    ]


def report_of(number: str, client_id: str = "x") -> RequestReport:
    return RequestReport(number, client_id, "chat", 10.0, RELAXED)


class TestReports:
    def test_from_the_first_byte_to_the_outcome(self) -> None:
        stage = Stage()
        report = report_of("0", "mine")
        stage.chronicle.begin(report)
        assert stage.story("mine").stage == "being read"
        stage.feed(Arrived(make_request("0"), 10.0), 10.5)
        report.times.on_read(11.0, 1)
        assert stage.story("mine").stage == "streaming"
        report.times.on_read(11.5, 3)
        assert stage.story("mine").tell(11.5)["tokens"] == 4
        stage.feed(Ended("0"), 12.0)
        report.outcome, report.ended_at = Outcome.COMPLETED, 12.0
        stage.chronicle.finish(report)
        told = stage.story("mine").tell(100.0)
        assert (told["stage"], told["outcome"], told["request_id"]) == ("ended", "completed", "0")
        assert (told["tokens"], told["tbt_max_seconds"]) == (4, 0.5)
        assert told["stage_seconds"] == {"body": 0.5, "queue": 0.0, "first_token": 0.5, "stream": 1.0}
        assert (told["age_seconds"], told["ended_seconds_ago"]) == (2.0, 88.0)

    def test_an_answer_without_a_first_token_has_been_at_its_engine(self) -> None:
        stage = Stage()
        report = report_of("0", "mine")
        stage.chronicle.begin(report)
        stage.feed(Arrived(make_request("0"), 10.0), 10.5)
        assert stage.story("mine").tell(11.0)["stage_seconds"] == {"body": 0.5, "queue": 0.0, "first_token": 0.5}
        stage.feed(Ended("0"), 12.0)
        report.outcome, report.ended_at = Outcome.COMPLETED, 12.0
        stage.chronicle.finish(report)
        assert stage.story("mine").tell(100.0)["stage_seconds"] == {"body": 0.5, "queue": 0.0, "engine": 1.5}

    def test_a_ttft_is_missed_as_soon_as_it_is_past_being_kept(self) -> None:
        report = RequestReport("0", "x", "chat", 10.0, RequestClass("c", ttft_seconds=1.0), stream=True)
        story = Story("0", "x", 10.0, report=report)
        assert [story.tell(now)["missed"] for now in (10.9, 11.1)] == [[], ["ttft"]]
        report.stream = False  # nobody can see the first token of such an answer
        assert story.tell(11.1)["missed"] == []

    def test_a_request_that_never_reached_the_scheduler(self) -> None:
        chronicle = Chronicle()
        report = report_of("0")
        chronicle.begin(report)
        chronicle.observe(Ended("0"), [], 11.0)
        report.outcome, report.reason, report.ended_at = Outcome.REJECTED, "bad_request", 11.0
        chronicle.finish(report)
        story = chronicle.find("x")
        assert story is not None
        assert (story.stage, story.tell(12.0)["reason"]) == ("ended", "bad_request")

    def test_of_a_repeated_id_the_latest_is_found_and_each_by_its_number(self) -> None:
        chronicle = Chronicle()
        for number in ("0", "1"):
            chronicle.begin(report_of(number))
        latest, first = chronicle.find("x"), chronicle.find("0")
        assert latest is not None
        assert first is not None
        assert (latest.request_id, first.request_id) == ("1", "0")

    def test_a_client_cannot_take_the_number_of_another(self) -> None:
        chronicle = Chronicle()
        chronicle.begin(report_of("0", "victim"))
        chronicle.begin(report_of("1", "0"))
        found = chronicle.find("0")
        assert found is not None
        assert found.client_id == "victim"

    def test_an_unknown_one(self) -> None:
        assert Chronicle().find("x") is None
        assert Chronicle().find("") is None


class TestBounds:
    def test_of_ended_requests_the_last_are_kept(self) -> None:
        stage = Stage(kept=3)
        stage.arrive("running")
        for number in range(10):
            report = report_of(str(number), f"c{number % 5}")
            stage.chronicle.begin(report)
            stage.arrive(str(number))
            stage.feed(Ended(str(number)))
            stage.chronicle.finish(report)
        assert len(stage.chronicle) == 4
        assert len(stage.chronicle._latest) == 3
        assert [stage.chronicle.find(str(n)) is not None for n in range(10)] == [False] * 7 + [True] * 3
        assert stage.story("running").stage == "waiting for its first token"

    def test_nothing_of_a_stream_but_figures_is_kept(self) -> None:
        stage = Stage()
        report = report_of("0")
        stage.chronicle.begin(report)
        stage.chronicle.finish(report)
        assert stage.story("0").report is None

    def test_moments_of_one_request(self) -> None:
        stage = Stage("e0", "e1")
        stage.arrive("a")
        for number in range(1000):
            stage.feed(NotStarted("a", 0.5), 1.0 + number)
        assert len(stage.story("a").moments) == MOST_MOMENTS

    def test_the_name_of_a_model(self) -> None:
        stage = Stage()
        stage.arrive("a", model="x" * 1_000_000)
        assert len(stage.story("a").model or "") < 1000
