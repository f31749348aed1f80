"""Files of a run folder or bundle that a stranger made: none is read, executed or shown, and each gets one sentence."""

import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loguru import logger

from tests.training import FAMILIES
from tests.waiting import fail_after
from trainyard.cli import main
from trainyard.config import compose as configs
from trainyard.errors import UserError
from trainyard.report.run_page import write_report
from trainyard.runs.changes import find_changes
from trainyard.runs.create import Origin, create_run
from trainyard.runs.folder import read_env, write_env
from trainyard.runs.lock import RunLock
from trainyard.runs.manifest import CheckpointError, list_checkpoints
from trainyard.terminal import make_log_printable, say
from trainyard.train import checkpoint

SECRET = "hunter2-of-the-victim"
JOBS = ["--jobs", str(FAMILIES)]


@pytest.fixture(scope="module")
def gift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a checkpoint, metrics and events."""
    root = tmp_path_factory.mktemp("gift")
    run = create_run(
        root / "runs", configs.compose("stripes", [], FAMILIES), name="gift", origin=Origin.collect(code=root)
    )
    checkpoint.save(run / "checkpoints", {"model": {"w": torch.arange(300.0)}}, step=1, meta={})
    write_lines(run / "metrics.jsonl", {"kind": "train", "step": 1, "loss": 1.0, "elapsed_s": 1.0})
    time = {"time": "2026-01-02T03:04:05+00:00"}
    write_lines(run / "events.jsonl", {"kind": "event", "step": 0, "event": "start", "attempt": "local-1", **time})
    return run


@pytest.fixture
def run(gift: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(gift, tmp_path / "runs" / "stripes" / "gift"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the victim, outside the run folder, that parses as anything."""
    path = tmp_path / "victim" / "secret"
    path.parent.mkdir()
    path.write_text(json.dumps({"created": SECRET, "family": SECRET, "job": SECRET}) + "\n")
    return path


def write_lines(path: Path, *lines: object) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# Checkpoints


def seal(path: Path) -> None:
    """Make the manifest match the data file, as its author can."""
    data = path.read_bytes()
    manifest = {"format": 1, "step": 1, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "meta": {}}
    path.with_suffix(".json").write_text(json.dumps(manifest | {"self_sha256": checkpoint.hash_fields(manifest)}))


def rewrite(path: Path, change: Callable[[str, bytes], bytes], *, compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive again with changed records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


def inflate(path: Path) -> None:
    """A zip bomb: 64 MiB of zeros in 64 KiB."""
    zeros = bytes(2**26)
    rewrite(path, lambda name, data: zeros if name.endswith("/data/0") else data, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**18


def declare_more(path: Path) -> None:
    """A tensor of 65,535 numbers with a record of 300: torch would read the memory behind it."""
    count = b"M" + (300).to_bytes(2, "little")
    rewrite(path, lambda name, data: data.replace(count, b"M\xff\xff") if name.endswith("/data.pkl") else data)


def repeat(path: Path) -> None:
    """A tensor of four bytes that declares to be repeated to 4 TB."""
    torch.save({"model": {"w": torch.zeros(1).expand(2**40)}}, path)


def nest(path: Path) -> None:
    """A list that contains itself."""
    inner: list[object] = []
    inner.append(inner)
    torch.save({"model": inner, "size": torch.Size([1])}, path)


@pytest.mark.parametrize(
    ("craft", "found"),
    [
        (inflate, "its records are compressed, which torch.save never does"),
        (declare_more, "a tensor declares 262140 bytes, but its record has 1200"),
        (repeat, "a tensor of shape (1099511627776,) repeats very few data"),
        (nest, "it holds a Size"),
        (lambda path: torch.save([1], path), "it holds a list, not a dict"),
        (lambda path: torch.save({"x": torch.zeros(2, device="meta")}, path), "refused"),
        (lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18)), "it is not the zip archive that torch.save writes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it is not the zip archive that torch.save writes"),
    ],
)
def test_a_checkpoint_that_declares_what_it_has_not_is_refused(run, craft, found):
    path = run / "checkpoints" / "step-000000001.ckpt"
    craft(path)
    seal(path)
    assert checkpoint.verify(list_checkpoints(run / "checkpoints")[0]) is None
    for read in (lambda: checkpoint.load(path), lambda: checkpoint.load_newest_valid(path.parent)):
        with pytest.raises(CheckpointError) as raised:
            read()
        assert found in str(raised.value) and "\n" not in str(raised.value)


