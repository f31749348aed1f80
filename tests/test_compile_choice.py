"""compile=auto: what was measured on this card decides, once for a run; others cannot change compiled code."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import new_run, train
from trainyard.errors import UserError
from trainyard.hardware import explain_missing_compiler
from trainyard.launch.compile_choice import (
    CACHE_VARIABLES,
    Setup,
    choose_cache,
    decide_compile,
    find_results,
    keep_compile,
    plan_length,
)
from trainyard.runs.folder import read_env
from trainyard.settings import TrainConfig

SETUP = Setup("NVIDIA A100-SXM4-80GB", "2.13.0+cu130", "fingerprint", "bf16", channels_last=True, deterministic=True)
LONG = {"samples": 1e9, "minutes": 0.0}


def write_results(path: Path, *measured: dict[str, object], setup: Setup = SETUP, date: str = "2026-11-22") -> Path:
    """Write a result file of trainyard gpu-check, with a line for each comparison of eager with compiled steps."""
    figures = {"preset": "fingerprint", "samples_per_s_eager": 100.0, "spread_eager": 0.02, "spread_compiled": 0.03}
    figures |= {"samples_per_s_compiled": 150.0, "quotable": True, "compile_startup_s": 60.0}
    lines = [{"suite": "gpu-check", "date": date}, {"step": "environment", "check": "kernels", "status": "ok"}]
    lines += [{"step": "speed", "status": "ok", **setup._asdict(), **figures, **fields} for fields in measured]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def decide(*paths: Path, setup: Setup = SETUP, preset: str = "fingerprint", **length: float) -> tuple[bool, str]:
    return decide_compile(paths, setup, preset=preset, **{**LONG, **length})  # type: ignore[arg-type]


def test_without_a_measurement_nothing_is_compiled_and_the_reason_says_what_to_type():
    assert decide() == (False, "not measured on this card: trainyard gpu-check")
    assert decide(setup=SETUP._replace(card="cpu")) == (False, "not measured on the CPU; compile=on tries it")


@pytest.mark.parametrize(
    ("fields", "compiles", "said"),
    [
        ({}, True, "100 samples/s eager (+-2%), 150 compiled (+-3%)"),
        ({"samples_per_s_compiled": 105.2}, True, "105.2 compiled"),  # 105.2 * 0.97 = 102.04 > 102
        ({"samples_per_s_compiled": 105.1}, False, "not faster by more than the spread"),  # 101.9
        ({"samples_per_s_compiled": 90.0}, False, "not faster by more than the spread"),
        ({"quotable": False}, False, "repeat it: trainyard gpu-check"),
    ],
)
def test_a_run_compiles_where_that_was_faster_by_more_than_the_spread(fields, compiles, said, tmp_path):
    chosen, reason = decide(write_results(tmp_path / "gpu-a.jsonl", fields))
    assert chosen == compiles
    assert said in reason


@pytest.mark.parametrize(
    ("length", "compiles"),
    [
        ({"samples": 18001}, True),  # 180.01 s eager, 120.01 s compiled
        ({"samples": 18000}, False),
        ({"samples": None, "minutes": 3.01}, True),
        ({"samples": None, "minutes": 2.99}, False),
    ],
)
def test_a_run_too_short_to_gain_what_compiling_takes_does_not_compile(length, compiles, tmp_path):
    chosen, reason = decide(write_results(tmp_path / "gpu-a.jsonl", {}), **length)
    assert chosen == compiles
    assert "compiling takes 60 s" in reason


def test_the_length_of_a_run_is_what_each_rank_trains_on():
    config = TrainConfig(max_duration="3ep", global_batch_size=10)
    assert plan_length(config, samples=95, world_size=4) == {"samples": 75.0, "minutes": 0.0}
    assert plan_length(replace(config, max_duration="2min"), samples=95, world_size=4)["minutes"] == 2


@pytest.mark.parametrize(
    "other",
    [
        *({"card": "NVIDIA H100"}, {"torch": "2.7.1"}, {"family": "twins"}, {"precision": "fp16"}),
        *({"channels_last": False}, {"deterministic": False}),
    ],
)
def test_a_measurement_of_something_else_does_not_count(other, tmp_path):
    results = write_results(tmp_path / "gpu-a.jsonl", {})
    assert decide(results)[0]
    assert decide(results, setup=SETUP._replace(**other)) == decide(setup=SETUP._replace(**other))


def test_the_newest_measurement_of_the_same_preset_counts_then_that_of_its_family(tmp_path):
    big, slower = {"preset": "fingerprint_1m", "samples_per_s_compiled": 200.0}, {"samples_per_s_compiled": 50.0}
    newer = write_results(tmp_path / "gpu-a-2.jsonl", slower, date="2026-11-22T10")
    older = write_results(tmp_path / "gpu-a.jsonl", big, {}, date="2026-11-21T10")
    assert not decide(newer, older)[0]
    assert "measured fingerprint_1m on this card" in decide(newer, older, preset="fingerprint_1m")[1]
    assert not decide(newer, older, preset="fingerprint_other")[0]


def test_measurements_are_read_where_gpu_check_writes_them_and_from_the_checkout(tmp_path, monkeypatch):
    here, checkout = tmp_path / "here", tmp_path / "checkout"
    here.mkdir()
    monkeypatch.chdir(here)
    code = checkout / "src" / "trainyard"
    assert find_results(code) == []
    written = [write_results(place / "benchmarks" / "gpu-a.jsonl", {}) for place in (here, checkout)]
    write_results(here / "benchmarks" / "read-2026.jsonl", {})
    assert find_results(code) == written
    monkeypatch.chdir(checkout)
    assert find_results(code) == written[1:]


@pytest.mark.parametrize("bad", ['{"suite": "gpu-check"', "[]", '{"samples_per_s_compiled": 3}'])
def test_a_damaged_result_is_named_with_what_to_type(bad, tmp_path):
    path = write_results(tmp_path / "gpu-a.jsonl")
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(UserError, match=r"gpu-a.jsonl:3: expected .* compile=off.*: mv "):
        decide(path)
    path = write_results(tmp_path / "gpu-b.jsonl", {"samples_per_s_eager": 0})
    with pytest.raises(UserError, match="a rate is 0"):
        decide(path)


def test_a_run_keeps_what_it_chose_on_a_card_and_chooses_again_on_another():
    env = {"exactness": {"compiled_by_card": {"A100": True, "T4": False}}}
    assert [keep_compile(env, card) for card in ("A100", "T4", "H100")] == [True, False, None]
    assert keep_compile({}, "A100") is None
    of_an_earlier_version = {"choices": {"compile": {"value": False, "reason": "not measured"}}}
    assert keep_compile(of_an_earlier_version, "A100") is False


@pytest.mark.slow
def test_a_run_on_the_cpu_decides_by_a_measurement_and_a_resume_keeps_the_decision(tmp_path, monkeypatch):
    """The decision is negative, because the run is short: compiling for real takes a minute."""
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path, "max_duration=1st")
    setup = Setup("cpu", torch.__version__, "stripes", "fp32", channels_last=False, deterministic=True)
    for layout in (True, False):  # the CPU's default is the kind of thing that changes
        results = write_results(
            tmp_path / f"benchmarks/gpu-{layout}.jsonl", {}, setup=setup._replace(channels_last=layout)
        )
    assert train(run) == 0
    choice = read_env(run)["choices"]["compile"]
    assert choice["value"] is False
    assert "measured fingerprint on this card" in choice["reason"] and "compiling takes 60 s" in choice["reason"]
    results.write_text("damaged")  # nobody reads it again
    assert train(run) == 0
    kept = read_env(run)["choices"]["compile"]
    assert kept == {"value": False, "reason": "as when this run began on this card: compiled steps have other bits"}
    assert list(read_env(run)["exactness"]["compiled_by_card"].values()) == [False]


@pytest.mark.parametrize(("sm", "names", "variable"), [(None, ["g++"], "CXX"), (80, ["gcc", "clang"], "CC")])
def test_a_machine_that_cannot_compile_says_so_in_one_sentence(sm, names, variable, tmp_path):
    headers, programs = tmp_path / "include", tmp_path / "bin"
    headers.mkdir()
    programs.mkdir()
    environ = {"PATH": str(programs)}
    assert all(name in str(explain_missing_compiler(sm, environ, headers=headers)) for name in names)
    for name in (*names, "mine"):
        (programs / name).touch(mode=0o755)
    assert "Python.h" in str(explain_missing_compiler(sm, environ, headers=headers))
    (headers / "Python.h").touch()
    assert explain_missing_compiler(sm, environ, headers=headers) is None
    assert explain_missing_compiler(sm, environ | {variable: "mine"}, headers=headers) is None
    assert "absent" in str(explain_missing_compiler(sm, environ | {variable: "absent"}, headers=headers))


# Where compiled code is kept


def choose(
    environ: dict[str, str], *, card: str | None = "A100", torch_version: str = "2.13.0", attempt: str = "987654321-0"
):
    return choose_cache(environ, card=card, torch_version=torch_version, attempt=attempt)


def test_compiled_code_is_kept_on_scratch_in_a_folder_of_this_user_for_this_card_and_torch(tmp_path):
    environ = {"TRAINYARD_SCRATCH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder, reason = choose(environ)
    assert folder.parent == tmp_path / f"trainyard-{os.getuid()}" / "compiled"
    assert "TRAINYARD_SCRATCH" in reason
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (folder, folder.parent, folder.parent.parent))
    assert choose(environ, attempt="987654322-1")[0] == folder
    others = [choose(environ, **other)[0] for other in ({"card": "H100"}, {"card": None}, {"torch_version": "2.7.1"})]
    assert len({folder, *others}) == 4


def test_without_a_lasting_scratch_compiled_code_is_kept_in_the_users_cache(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    own, longer = tmp_path / "987654321", tmp_path / "9876543210"
    own.mkdir()
    longer.mkdir()
    for scratch, attempt, why in [
        (None, "987654321-0", "no TRAINYARD_SCRATCH"),
        ("relative", "987654321-0", "not a folder here"),
        (str(tmp_path / "absent"), "987654321-0", "not a folder here"),
        (str(own), "987654321-1", "ends with this Slurm job"),
    ]:
        folder, reason = choose(
            environ if scratch is None else environ | {"TRAINYARD_SCRATCH": scratch}, attempt=attempt
        )
        assert folder.parent == tmp_path / "cache" / "trainyard" / "compiled"
        assert why in reason
    for attempt in ("987654321-0", "local-5"):
        folder, _ = choose(environ | {"TRAINYARD_SCRATCH": str(longer)}, attempt=attempt)
        assert folder.is_relative_to(longer)


@pytest.mark.parametrize("place", ["", "compiled", "stated"])
def test_a_folder_that_others_can_write_to_is_refused_because_its_content_is_executed(place, tmp_path):
    environ = {"TRAINYARD_SCRATCH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = choose(environ)[0]
    if place == "stated":
        environ[CACHE_VARIABLES[0]] = str(folder)
        assert choose(environ) == (folder, "TORCHINDUCTOR_CACHE_DIR in the environment")
    shared = folder.parent if place == "compiled" else folder
    shared.chmod(0o770)
    with pytest.raises(UserError, match=f"{shared} is not a folder that only this user can write to"):
        choose(environ)
    shared.rmdir() if place != "compiled" else None
    if place == "":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="only this user"):
            choose(environ)
