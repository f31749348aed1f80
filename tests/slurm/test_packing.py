"""Packing in a CPU job before the GPUs are requested, and runs that follow others, on a real Slurm."""

import shutil
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import (
    LAB_FILE,
    count_listings,
    make_starter,
    read_ends,
    read_last_step,
    read_lines,
    read_slurm_job_id,
    trainyard,
    wait,
    wait_for_end,
)
from tests.slurm.conftest import Lab
from tests.slurm.story import PAGE, Story
from tests.training import FAMILIES, find_differences, load_state, read_run_metrics
from trainyard.cli import main
from trainyard.config.families import load_family
from trainyard.runs import sweep_file
from trainyard.runs.folder import read_env, resolve_run
from trainyard.runs.history import read_run

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_the_lab")]

CPU_NODES = {"card": "cpu", "partition": "p100", "per_node": 2, "nodes": 2, "cores_per_gpu": 1, "memory_gib_per_gpu": 2}


class Site:
    """A folder with runs, a cache of data and a cluster file of the lab that describes CPU nodes."""

    def __init__(self, root: Path) -> None:
        self.runs, self.cache, self.file = root / "runs", root / "cache", root / "site.yaml"
        self.change()

    def change(self, **entries: object) -> None:
        """Write the cluster file again, with these entries."""
        content = yaml.safe_load(LAB_FILE.read_text())
        content["gpus"]["cpus"] = CPU_NODES
        self.file.write_text(yaml.safe_dump({**content, **entries}, sort_keys=False))

    def submit(self, name: str, *words: object) -> Path:
        return make_starter(self.runs, self.cache)(name, "--hw", "a100", *words, cluster=self.file)

    def list_words(self) -> list[object]:
        """Return the words that say where a command finds jobs, and where it puts runs and data."""
        return ["--jobs", FAMILIES, "--runs", self.runs, "--cluster", self.file, f"data.cache={self.cache}"]

    def refuse(self, *words: object) -> None:
        """Submit what must be refused."""
        assert trainyard("submit", "stripes", "--hw", "a100", *self.list_words(), *words) == 2


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def synthesize_stripes(raw: Path) -> Path:
    load_family(FAMILIES, "stripes", "pack").synthesize(raw, count=64, seed=0)
    return raw


def read_choice(run: Path) -> str:
    return str(read_env(run)["choices"]["packed_where"]["value"])


def test_raw_data_are_packed_in_a_cpu_job_and_the_training_waits_for_it(lab, site, capsys):
    site.change(data={"stripes": "synthetic"})
    run = site.submit("first", "max_duration=1ep")
    packing, training = read_run(run).slurm_job_ids
    printed = capsys.readouterr().out
    assert f"packing as Slurm job {packing}, then training as Slurm job {training}" in printed
    assert f"synthetic samples ({site.file}, data.stripes" in " ".join(printed.split())
    described = lab.run("scontrol", "show", "job", packing)
    assert "JobName=stripes-packing" in described and "gres" not in described and "NumCPUs=2 " in described
    assert f"Dependency=afterok:{packing}(unfulfilled)" in lab.run("scontrol", "show", "job", training)
    assert trainyard("status", run) == 0
    assert f"packing (Slurm job {packing}): " in (status := capsys.readouterr().out)
    assert f"-> training (Slurm job {training}) waits for it" in status and "next: trainyard logs -f" in status

    wait_for_end(lab, run)
    lines = read_lines(run / "slurm" / "attempts.jsonl")
    assert [(line["event"], line["job"], line.get("cause")) for line in lines] == [
        ("start", packing, None),
        ("end", packing, "done"),
        ("start", training, None),
        ("end", training, "done"),
    ]
    assert read_run(run).slurm_job_ids == [training]
    log = (run / "log").read_text()
    assert log.index("packed ") < log.index("all records are as they were packed") < log.index("step ")
    assert "Slurm job on p100: 2 cores, 30m" in read_choice(run)
    assert trainyard("why", run) == 0
    assert " packing " in (why := capsys.readouterr().out) and f"{packing}-0" in why

    site.change(sbatch={"hold": True})
    again = site.submit("again")
    assert read_run(again).slurm_job_ids == [read_slurm_job_id(again)] and read_choice(again) == "none"
    lab.run("scancel", read_slurm_job_id(again))