def test_links_and_pipes_among_checkpoints_are_not_opened(run, secret):
    data = run / "checkpoints" / "step-000000001.ckpt"
    manifest = data.with_suffix(".json")
    for path, kind in ((data, "link"), (manifest, "link"), (data, "pipe"), (manifest, "pipe")):
        content = path.read_bytes()
        path.unlink()
        if kind == "link":
            shutil.copy(secret, other := secret.with_name("copy"))
            other.write_bytes(content)  # what it points to is right, and still not of this folder
            path.symlink_to(other)
        else:
            os.mkfifo(path)
        problem = checkpoint.verify(list_checkpoints(run / "checkpoints")[0]) or ""
        assert f"{path.name} cannot be read: it is " in problem or "bytes, the manifest says" in problem, problem
        path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, " " * (17 * 2**20), "9" * 5000, "\x00"])
def test_a_manifest_of_absurd_size_or_depth_is_a_damaged_one(run, text):
    (run / "checkpoints" / "step-000000001.json").write_text(text)
    problem = list_checkpoints(run / "checkpoints")[0].problem
    assert problem is not None and re.match(r"the manifest is damaged|step-000000001.json cannot be read", problem)
    assert len(problem) < 200


# Run folders

LETTERS = "abcdefghijklmnop"
BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise(LETTERS))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (BOMB, "has an anchor, and a run's options are plain values"),
        ("seed: !!python/object/apply:os.mkdir [PROOF]", "has a tag"),
        ("seed: !!int 5", "has a tag"),
        ("warm_start: ${oc.env:TRAINYARD_SECRET}", "has a reference to other values"),
        ("_target_: os.mkdir", "there is no option '_target_'"),
        ("optimizer: {_target_: os.mkdir}", "there is no option 'optimizer._target_'"),
        ("a: " + "[" * 5000, "not YAML: nested too deeply"),
        ("# " + "x" * 2**20, "larger than 1048576 bytes"),
        ("family: ../../victim", "is not the name of a family"),
        ("seed: 1\nseed: 2", "not YAML: found duplicate key seed"),
    ],
)
def test_options_that_do_something_are_refused(run, monkeypatch, capsys, tmp_path, line, found):
    monkeypatch.setenv("TRAINYARD_SECRET", SECRET)
    text = "family: stripes\njob: stripes\n" if not line.startswith("family") else ""
    (run / "config.yaml").write_text(text + line.replace("PROOF", str(tmp_path / "proof")) + "\n")
    with pytest.raises(UserError) as raised:
        configs.load_config(run / "config.yaml", FAMILIES)
    assert found in str(raised.value) and "\n" not in str(raised.value) and SECRET not in str(raised.value)
    assert main(["resume", str(run), *JOBS]) == 2
    output = capsys.readouterr()
    assert SECRET not in output.err + output.out and not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "metrics.jsonl", "events.jsonl"])
def test_a_link_to_the_victims_file_is_not_shown(run, secret, capsys, name):
    (run / name).unlink()
    (run / name).symlink_to(secret)
    for words in (["report"], ["why"], ["status"], ["resume", *JOBS], ["runs", "--runs", str(run.parents[1])]):
        main([words[0], *([] if words[0] == "runs" else [str(run)]), *words[1:]])
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err and "it is a link" in shown.err
    assert not any(SECRET in path.read_text() for path in run.glob("report.html"))


def test_a_report_embeds_only_images_of_the_run(run, secret):
    (run / "figures").mkdir()
    (run / "figures" / "a.png").symlink_to(secret)
    (run / "figures" / "b.png").write_bytes(secret.read_bytes())
    page = write_report(run).read_text()
    assert "a.png" not in page and 'alt="a"' not in page and 'alt="b"' not in page


