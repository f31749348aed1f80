"""What users see: one message per mistake, nothing half-written, and what to type next."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from tests.images import edit_index, make_unmeasured_environ
from tests.training import FAMILIES, new_run, train
from trainyard import cli
from trainyard.cli.verb import OTHER_WORDS
from trainyard.config import compose as configs
from trainyard.config.families import find_jobs
from trainyard.plan.choose_gpu import read_needed_gib

JOBS = ["--jobs", str(FAMILIES)]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its standard error."""
    capsys.readouterr()
    code = cli.main(list(argv))
    return code, capsys.readouterr().err


def make_raw_folder(here: Path, count: int = 10) -> Path:
    from families.stripes.pack import synthesize

    synthesize(here / "raw", count=count, seed=0)
    return here / "raw"


@pytest.mark.parametrize("flag", ["--trus", "--break"])
def test_a_flag_is_typed_in_full(here, capsys, flag):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["resume", "newest", flag])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["resume", "newest", "--trus=1"], "unrecognized arguments: --trus=1. Nearest: --trust. All of them: "),
        (["jobs", "--xyzzy"], "trainyard jobs: unrecognized arguments: --xyzzy. All of them: trainyard jobs --help"),
        (["jobs", "more"], "trainyard jobs: unrecognized arguments: more. All of them: trainyard jobs --help"),
        (["submit", "x", "--gpus", "eight"], "argument --gpus: invalid int value: 'eight'. All of them: "),
        (["resume", "x", "--changed-files", "accept1"], "invalid choice: 'accept1'. Nearest: accept. All of them: "),
    ],
)
def test_a_wrong_flag_or_value_is_one_line_with_the_nearest_one_of_that_command(here, capsys, argv, said):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    stderr = capsys.readouterr().err
    assert said in stderr and stderr.endswith(f"trainyard {argv[0]} --help\n") and stderr.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        cli.main([argv[0], "--help"])


@pytest.mark.parametrize(("typed", "nearest"), [("resum", "resume"), ("train", "run")])
def test_an_unknown_command_is_one_line_with_the_nearest(here, capsys, typed, nearest):
    with pytest.raises(SystemExit, match="2"):
        cli.main([typed, "newest"])
    assert capsys.readouterr().err == (
        f"trainyard: argument COMMAND: invalid choice: '{typed}'. Nearest: {nearest}. All of them: trainyard --help\n"
    )


def test_other_words_for_a_command_name_one_that_exists(here, capsys):
    for word, command in OTHER_WORDS.items():
        with pytest.raises(SystemExit, match="2"):
            cli.main([word])
        assert f" Nearest: {command}. " in capsys.readouterr().err