def test_submit_lists_each_folder_of_raw_files_once(lab, site, tmp_path):
    raw = tmp_path / "raw"
    load_family(Path("jobs"), "fingerprint", "pack").synthesize(raw, count=8, seed=0)
    (site.cache / "fingerprint-other").mkdir(parents=True)
    (site.cache / "fingerprint-other" / "index.h5").touch()
    site.change(sbatch={"hold": True})
    words = ["--hw", "a100", "--no-plan", *site.list_words(), "--jobs", "jobs", f"data.path={raw}"]
    with count_listings(raw) as listings:
        assert trainyard("submit", "fingerprint_smoke", *words, "--name", "once") == 0
    assert str(raw) in listings and len(listings) == len(set(listings))
    lab.run("scancel", *read_run(site.runs / "fingerprint_smoke" / "once").slurm_job_ids)


def test_packing_that_fails_cancels_the_training_and_both_commands_name_its_error(lab, site, tmp_path, capsys):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "d0-0001.png").write_text("not an image")
    run = site.submit("broken", f"data.path={raw}")
    packing, training = read_run(run).slurm_job_ids
    lab.wait_for(training, "CANCELLED")
    assert read_ends(run) == [(0, "user_error", "stop")]
    capsys.readouterr()
    said = "PackError: 1 of 1 raw samples cannot be read: d0-0001.png: "
    for verb in ("status", "why"):
        assert trainyard(verb, run) == 0
        printed = capsys.readouterr().out
        assert f"packing (Slurm job {packing}): {said}" in printed
    assert f"-> training (Slurm job {training}) does not start" in printed
    assert trainyard("logs", run) == 0
    assert "PackError: 1 of 1 raw samples cannot be read:" in capsys.readouterr().out

    site.change(sbatch={"hold": True})
    assert trainyard("resume", run, "--jobs", FAMILIES) == 0
    both = read_run(run).slurm_job_ids
    assert len(both) == 2 and not {packing, training} & set(both)
    capsys.readouterr()
    assert trainyard("cancel", run) == 0
    assert f"cancelled Slurm job {both[0]} and {both[1]}. Resume: trainyard resume" in capsys.readouterr().out
    for job in both:
        lab.wait_for(job, "CANCELLED")
    assert trainyard("status", run) == 0
    assert f"packing (Slurm job {both[0]}): cancelled" in capsys.readouterr().out