@pytest.mark.parametrize("linked", ["evaluations", "evaluations/one", "evaluations/one/figures", "figures", "samples"])
def test_a_report_shows_evaluations_and_figures_but_follows_no_link_to_them(run, tmp_path, linked):
    elsewhere = tmp_path / "elsewhere"
    for folder in ("one/figures", "one", "figures", "."):
        (elsewhere / folder).mkdir(parents=True, exist_ok=True)
        (elsewhere / folder / "leaked.png").write_bytes(b"\x89PNG")
        (elsewhere / folder / "evaluation.json").write_text('{"format": 1, "folder": "leaked"}')
    (run / linked).parent.mkdir(parents=True, exist_ok=True)
    if linked.endswith("figures"):
        (run / linked).with_name("evaluation.json").write_text('{"format": 1}')
    (run / linked).symlink_to(elsewhere)
    assert "leaked" not in write_report(run).read_text()
    (run / linked).unlink()
    shutil.copytree(elsewhere, run / linked)
    assert "leaked" in write_report(run).read_text(), "it is shown where it is the run's own"


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "train", "step": 10**300, "loss": 1.0},
        {"kind": "train", "step": -1, "loss": 1.0},
        {"kind": "train", "step": True, "loss": 1.0},
        {"kind": "train", "step": 1, "loss": "x"},
        {"kind": "train", "step": 1, "loss": 1.0, "samples_per_s": [1]},
        {"kind": "train", "step": 1, "loss": None, "nonfinite": {"loss": "__import__('os')"}},
        {"kind": "train", "step": 1, "loss": None, "nonfinite": ["loss"]},
        {"kind": "train", "step": 1, "loss": math.nan},
        {"kind": "train", "step": 1, "loss": 1.0, "samples_per_s": math.inf},
        {"kind": "eval", "step": 1, "accuracy": 0.5},
        {"kind": "eval", "step": 1, "split": ["val"], "accuracy": 0.5},
        {"kind": "eval", "step": 1, "split": "val", "accuracy": 10**400},
        [["kind", "train"]],
    ],
)
def test_a_metrics_line_that_no_run_writes_is_one_sentence(run, capsys, line):
    write_lines(run / "metrics.jsonl", line)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"UserError: {run}/metrics.jsonl:1: expected ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("events.jsonl", {"kind": "event", "step": 10**40, "event": "start", "time": "2026-01-01T00:00:00+00:00"}),
        ("events.jsonl", {"kind": "event", "step": 1, "event": ["start"], "time": 5}),
        ("events.jsonl", {"kind": "event", "step": 1, "event": "start", "time": "0001-01-01T00:00:00"}),
        ("heartbeat.json", {"time": "now", "step": 1}),
        ("heartbeat.json", {"step": 1}),
        ("heartbeat.json", {"time": 1e300, "step": 1, "attempt": "local-1"}),
        ("heartbeat.json", {"time": 1.0, "step": {}, "samples_per_s": "fast"}),
        ("slurm/submission.json", {"scheduler": "slurm", "job": "1", "submitted": "soon", "gpus": "all"}),
        ("slurm/attempts.jsonl", {"event": "start", "job": "1", "attempt": 0, "time": 10**30}),
        ("errors/local-1-rank0.json", {"time": "late", "message": [1]}),
        ("env.json", {"created": 1, "choices": [1]}),
    ],
)
def test_one_strange_run_is_listed_and_the_others_too(run, tmp_path, capsys, name, content):
    shutil.copytree(run, run.with_name("mine"))
    (run / name).parent.mkdir(exist_ok=True)
    write_lines(run / name, content)
    assert main(["runs", "--runs", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    assert "stripes/mine" in output and "stripes/gift" in output
    assert str(run / name) in output or name.startswith("errors")
    main(["why", str(run)])


FILES = (
    *("config.yaml", "env.json", "metrics.jsonl", "events.jsonl", "heartbeat.json", "lock", "lock.guard", "log"),
    *(".lock.0123456789abcdef", "report.html", "plots", "figures", "samples", "checkpoints", "errors", "ranks"),
    *("checkpoints/step-000000001.ckpt", "checkpoints/step-000000001.json", "evaluations", "evaluations/one"),
    *("evaluations/one/evaluation.json", "errors/local-1-rank0.json", "ranks/local-1-rank0.json", "slurm"),
    *("slurm/submission.json", "slurm/attempts.jsonl", "slurm/cancelled", "code", "tensorboard"),
)


def make_odd(path: Path, kind: str) -> None:
    """Put something in the place of a file or a folder that no run puts there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {"empty": b"", "random": random.Random(3).randbytes(999), "nested": b"[" * 30_000, "long": b"9" * 5_000}
    if kind == "folder":
        (path / "inner").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "dangling link":
        path.symlink_to("/nowhere/at/all")
    else:
        path.write_bytes(contents[kind])


OTHERS = ("link to itself", "dangling link", "empty", "random", "nested", "long")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["folder", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("pipe", *OTHERS))]
)
def test_whatever_is_in_the_place_of_a_file_of_a_run_stops_no_command_and_hides_no_other_run(
    gift, tmp_path, capsys, kind
):
    """A command that waits for a pipe is interrupted by an alarm, which is an error here."""
    mine = Path(shutil.copytree(gift, tmp_path / "runs" / "stripes" / "mine"))
    runs = ["--runs", str(tmp_path / "runs")]
    for name in FILES:
        run = Path(shutil.copytree(gift, tmp_path / "runs" / "stripes" / "odd"))
        make_odd(run / name, kind)
        with fail_after(60):
            for words in (["runs", *runs], ["board", *runs], ["status", *runs]):
                assert main(words) == 0, (name, words)
                shown, pages = capsys.readouterr(), mine.parents[1].glob("*.html")
                assert "stripes/mine" in shown.out + "".join(page.read_text() for page in pages), (name, words)
            of_run = ("why", "report", "logs", "ckpt verify", "resume --here", "cancel")
            for words in (*([*words.split(), str(run)] for words in of_run), ["gc", *runs]):
                assert main([*words, *JOBS]) in (0, 1, 2), (name, words)
                assert "Traceback" not in capsys.readouterr().err, (name, words)
        shutil.rmtree(run)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to itself", "dangling link", "random"])
@pytest.mark.parametrize("name", ["lock", "lock.guard"])
def test_an_odd_lock_is_refused_with_a_line_that_removes_it(run, kind, name):
    make_odd(run / name, kind)
    if name == "lock.guard":
        make_odd(run / "lock", "random")
    if (name, kind) != ("lock.guard", "random"):
        with fail_after(60), pytest.raises(UserError) as raised, RunLock(run, break_other_host=name != "lock"):
            pass
        assert str(raised.value).startswith((f"{run}/{name}: is no", f"{run}/{name}: is a link"))
        subprocess.run(shlex.split(re.split("delete it: |away: |Remove it: ", str(raised.value))[-1]), check=True)
    with RunLock(run, break_other_host=True):
        assert json.loads((run / "lock").read_text())["pid"] == os.getpid()


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e<script>alert(1)</script>\x7f$\\frac{$"
"""A title, a cleared screen, red letters, an overwritten line, letters from right to left, HTML and broken TeX."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def evil_run(gift: Path, tmp_path: Path) -> Path:
    """A failed run of a stranger who wrote `EVIL` wherever a text goes."""
    run = Path(shutil.copytree(gift, tmp_path / "runs" / "stripes" / f"it{EVIL.replace('/', '')}"))
    options = configs.load_config(run / "config.yaml", FAMILIES)
    configs.save_config(replace(options, tracking=replace(options.tracking, project=EVIL)), run / "config.yaml")
    env = read_env(run)
    write_env(run, env | {"machine": {"host": EVIL, EVIL: EVIL}, "choices": {EVIL: {"value": EVIL, "reason": EVIL}}})
    time = {"time": "2026-01-02T03:04:05+00:00"}
    monitor = {"split": EVIL, "metric": EVIL, "mode": "max"}
    write_lines(
        run / "metrics.jsonl",
        {"kind": "train", "step": 1, "loss": 1.0, EVIL: 2.0, "samples_per_s": 1.0, "elapsed_s": 1.0},
        *({"kind": "eval", "step": step, "split": EVIL, EVIL: 0.5 + step / 9, "elapsed_s": 1.0} for step in (1, 2)),
    )
    write_lines(
        run / "events.jsonl",
        {"kind": "event", "step": 0, "event": "start", "attempt": "local-1", "host": EVIL, "monitor": monitor, **time},
        {"kind": "event", "step": 1, "event": EVIL, EVIL: EVIL, **time},
        {"kind": "event", "step": 2, "event": "failed", "reason": EVIL, **time},
    )
    (run / "errors").mkdir()
    error = {"time": 1e9, "rank": 0, "host": EVIL, "type": EVIL, "message": EVIL, "traceback": EVIL, "cause": EVIL}
    write_lines(run / "errors" / "local-1-rank0.json", error)
    write_lines(run / "heartbeat.json", {"time": 1e9, "phase": EVIL, "attempt": "local-1", "step": 1})
    (run / "log").write_text(f"{EVIL}\n")
    (run / "figures").mkdir()
    shutil.copy(Path(__file__).parents[1] / "docs" / "page.png", run / "figures" / f"{EVIL.replace('/', '')}.png")
    return run


def test_text_of_a_strangers_run_reaches_no_terminal_and_no_page_as_anything_but_text(evil_run, tmp_path, capsys):
    runs = ["--runs", str(tmp_path / "runs")]
    for words in (["runs", *runs], ["status", *runs], ["board", *runs], ["gc", *runs], ["cancel", str(evil_run)]):
        main([*words])
    for words in (
        ["why"],
        ["report"],
        ["logs"],
        ["status"],
        ["ckpt", "verify"],
        ["resume", *JOBS],
        ["evaluate", *JOBS],
    ):
        main([*words, str(evil_run), *(["nowhere"] if words[0] == "evaluate" else [])])
    main(["report", str(evil_run), str(evil_run), "--out", str(tmp_path / "both.html")])
    shown = capsys.readouterr()
    assert OBEYED.findall(shown.out + shown.err) == []
    assert "owned" in shown.out and "\\x1b]0;owned\\x07" in shown.out
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert len(pages) >= 2
    for page in pages:
        assert "<script" not in page and "owned" in page and OBEYED.findall(page) == []


def test_a_log_message_and_a_name_that_is_not_utf_8_are_printed_without_control_characters(capsys):
    say("a\x1b[31m\tb\n\x9b\u202ec", os.fsdecode(b"\xff"))
    assert capsys.readouterr().out == "a\\x1b[31m\tb\n\\x9b\\u202ec \\udcff\n"
    make_log_printable()
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}")
    logger.warning("{} says", "a\x1b[31m")
    logger.remove(sink)
    assert messages == ["a\\x1b[31m says\n"]


def test_a_run_of_this_test_is_not_strange_by_itself(run):
    assert find_changes(run) == []
    assert write_report(run).stat().st_size > 1000


# Bundles


def add_member(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content) if info.isreg() else None)


