"""``slai-proxy calibrate``: the fit on steps made up, and the whole on simulated engines over HTTP."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.sim.calibrate import CalibrationError, Observation, _chunks, fit, measure, predict
from proxy.sim.engine import EngineConfig
from proxy.sim.http.app import start_engines, stop_engines
from proxy.sim.profiles import PROFILES, StepModel, find_profile


def observations_of(model: StepModel, overhead: float = 0.004) -> list[Observation]:
    prompts = [_chunks(n, 512) for n in (32, 64, 128, 256, 512, 1024, 2048, 4096)]
    streams = [((0, n, n * (c + 24.0), 0.0),) for n in (1, 2, 4, 8, 16, 32, 64) for c in (32, 512, 2048)]
    both = [((504, 8, 800.0, 504 * (i * 504 + 252.0)),) for i in range(1, 4)]
    made = []
    for kind, several in (("prompt", prompts), ("streams", streams), ("both", both)):
        for steps in several:
            bare = Observation(kind, 1.0, steps)
            more = overhead if kind == "prompt" else 0.0
            made.append(Observation(kind, predict(model, bare) + more, steps, with_overhead=kind == "prompt"))
    return made


@pytest.mark.parametrize("name", list(PROFILES))
def test_a_profile_is_found_again_from_its_own_steps(name: str) -> None:
    model = PROFILES[name].step
    found = fit(observations_of(model))
    assert found.r2 > 0.999
    assert all(e["p90"] < 0.02 for e in found.errors.values())
    for steps in (((512, 0, 0.0, 1e5),), ((400, 60, 150_000.0, 4e5),), ((0, 100, 200_000.0, 0.0),)):
        new = Observation("", 1.0, steps)
        assert predict(found.step, new) == pytest.approx(predict(model, new), rel=0.06)


def test_noise_and_outliers_do_little() -> None:
    model, rng = PROFILES["a100"].step, random.Random(1)
    noisy = [
        replace(o, seconds=o.seconds * rng.uniform(0.97, 1.03) * (3 if rng.random() < 0.05 else 1))
        for o in observations_of(model)
    ]
    new = Observation("", 1.0, ((400, 60, 150_000.0, 4e5),))
    assert predict(fit(noisy).step, new) == pytest.approx(predict(model, new), rel=0.1)


def test_too_little_is_told() -> None:
    with pytest.raises(CalibrationError, match="too few"):
        fit(observations_of(PROFILES["a100"].step)[:4])


async def test_a_simulated_engine_is_measured_over_http() -> None:
    config = EngineConfig(PROFILES["rtx6000ada"], 512, 16)
    engines = await start_engines([0], config, model="simulated", speed=8.0)
    told: list[str] = []
    try:
        facts, observations = await measure(
            engines[0].url, token_budget=512, max_num_seqs=4, repeats=1, tell=told.append
        )
    finally:
        await stop_engines(engines)
    assert facts.kv_tokens == 235_728
    assert {o.kind for o in observations} == {"prompt", "streams", "both"}
    assert len(told) > 10
    prompt = next(o for o in observations if o.kind == "prompt" and o.steps[0][0] == 512)
    expected = predict(config.profile.step, prompt) / 8
    assert expected < prompt.seconds < 3 * expected + 0.05


def test_an_engine_that_does_not_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["calibrate", "--engine", "http://127.0.0.1:9", "--out", str(tmp_path / "p.json")]) == 1
    assert "does not answer like an OpenAI server" in capsys.readouterr().err


def test_without_scipy_nothing_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.sim.calibrate_command.find_spec", lambda _: None)
    assert main(["calibrate", "--engine", "http://127.0.0.1:9"]) == 1
    assert (
        capsys.readouterr().err.strip()
        == "slai-proxy calibrate: calibration needs scipy: pip install scipy (the extra 'analysis')"
    )


def test_the_command_writes_a_profile_that_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from proxy.sim.calibrate import EngineFacts

    async def measured(url: str, **_: object) -> tuple[EngineFacts, list[Observation]]:
        return EngineFacts("m", 8192, None), observations_of(PROFILES["h100"].step)

    monkeypatch.setattr("proxy.sim.calibrate_command.measure", measured)
    file = tmp_path / "mine.json"
    argv = ["calibrate", "--engine", "http://x", "--out", str(file)]
    assert main(argv) == 2
    assert "give --kv-tokens" in capsys.readouterr().err
    assert main([*argv, "--kv-tokens", "100000"]) == 0
    assert "fit: R2 " in capsys.readouterr().out
    assert find_profile(str(file)).kv_tokens == 100_000
    assert json.loads(file.read_text())["fit"]["r2"] > 0.99