def test_one_packing_job_comes_before_a_sweep_and_ends_with_the_last_run_that_waits_for_it(lab, site, tmp_path, capsys):
    """All jobs are held, so that no rank starts."""
    site.change(sbatch={"hold": True})
    words = ["--hw", "a100", "--name", "s", "--sweep", "optimizer.lr=1e-2,3e-3,1e-3", "--max-parallel", 2]
    raw = synthesize_stripes(tmp_path / "raw")
    place = [f"data.path={raw}", *site.list_words()]
    assert trainyard("sweep", "stripes", *words, *place, "--dry") == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash")[1:]
    assert len(scripts) == 2
    assert "--job-name=stripes-packing" in scripts[0] and "--array" not in scripts[0]
    assert f"TRAINYARD_RUN={site.runs}/sweeps/s/stripes/packing\n" in scripts[0]
    assert "--dependency=afterok:PACKING\n" in scripts[1] and "--array=0-2%2" in scripts[1]
    assert not site.runs.exists()

    assert trainyard("sweep", "stripes", *words, *place, "--no-plan") == 0
    runs = [element.run for element in sweep_file.load("s", site.runs).elements]
    packing, training = read_run(runs[0]).slurm_job_ids
    assert [read_run(run).slurm_job_ids for run in runs] == [[packing, f"{training[:-1]}{i}"] for i in range(3)]
    printed = capsys.readouterr().out
    assert f"submitted  packing as Slurm job {packing}, then 3 runs as Slurm job {training[:-2]}\n" in printed
    assert "Slurm job on p100: 2 cores, 30m" in printed and read_choice(runs[2]).startswith("Slurm job on p100")
    assert f"Dependency=afterok:{packing}(unfulfilled)" in lab.run("scontrol", "show", "job", training[:-2])

    assert trainyard("cancel", runs[1]) == 0
    assert f"cancelled Slurm job {training[:-1]}1. " in capsys.readouterr().out
    assert trainyard("status", "s", "--runs", site.runs) == 0
    table = capsys.readouterr().out
    assert f"packing (Slurm job {packing}): held by its owner -> training (Slurm job {training}) waits for it" in table
    assert "cancelled" in table and lab.read_state(packing) == "PENDING"
    assert trainyard("resume", runs[1], "--jobs", FAMILIES) == 0
    own = read_run(runs[1]).slurm_job_ids
    assert len(own) == 2 and not {packing, training} & set(own), "it was not submitted with packing of its own"
    assert trainyard("cancel", "s", "--runs", site.runs) == 0
    for job in (packing, own[0]):
        lab.wait_for(job, "CANCELLED")

    differing = ["--sweep", "seed=0,1", "--hw", "a100", *site.list_words(), "--dry"]  # of synthetic samples
    capsys.readouterr()
    assert trainyard("sweep", "stripes", *differing) == 0
    printed = capsys.readouterr().out
    assert "in the run, on its first node  (the runs of this sweep do not all train on the same" in printed


@pytest.mark.long
def test_packing_that_fails_cancels_the_sweep_which_continues_once_the_data_are_right(lab, site, tmp_path, capsys):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "d0-0001.png").write_text("not an image")
    words = ["--hw", "a100", "--name", "s", "--sweep", "seed=0,1", "max_duration=1ep", "data.decode=cpu"]
    assert trainyard("sweep", "stripes", *words, f"data.path={raw}", *site.list_words(), "--no-plan") == 0
    runs = [element.run for element in sweep_file.load("s", site.runs).elements]
    packing, array = read_run(runs[0]).slurm_job_ids[0], read_slurm_job_id(runs[0]).partition("_")[0]
    wait("the end of the array", lambda: set(lab.read_state(array).split()) == {"CANCELLED"})
    said = f"packing (Slurm job {packing}): PackError: 1 of 1 raw samples cannot be read: d0-0001.png: "
    for index, run in enumerate(runs):
        for verb in ("status", "why"):
            capsys.readouterr()
            assert trainyard(verb, run) == 0
            assert said in (printed := capsys.readouterr().out)
        assert f"-> training (Slurm job {array}_{index}) does not start" in printed
        assert trainyard("logs", run) == 0
        assert "PackError: 1 of 1 raw samples cannot be read:" in capsys.readouterr().out

    shutil.rmtree(raw)
    synthesize_stripes(raw)
    assert trainyard("sweep", "--continue", "s", "--runs", site.runs, "--jobs", FAMILIES) == 0
    assert "submitted  packing as Slurm job" in capsys.readouterr().out
    again = read_run(runs[1]).slurm_job_ids[0]
    for run in runs:
        wait_for_end(lab, run)
    assert trainyard("status", "s", "--runs", site.runs) == 0
    assert capsys.readouterr().out.count(" done ") == 2
    for run in runs:
        assert trainyard("why", run) == 0
        assert " packing " in (why := capsys.readouterr().out) and f"{again}-0" in why
        assert not list((run / "slurm").glob("progress-*")), "a run wrote shards, too"
        assert trainyard("logs", run) == 0
        shown = capsys.readouterr().out
        assert shown.index("all records are as they were packed") < shown.index("step ")
        assert read_ends(run) == [(0, "done", "stop")]