def seal_bundle(**fields: object) -> bytes:
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return json.dumps({**fields, "digest": digest}).encode()


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ([("data", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc"})], "'data' in it is a link"),
        ([("code", b"", {"type": tarfile.LNKTYPE, "linkname": "../victim/secret"})], "'code' in it is a link"),
        ([("../victim/new", b"x", {})], "'../victim/new' in it leads out of it"),
        ([("/tmp/trainyard-hostile", b"x", {})], "leads out of it"),
        ([("pipe", b"", {"type": tarfile.FIFOTYPE})], "'pipe' in it is a pipe"),
        ([("a", b"x", {}), ("a", b"y", {})], "'a' in it is there twice"),
        ([("manifest.json", seal_bundle(files=[1], image="x"), {})], "manifest.json was changed"),
        ([("manifest.json", seal_bundle(files={}, image="--privileged"), {})], "manifest.json was changed"),
        ([("manifest.json", b"[" * 100_000, {})], "manifest.json was changed"),
    ],
)
def test_a_bundle_with_strange_members_is_refused_and_nothing_is_written(tmp_path, secret, monkeypatch, members, found):
    bundle = tmp_path / "gift" / "bundle.tar"
    bundle.parent.mkdir()
    with tarfile.open(bundle, "w") as tar:
        for name, content, fields in members:
            add_member(tar, name, content, **fields)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "containers")
    from bundle import verify_bundle
    from engine import Mistake

    with pytest.raises(Mistake) as raised:
        verify_bundle(bundle, os.environ)
    assert found in str(raised.value) and "\n" not in str(raised.value)
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle.tar"]
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