def test_all_commands_are_listed_and_each_one_loads_by_its_name(here, capsys):
    """A command that is missing in the table of cli/__init__.py, or in another order there, would not be listed so."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    listed = re.findall(r"^    (\w\S*)", capsys.readouterr().out, re.MULTILINE)
    names = [name for _, names in cli.COMMANDS for name in names.split()]
    assert listed[: len(names)] == names and len(names) >= 30
    for name in names:
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: trainyard {name} [-h]")


@pytest.mark.parametrize("words", [("run", "--cpu-ranks", "2"), ("submit", "--local", "--cpu-ranks", "2")])
def test_synchronised_batch_statistics_on_the_cpu_are_refused_before_data_are_packed(words, here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    code, stderr = run_cli(capsys, words[0], "stripes", "sync_batchnorm=true", *words[1:], *JOBS)
    assert code == 2 and stderr.count("\n") == 1
    assert stderr.startswith("UserError: sync_batchnorm=true on 2 ranks on the CPU")
    assert "Use sync_batchnorm=false" in stderr
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [("run",), ("submit", "--local")])
def test_what_this_machine_lacks_is_refused_before_anything_is_made(words, here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    code, stderr = run_cli(capsys, words[0], "stripes", *words[1:], "--gpus", "2", *JOBS)
    assert code == 2 and stderr.startswith("UserError: 2 GPUs requested, but this machine has 0. Leave --gpus ")
    for tracker, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        monkeypatch.setitem(sys.modules, tracker, None)  # as if it were not installed
        code, stderr = run_cli(capsys, words[0], "stripes", *words[1:], f"trackers=[tensorboard,{tracker}]", *JOBS)
        assert code == 2 and stderr.count("\n") == 1
        assert f"trackers={tracker}: {tracker} is not installed here. Type: {sys.executable} -m pip in" in stderr
        assert f"'{package}>=" in stderr and stderr.endswith("or leave it out: trackers=[tensorboard]\n")
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["run", "strips"], ["no job 'strips'", "stripes", "trainyard jobs"]),
        (["run", "stripes", "optimizer.lt=1"], ["optimizer.lt", "optimizer.lr", "weight_decay"]),
        (["run", "stripes", "optimizer.lr=fast"], ["optimizer.lr", "fast", "float"]),
        (["run", "stripes", "seed=1.5"], ["seed", "1.5", "int"]),
        (["run", "stripes", "optimizer.lr"], ["optimizer.lr", "="]),
        (["run", "stripes", "precision=fp8"], ["precision=fp8", "auto, fp32, fp16, bf16"]),
        (["run", "stripes", "precision=fp16"], ["precision=fp16", "the CPU", "precision=fp32"]),
        (["run", "stripes", "data.path=nowhere"], ["nowhere: no such folder", "data.path=FOLDER"]),
        (["run", "stripes", "data.synthetic=0"], ["needs data", "DATA=FOLDER"]),
        (["run", "stripes", "--gpus", "8"], ["8 GPUs requested", "this machine has 0", "Leave --gpus (GPUS=) out"]),
        (["resume", "nothing"], ["no runs"]),
        (["report", "nothing"], ["no runs"]),
        (["verify", "nowhere"], ["nowhere: no such folder", "trainyard pack"]),
        (["run", "stripes", "schedule.name=cosine", "max_duration=5min"], ["needs the number of steps", "constant"]),
        (["run", "stripes", "data.order=pxk", "data.order_by=colour"], ["data.order_by=colour", "direction"]),
    ],
)
def test_a_mistake_gets_one_clear_message_and_leaves_nothing_behind(argv, expected, here, capsys):
    code, stderr = run_cli(capsys, *argv, *JOBS)
    assert code == 2
    for part in expected:
        assert part in stderr
    assert "Traceback" not in stderr
    assert not [path for path in here.rglob("*") if ".partial" in path.name or path.name.startswith(".new-")]
    assert list(here.glob("runs/*/*")) == [], "a run that was refused before it began"


def test_a_file_given_as_folder_is_said_with_its_folder(here, capsys):
    make_raw_folder(here, 2)
    code, stderr = run_cli(capsys, "run", "stripes", f"data.path={sorted((here / 'raw').iterdir())[0]}", *JOBS)
    assert code == 2 and "is a file, and a folder of raw files is expected" in stderr
    assert f"data.path={here / 'raw'}, or make run DATA={here / 'raw'}" in stderr


@pytest.mark.long
def test_packed_data_that_is_gone_is_packed_again_or_the_command_is_printed(here, capsys):
    raw, own = make_raw_folder(here), ["data.threads=1", "max_duration=1ep"]
    assert cli.main(["run", "stripes", "--name", "a", "data.path=raw", *own, *JOBS]) == 0
    (packed,) = (here / "data").glob("stripes-*")
    shutil.rmtree(packed)
    code, stderr = run_cli(capsys, "resume", "a", *JOBS)
    assert code == 0 and "is gone; packing it again from raw" in stderr and packed.is_dir()
    shutil.rmtree(packed)
    raw.rename("moved")
    code, stderr = run_cli(capsys, "resume", "a", *JOBS)
    assert code == 2 and "the packed data of this run is gone, and so are the raw files (raw)" in stderr
    again = stderr.strip().splitlines()[-1].rpartition(": trainyard ")[2].replace("RAW", "moved").split()
    assert again == ["pack", "stripes", "moved", str(packed.relative_to(here))]
    assert cli.main([*again, *JOBS]) == 0 and cli.main(["resume", "a", *JOBS]) == 0


def test_an_empty_folder_says_what_is_expected(here, capsys):
    (here / "empty").mkdir()
    code, stderr = run_cli(capsys, "run", "stripes", "data.path=empty", *JOBS)
    assert code == 2
    assert re.search(
        r"empty: contains no sample that stripes knows\. Expected: what .*README.md describes\. Found: no file", stderr
    )
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_unreadable_images_are_named_counted_and_skipped_on_request(here, capsys):
    raw = make_raw_folder(here)
    for name in ("d0-0000.png", "d1-0005.png"):
        (raw / name).write_bytes(b"no image")
    code, stderr = run_cli(capsys, "pack", "stripes", "raw", "out", *JOBS)
    assert code == 2
    assert "2 of 10 raw samples cannot be read" in stderr
    assert "d0-0000.png" in stderr and "d1-0005.png" in stderr and "data.on_error=skip" in stderr
    assert list((here / "out").iterdir()) == []
    code, stderr = run_cli(capsys, "pack", "stripes", "raw", "out", "data.on_error=skip", *JOBS)
    assert code == 0
    assert "8 samples in 1 shards, 2 unreadable left out" in stderr
    assert run_cli(capsys, "verify", "out", *JOBS)[0] == 0


@pytest.mark.slow
def test_packed_data_with_another_format_or_a_truncated_shard_is_refused(here, capsys):
    make_raw_folder(here)
    assert run_cli(capsys, "pack", "stripes", "raw", "out", *JOBS)[0] == 0
    shutil.copytree("out", "old")
    with edit_index(Path("old")) as file:
        file.attrs["format"] = 99
    code, stderr = run_cli(capsys, "run", "stripes", "data.path=old", *JOBS)
    assert code == 2
    assert "the format of this packed data is 99, expected 1" in stderr and "trainyard pack" in stderr
    with Path("out/shard-00000.h5").open("r+b") as shard:
        shard.truncate(3000)
    code, stderr = run_cli(capsys, "run", "stripes", "data.path=out", *JOBS)
    assert code == 2
    assert "shard-00000.h5: 3000 bytes, the index says" in stderr and "cut off" in stderr
    code = cli.main(["verify", "out", *JOBS])
    assert code == 1
    assert "damaged" in capsys.readouterr().out


def test_a_damaged_record_is_named_by_verify(here, capsys):
    make_raw_folder(here)
    assert run_cli(capsys, "pack", "stripes", "raw", "out", *JOBS)[0] == 0
    shard = Path("out/shard-00000.h5")
    data = bytearray(shard.read_bytes())
    at = data.index(Path("raw/d1-0001.png").read_bytes()) + 60
    data[at] ^= 255
    shard.write_bytes(data)
    assert cli.main(["verify", "out", *JOBS]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["out/shard-00000.h5: image of 'd1-0001.png': checksum differs", "out: 1 damaged"]


@pytest.mark.slow
def test_a_run_in_progress_refuses_options_that_change_the_mathematics_and_accepts_others(tmp_path, capsys):
    run = new_run(tmp_path, "max_duration=1ep")
    assert train(run) == 0
    code, stderr = run_cli(capsys, "resume", str(run), "optimizer.lr=0.5", "eval_batch_size=7", *JOBS)
    assert code == 2
    assert "optimizer.lr: 0.01 -> 0.5" in stderr and "eval_batch_size" not in stderr and "start a new run" in stderr
    code, stderr = run_cli(capsys, "resume", str(run), "eval_batch_size=7", *JOBS)
    assert code == 0
    assert "eval_batch_size: 64 -> 7" in stderr
    assert "eval_batch_size: 7" in (run / "config.yaml").read_text()


@pytest.mark.slow
def test_the_same_name_resumes_the_run_and_refuses_other_options(here, capsys):
    quick = ["--name", "mine", "max_duration=1ep", *JOBS]
    assert cli.main(["run", "stripes", *quick]) == 0
    assert "resuming" in run_cli(capsys, "run", "stripes", *quick)[1]
    code, stderr = run_cli(capsys, "run", "stripes", "seed=4", *quick)
    assert code == 2
    assert "seed: 0 -> 4" in stderr


def test_a_second_process_on_a_run_is_told_who_owns_it(tmp_path, capsys):
    from trainyard.runs.lock import RunLock

    run = new_run(tmp_path)
    with RunLock(run):
        code, stderr = run_cli(capsys, "resume", str(run), "eval_batch_size=7", *JOBS)
    assert code == 2
    assert "eval_batch_size: 64" in (run / "config.yaml").read_text()
    assert f"process {os.getpid()} on" in stderr and "Wait for it, or stop it" in stderr


@pytest.mark.slow
def test_a_full_disk_stops_a_run_with_one_message_and_keeps_what_was_saved(tmp_path):
    """A file size limit makes the kernel refuse writes of this one process, as a full disk would."""
    run = new_run(tmp_path, "max_duration=2ep", "checkpoint.every=1st")

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command = [sys.executable, "-m", "trainyard", "resume", str(run), *JOBS]
    # Coverage would write its own file, too large for the limit, and say so.
    environ = make_unmeasured_environ()
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files, timeout=240, env=environ)
    assert done.returncode == 2
    assert "not saved" in done.stderr and "Traceback" not in done.stderr
    assert not list((run / "checkpoints").glob("*.ckpt*"))
    assert train(run) == 0


@pytest.mark.slow
def test_the_summary_fits_a_screen_and_says_what_to_type_next(here, capsys):
    assert cli.main(["run", "stripes", "max_duration=1ep", *JOBS]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24 and max(map(len, shown.splitlines())) <= 120
    assert "accuracy" in shown and "samples/s" in shown and "report.html" in shown and "next:" in shown
    report = next(here.glob("runs/stripes/*/report.html"))
    assert report.stat().st_size > 10_000
    assert f"trainyard options stripes --jobs {FAMILIES}\n" in shown
    families = json.loads((report.parent / "env.json").read_text())["choices"]["families"]
    assert families == {"value": str(FAMILIES), "reason": "--jobs"}


@pytest.mark.slow
def test_checkpoints_are_listed_verified_and_exported(here, capsys):
    from safetensors.torch import load_file

    assert cli.main(["run", "stripes", "max_duration=2ep", *JOBS]) == 0
    capsys.readouterr()
    assert cli.main(["ckpt", "list", "stripes", *JOBS]) == 0
    assert "ok" in capsys.readouterr().out
    assert cli.main(["ckpt", "verify", "stripes", *JOBS]) == 0
    assert cli.main(["export", "stripes", "model.safetensors"]) == 0, "the run knows its family"
    assert "head.weight" in load_file("model.safetensors")
    code, stderr = run_cli(capsys, "export", "stripes", "model.safetensors", *JOBS)
    assert code == 2 and "exists already" in stderr
    code, stderr = run_cli(capsys, "export", "stripes", "other.safetensors", "--step", "999", *JOBS)
    assert code == 2 and "no checkpoint of step 999" in stderr


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["schedule.milestones=[3ep,", "6ep]", "seed=3"], ["schedule.milestones=['3ep', '6ep']", "seed=3"]),
        (["schedule.milestones=[", "3ep", "]", "seed=3"], ["schedule.milestones=['3ep']", "seed=3"]),
        (["data.path=/a[b", "seed=3"], ["data.path=/a[b", "seed=3"]),
        (["data.path=[b", "seed=3"], ["data.path=[b", "seed=3"]),
    ],
)
def test_spaces_within_a_list_do_not_end_it(words, listed, here, capsys):
    assert cli.main(["options", "stripes", *words, *JOBS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"{one} ") for line in lines) for one in listed)


def test_jobs_and_options_are_listed(here, capsys):
    assert cli.main(["jobs", *JOBS]) == 0
    assert "stripes\n  stripes  at once    Classify the direction of stripes" in capsys.readouterr().out
    assert cli.main(["options", "stripes", *JOBS]) == 0
    listed = capsys.readouterr().out
    assert "optimizer.lr=0.01" in listed and "model.channels=8" in listed and "of each layer" in listed
    assert re.search(r"optimizer.name=adamw +algorithm \[adamw, adam, sgd\]\n", listed)


def test_jobs_are_grouped_by_family_with_what_runs_here_on_lines_of_a_narrow_screen(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    assert cli.main(["jobs", "--jobs", str(Path(__file__).parents[1] / "jobs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) < 100 for line in lines)
    families = [line for line in lines if re.fullmatch(r"\w+", line)]
    assert families == ["antispoof", "fingerprint", "pricing", "tinydet", "twins"]
    row = {words[0]: " ".join(words[1:]) for line in lines if line.startswith("  ") and (words := line.split())}
    assert row["twins_demo"].startswith("at once Try it without data") and lines[-1].count("this machine has none") == 1
    assert row["pricing"].startswith("your data") and row["pricing_ikea"] == (
        "your data 2,962 pieces of furniture, one fold of five"
    )
    assert row["pricing_p100"].startswith("16 GB DeBERTa") and row["fingerprint_1m"].startswith("11 GB A million")
    assert row["fingerprint_real"] == "your data Train on UareU, test on FVC2004, on a CPU", "the command is left out"
    smi = here / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\n" + 2 * "echo 'Tesla T4, 15360, [N/A]'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it may hide all GPUs
    assert cli.main(["jobs", "--jobs", str(Path(__file__).parents[1] / "jobs")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"pricing_p100 +your data", text) and re.search(r"pricing_a100 +40 GB", text)
    assert "this machine has 15 GB, 15 GB." in text


def test_a_shell_completes_commands_flags_jobs_and_runs(here, capsys):
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert cli.main(["completion", "bash", *JOBS]) == 0
    script = here / "completion.sh"
    script.write_text(capsys.readouterr().out)
    (here / "runs" / "stripes" / "a").mkdir(parents=True)
    (here / "jobs").symlink_to(FAMILIES)

    def complete(*words: str) -> list[str]:
        command = f"source {script}; COMP_WORDS=(trainyard {' '.join(words)} ''); COMP_CWORD={len(words)}"
        done = subprocess.run(
            ["bash", "-c", f"{command}; _shtab_trainyard; echo ${{COMPREPLY[@]}}"], capture_output=True, text=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert sorted(complete("resu")) == ["results", "resume"]
    assert complete("run", "stri") == ["stripes"] and complete("options", "stri") == ["stripes"]
    assert complete("submit", "stripes", "--lo") == ["--local"]
    assert complete("why", "runs/str") == ["runs/stripes"] and complete("why", "str") == ["stripes"]
    assert complete("ckpt", "ve") == ["verify"]
    assert "pricing_demo" in complete("run", "pricing"), "of Trainyard's own families, too"


def test_a_shell_without_the_library_is_told_what_to_install(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, stderr = run_cli(capsys, "completion", "bash")
    assert code == 2 and f"Type: {sys.executable} -m pip install 'shtab>=1.7'" in stderr


def test_jobs_of_a_folder_without_families_and_a_broken_preset_are_said(here, capsys):
    (here / "jobs" / "mine").mkdir(parents=True)
    assert "contains no preset (<family>/<preset>.yaml)" in run_cli(capsys, "jobs")[1]
    (here / "jobs" / "mine" / "mine.yaml").write_text("# What it does.\ndata: {synthetic: 1\n")
    assert cli.main(["jobs"]) == 0
    assert "mine\n  mine  broken     What it does\n" in (said := capsys.readouterr().out) and "names the error" in said


@pytest.mark.slow
def test_what_the_list_says_of_a_job_is_what_its_preset_composes_to(capsys):
    """The list reads the files themselves: to compose each takes seconds."""
    jobs = Path(__file__).parents[1] / "jobs"
    assert cli.main(["jobs", "--jobs", str(jobs)]) == 0
    answers = dict(re.findall(r"^  (\w+) +(at once|your data|[0-9.]+ GB) ", capsys.readouterr().out, re.MULTILINE))
    presets = find_jobs(jobs)
    assert answers.keys() == presets.keys()
    for name in presets:
        config = configs.compose(name, [], jobs)
        needed = read_needed_gib(config.needs)
        here = "at once" if config.data.synthetic else "your data"
        assert answers[name] in ([f"{needed:g} GB", here] if needed else [here])


@pytest.fixture
def closed_pipe() -> Iterator[TextIO]:
    """A stream that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        yield stream


@pytest.mark.parametrize(
    "argv",
    [
        ["jobs"],
        ["options", "stripes"],
        ["submit", "stripes", "--dry", "--cluster", str(Path(__file__).parent / "slurm/golden/cluster.yaml")],
        ["run", "stripes", "--dry"],
        ["status"],
    ],
    ids=lambda argv: argv[0],
)
def test_output_that_nobody_reads_ends_a_command_quietly(argv, here, closed_pipe, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    where = ["--runs", "/shared/runs"] if argv[0] == "submit" else []
    assert cli.main([*argv, *JOBS, *where]) == 141
    assert "Traceback" not in capfd.readouterr().err


def test_a_mistake_that_nobody_reads_ends_a_command_quietly(here, closed_pipe, monkeypatch):
    monkeypatch.setattr(sys, "stderr", closed_pipe)
    assert cli.main(["report", "nothing"]) == 141


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_head_of_a_command_prints_no_traceback(unbuffered):
    line = f"set -o pipefail; {sys.executable} -m trainyard jobs | true"
    environ = {**make_unmeasured_environ(), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")