def test_a_run_follows_another_and_is_cancelled_with_a_sentence_if_that_is_not_done(lab, site, capsys):
    """All jobs are held, so that no rank starts."""
    site.change(sbatch={"hold": True})
    site.submit("first", "--then", "stripes")
    assert "then training as Slurm job" in (printed := capsys.readouterr().out)
    first = resolve_run("stripes/first", site.runs)
    (second,) = (run for run in site.runs.glob("stripes/*") if run != first)
    _, training = read_run(first).slurm_job_ids
    (follower,) = read_run(second).slurm_job_ids
    assert "none  (stripes before it packs the same data)" in printed
    third = site.submit("third", "--after", second)
    job = read_run(third).training_job_id
    lab.run("scontrol", "release", follower)
    assert f"Dependency=afterok:{training}(unfulfilled)" in lab.run("scontrol", "show", "job", follower)
    assert f"afterok:{follower}(unfulfilled)" in lab.run("scontrol", "show", "job", job)
    wait("Slurm to consider it", lambda: "Dependency" in lab.run("squeue", "-h", "-j", follower, "-o", "%r"))
    assert trainyard("why", second) == 0
    assert "waits until stripes/first is done" in capsys.readouterr().out
    assert trainyard("cancel", first, third) == 0
    lab.wait_for(follower, "CANCELLED")
    capsys.readouterr()
    assert trainyard("status", second) == 0
    assert "cancelled by Slurm, because stripes/first ended without being done" in capsys.readouterr().out

    site.refuse("--after", first)
    assert "is stopped (packing (Slurm job" in (error := capsys.readouterr().err)
    assert f"Resume it first: trainyard resume {first}" in error and error.count("\n") == 1
    site.refuse("--after", "nobody")
    assert "no run is 'nobody'" in capsys.readouterr().err
    site.refuse("--after", second, "--local")
    assert "need Slurm, which --local does without" in capsys.readouterr().err
    assert len(list(site.runs.glob("stripes/*"))) == 3, "a refused run was left behind"


def test_a_dry_run_shows_every_slurm_job(site, tmp_path, capsys):
    words = ["submit", "stripes", "--then", "stripes", "seed=7", "--hw", "a100", "--dry", "--cluster", str(site.file)]
    place = ["--jobs", str(FAMILIES), "--runs", str(site.runs), f"data.cache={site.cache}"]
    assert main([*words, *place]) == 0
    printed = capsys.readouterr().out
    assert printed.count("#!/bin/bash") == 4, "the seed decides about synthetic samples, so each has its own"
    order = ["--job-name=stripes-packing", "--dependency=afterok:PACKING\n", "--dependency=afterok:PACKING:FIRST\n"]
    places = [printed.index(word) for word in order]
    assert places == sorted(places)
    assert "Slurm job on p100: 2 cores, 30m  (packs and verifies before the GPUs are requested" in printed
    assert not site.runs.exists() and not site.cache.exists()


def test_where_no_cpu_nodes_are_described_the_run_packs_and_the_plan_says_why(site, tmp_path, capsys):
    place = ["stripes", "--jobs", str(FAMILIES), "--runs", str(site.runs), f"data.cache={site.cache}", "--dry"]
    assert main(["submit", *place, "--hw", "a100", "--cluster", str(LAB_FILE)]) == 0
    printed = capsys.readouterr().out
    assert "in the run, on its first node  (lab.yaml describes no nodes with card: cpu under gpus)" in printed
    assert main(["submit", *place, "--hw", "cpus", "--cluster", str(site.file)]) == 0
    assert "in the run, on its first node  (it requests no GPU that would wait)" in capsys.readouterr().out
    site.change(shared=[str(site.runs)])
    assert main(["submit", *place, "--hw", "a100", "--cluster", str(site.file)]) == 0
    assert "cache is not below a folder that the nodes share)" in capsys.readouterr().out


