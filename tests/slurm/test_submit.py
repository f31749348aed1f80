"""Submitting on a real Slurm: quickly, with whatever names people have, and with one sentence for each mistake."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import LAB_FILE, Start, ends, job_of, lines, starter, trainyard, wait, wait_for_end
from tests.slurm.conftest import Lab
from tests.training import FAMILIES, find_differences, load_state, new_run, train_on_ranks

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module", autouse=True)
def on_the_lab(lab: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
        yield


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return starter(tmp_path / "runs", tmp_path / "cache")


@pytest.fixture
def lab_file(tmp_path: Path) -> Path:
    """A copy of the lab's cluster file to write mistakes into."""
    return Path(shutil.copy(LAB_FILE, tmp_path / "mine.yaml"))


def change(path: Path, hw: str, **values: object) -> None:
    content = yaml.safe_load(path.read_text())
    content["gpus"][hw].update(values)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: object) -> str:
    """Return what is said to a submission that must fail, and leave nothing."""
    runs = tmp_path / "runs"
    assert trainyard("submit", "stripes", "--jobs", FAMILIES, "--runs", runs, *words) == 2
    assert not list(runs.glob("*/*")), "a run folder was left behind"
    return capsys.readouterr().err


def test_submitting_takes_less_than_a_second_and_a_half_of_a_core_and_loads_no_torch(lab, tmp_path):
    words = ["stripes", "--jobs", FAMILIES, "--runs", tmp_path / "runs", "--cluster", LAB_FILE, "--hw", "a5000"]
    code = (
        "import sys; from trainyard.cli import main; code = main(sys.argv[1:]); "
        "loaded = {'torch', 'h5py', 'nvidia', 'matplotlib'} & set(sys.modules); print('loaded', sorted(loaded)); "
        "sys.exit(code)"
    )
    took = []
    for _ in range(3):
        begin = _core_seconds_of_children()
        said = lab.run(sys.executable, "-c", code, "submit", *words, cwd=Path.cwd())
        took.append(_core_seconds_of_children() - begin)
        assert "loaded []" in said
        job = next(line.split()[-1] for line in said.splitlines() if line.startswith("submitted"))
        lab.run("scancel", job)
    assert min(took) < 1.5, took  # CPU time, and the fastest of three: the machine may be busy with other things


def _core_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_folder_with_spaces_and_quotes_and_a_value_that_looks_like_shell_are_only_text(lab, tmp_path):
    root = tmp_path / 'my "runs" $(touch HACKED)' / "it's; here"
    run = starter(root, tmp_path / "ca che")("plain", "model.diary=`touch HACKED`$(touch HACKED)", "--hw", "a5000")
    wait_for_end(lab, run)
    assert ends(run) == [(0, "done", "stop")]
    assert not list(tmp_path.rglob("HACKED")) and not Path("HACKED").exists()
    Path("`touch HACKED`$(touch HACKED)").unlink()  # the diary, in the folder that was submitted from


def test_names_that_no_folder_can_have_are_refused(capsys, tmp_path):
    for name in ("a b", "it's", "two\nlines", "$(id)", "-rf"):
        assert "cannot name a run" in refused(capsys, tmp_path, f"--name={name}", "--cluster", LAB_FILE)


def test_a_partition_that_slurm_does_not_have_is_told_with_the_nearest(capsys, tmp_path, lab_file):
    change(lab_file, "a5000", partition="a500")
    told = refused(capsys, tmp_path, "--hw", "a5000", "--cluster", lab_file)
    assert "partition is 'a500', which this Slurm does not have. Nearest: a5000. It has: p100" in told
    assert told.count("\n") == 1


def test_the_file_of_another_slurm_is_refused(capsys, tmp_path, lab_file):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "slurm_name": "tower"}))
    told = refused(capsys, tmp_path, "--hw", "a100", "--cluster", lab_file)
    assert "describes the Slurm 'tower', but 'lab' answers here" in told and told.count("\n") == 1


def test_more_time_than_the_partition_allows_is_told_before_the_queue(capsys, tmp_path, lab_file):
    change(lab_file, "p100", partition="short")
    told = refused(capsys, tmp_path, "--hw", "p100", "--time", "2h", "--cluster", lab_file)
    assert "partition short allows at most 1 minute" in told and told.count("\n") == 1