# Eight ranks of fingerprint_1m that a CPU trains in a minute; the sizes are those of fingerprint_smoke.
SHRUNK = (
    "model.width=0.05 model.blocks=[0,1,0] model.embedding_dims=16 image.height_px=75 image.width_px=75 "
    "packing.region_px=320 split.val_share=0.2 split.test_share=0.2 global_batch_size=16 micro_batch_size=2 "
    "head.margin_warmup= schedule.warmup=5st max_duration=100st eval_every=100st checkpoint.every=10st log_every=1st "
    "evaluation.bootstrap_draws=20 trackers=[] data.decode=cpu data.threads=1"
)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_sentence_trains_on_generated_prints_where_the_file_of_the_lab_says_synthetic(lab, tmp_path):
    run, options = tmp_path / "runs" / "fingerprint_1m" / "small", SHRUNK.replace("100st", "2st")
    printed = lab.run(
        *("make", "--old-file=.venv/.done", "submit", "JOB=fingerprint_1m", "GPUS=8", "PLAN=0"),
        *(
            f"CLUSTER={LAB_FILE}",
            f"RUNS={tmp_path}/runs",
            "NAME=small",
            f"SET=data.synthetic=128 data.cache={tmp_path}/cache {options}",
        ),
        cwd=Path.cwd(),
    )
    assert "data        128 synthetic samples  (typed)" in printed
    wait_for_end(lab, run)
    assert [end[1] for end in read_ends(run)] == ["done"] and read_last_step(run) == 2


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_sentence_packs_trains_and_ends_with_the_same_bits_after_every_interruption(lab, tmp_path):
    """It is preempted twice before its first checkpoint, meets its time limit, and loses a node."""
    site, raw = Site(tmp_path), tmp_path / "prints"
    load_family(Path("jobs"), "fingerprint", "pack").synthesize(raw, count=128, seed=0)
    described = yaml.safe_load(site.file.read_text())["gpus"]
    gpus = {hw: described[hw] for hw in ("a100", "cpus")}
    site.change(data={"fingerprint_1m": str(raw)}, gpus=gpus)
    names = {str(site.runs): "runs", str(tmp_path): "/shared"}
    names |= {sys.prefix: ".venv", str(Path(sys.prefix).resolve()): ".venv", str(Path.cwd()): "."}
    story = Story(lab, names)
    story.tell("# A bad day")
    story.tell(
        "One line submits a job. On the way to its end the Slurm job below is preempted twice before its first "
        "checkpoint, meets its time limit and loses a node. Nobody types anything to keep it going: every command "
        "after the first one only looks. A test writes this page on a real Slurm (`slurm/lab`), whose A100 are names "
        "for CPU cores, with a model that is shrunk (`SET`) until they can train it; times and rates say nothing. The "
        "data root of the job is an entry of the cluster file. To write it again, type "
        f"`{PAGE}=docs/bad-day.md .venv/bin/pytest -m long tests/slurm/test_packing.py -k the_sentence`."
    )
    run, lost = make_submit(lab, site, "interrupted", story), ""
    story.tell("The data are raw files, so a job on CPU nodes packs them first. Slurm starts that job twice as well.")
    packing, job = read_run(run).slurm_job_ids
    wait("packing", lambda: count_starts(run, packing))
    lab.run("scontrol", "requeue", packing)
    try:
        for attempt in (0, 1):
            wait("an attempt", lambda earlier=attempt: count_starts(run, job) > earlier)
            lab.submit("true", "-p", "a100-urgent", "--gres=gpu:a100:8", "-w", read_node(run), "--exclusive")
            if attempt == 0:
                wait("the preemption", lambda: lab.read_state(job) == "PENDING")
                story.tell("## Preempted twice")
                story.tell("A job of a partition with higher priority takes the nodes while the ranks still start.")
                story.trainyard("status", str(run))
        wait("steps after two preemptions", lambda: read_last_step(run) >= 3)
        story.tell("It happens once more. The third attempt gets as far as training.")
        story.trainyard("why", str(run))
        lab.run("scontrol", "update", f"JobId={job}", f"TimeLimit={(read_elapsed_s(lab, job) + 45) // 60 + 1}")
        lab.run("scancel", "--signal=USR2", job)  # Slurm's warning, which would come within a minute
        wait("the next attempt to wait", lambda: read_ends(run)[-1][1] == "time_limit")
        lab.wait_for(job, "PENDING")
        story.tell("## The time limit")
        story.tell("Slurm warns before the limit. The ranks save, and the job is queued again.")
        story.trainyard("status", str(run))
        lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
        saved = read_last_step(run)
        wait("steps after the time limit", lambda: read_last_step(run) >= saved + 3)
        lost = read_node(run)
        lab.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
        wait("the loss of a node", lambda: lab.read_state(job) == "PENDING")
        story.tell("## A node is lost")
        story.tell(
            f"The node {lost} goes down. Until the next attempt starts, and asks about the node, only Slurm's signal "
            "is known, which `status` takes for that of a preemption. `why` names the loss afterwards."
        )
        story.trainyard("status", str(run))
        wait_for_end(lab, run)
    finally:
        if lost:
            lab.run("scontrol", "update", f"nodename={lost}", "state=resume")
    story.tell("## The end")
    story.trainyard("status", str(run))
    story.trainyard("why", str(run))
    ends = read_ends(run)
    assert ends.pop(0)[::2] == (0, "slurm")
    assert ends == [
        (1, "done", "stop"),
        (0, "preempted", "slurm"),
        (1, "preempted", "slurm"),
        (2, "time_limit", "requeue"),
        (3, "node_failure", "slurm"),
        (4, "done", "stop"),
    ]
    resumed = [line["step"] for line in read_lines(run / "events.jsonl") if line["event"] == "resume"]
    assert len(resumed) == 2, "a preempted attempt saved a checkpoint, so it was not the first"
    whole = make_submit(lab, site, "whole")
    assert read_run(whole).slurm_job_ids == [read_slurm_job_id(whole)], "packed a second time"
    wait_for_end(lab, whole)
    assert find_differences(load_state(whole), load_state(run)) == []
    assert read_run_metrics(whole) == read_run_metrics(run)
    story.tell(
        "The test then submits the same line once more and leaves that run alone. Both runs end with the same weights, "
        "optimizer state and metrics of every step, bit for bit."
    )
    story.write()


def make_submit(lab: Lab, site: Site, name: str, story: Story | None = None) -> Path:
    """Type the sentence."""
    sentence = ["submit", "JOB=fingerprint_1m", "GPUS=8", f"CLUSTER={site.file}", f"RUNS={site.runs}", f"NAME={name}"]
    options = f"data.cache={site.cache} {SHRUNK}"
    printed = lab.run("make", "--old-file=.venv/.done", *sentence, f"SET={options}", cwd=Path.cwd())
    if story is not None:
        lines = textwrap.wrap(story.hide_folders(f'SET="{options}"'), 110, break_on_hyphens=False)
        story.show(" \\\n    ".join([" ".join(["make", *sentence]), *lines]), printed)
    return site.runs / "fingerprint_1m" / name


def count_starts(run: Path, job: str) -> int:
    lines = read_lines(run / "slurm" / "attempts.jsonl")
    return sum(line["event"] == "start" and line["job"] == job for line in lines)


def read_node(run: Path) -> str:
    return [line["nodes"] for line in read_lines(run / "slurm" / "attempts.jsonl") if line["event"] == "start"][-1]


def read_elapsed_s(lab: Lab, job: str) -> int:
    started = lab.run("squeue", "-h", "-j", job, "-o", "%S").strip()
    return int(time.time() - datetime.fromisoformat(started).timestamp())