def test_what_only_slurm_can_refuse_is_told_in_its_own_words(capsys, tmp_path, lab_file):
    change(lab_file, "a100", gres="gpu:a1000")
    told = refused(capsys, tmp_path, "--hw", "a100", "--cluster", lab_file)
    assert "Slurm refused the job: sbatch: error: " in told and "trainyard cluster-check" in told
    assert "Traceback" not in told


def test_a_run_folder_that_the_nodes_do_not_see_is_refused(capsys, tmp_path, lab_file):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "shared": ["/home"]}))
    told = refused(capsys, tmp_path, "--hw", "a100", "--cluster", lab_file)
    assert "is not below a folder that the nodes of mine share with this machine (/home)" in told


def test_a_job_without_data_is_refused_before_the_queue(capsys, tmp_path):
    assert "stripes needs data: data.path=FOLDER" in refused(
        capsys, tmp_path, "data.synthetic=0", "--cluster", LAB_FILE
    )
    told = refused(capsys, tmp_path, f"data.path={tmp_path / 'nowhere'}", "--cluster", LAB_FILE)
    assert "nowhere: no such folder" in told


def test_without_a_slurm_it_is_said_what_works_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    told = refused(capsys, tmp_path, "--cluster", LAB_FILE)
    assert told.startswith("UserError: There is no Slurm here: sbatch is not on PATH.")
    assert "trainyard submit stripes --local" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gpus", 0], "--gpus 0: a job needs at least one rank"), (["--time", "soon"], "is not a time")],
)
def test_a_wrong_wish_for_this_machine_leaves_nothing(words, said, capsys, tmp_path):
    assert said in refused(capsys, tmp_path, "--local", f"data.cache={tmp_path / 'cache'}", *words)


def test_submitted_to_this_machine_it_trains_in_the_background_with_the_same_code(tmp_path, capsys):
    here = ["--local", "--gpus", 2, "--jobs", FAMILIES, "--runs", tmp_path / "runs", f"data.cache={tmp_path / 'cache'}"]
    assert trainyard("submit", "stripes", "--name", "here", "data.threads=1", *here) == 0
    run = tmp_path / "runs" / "stripes" / "here"
    wait("the end", lambda: lines(run / "events.jsonl")[-1:] and lines(run / "events.jsonl")[-1]["event"] == "done")
    assert lines(run / "events.jsonl")[0]["world_size"] == 2
    other = new_run(tmp_path / "other")
    assert train_on_ranks(other, 2, rendezvous="m") == [0, 0]
    assert find_differences(load_state(other), load_state(run)) == []
    wait("the report", lambda: (run / "report.html").is_file())
    capsys.readouterr()
    assert trainyard("status", run) == 0
    assert "done" in capsys.readouterr().out


def test_a_used_up_budget_ends_the_job(lab, tmp_path, lab_file, start):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "attempts": {"crash": 0, "preempted": 0}}, sort_keys=False))
    slow = ("model.sleep_ms=300", "max_duration=12ep", "--hw", "2080ti")
    run = start("no-second", *slow, cluster=lab_file)
    wait("a first step", lambda: (run / "metrics.jsonl").exists())
    lab.run("scancel", "--signal=USR2", job_of(run))
    wait_for_end(lab, run)
    assert ends(run) == [(0, "preempted", "stop")]
    assert "budget of 0 restarts" in lines(run / "slurm" / "attempts.jsonl")[-1]["reason"]
    assert trainyard("why", run) == 0


def test_the_grace_time_of_a_partition_is_used_to_save_and_start_again(lab, tmp_path, lab_file, start):
    change(lab_file, "a100", partition="a100-grace")
    run = start("graced", "model.sleep_ms=300", "max_duration=8ep", "--hw", "a100", "--gpus", 2, cluster=lab_file)
    wait("step 3", lambda: len(lines(run / "metrics.jsonl")) >= 3)
    node = lines(run / "slurm" / "attempts.jsonl")[0]["nodes"]
    lab.submit("sleep 1", "-p", "a100-urgent", "--gres=gpu:a100:8", "-w", node, "--exclusive")
    wait_for_end(lab, run)
    assert [end[1] for end in ends(run)] == ["preempted", "done"]
    resumed = [line for line in lines(run / "events.jsonl") if line["event"] == "resume"]
    stopped = [line for line in lines(run / "events.jsonl") if line["event"] == "stop"]
    assert resumed[0]["step"] == stopped[0]["step"], "steps were lost though there was time to save"


def test_the_lab_passes_its_own_check(lab):
    checked = subprocess.run(
        [sys.executable, "-m", "trainyard", "cluster-check", str(LAB_FILE)],
        env=lab.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
