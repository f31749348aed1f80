"""What attempt.sh decides after each end of an attempt: budgets, requeues, successors. Needs no Slurm: see `Host`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainyard.launch.submit import render_attempt_script
from trainyard.runs.history import read_run
from trainyard.runs.state import Cause, ExitCode

# Slurm's commands as a node has them. `scontrol requeue` fails as many times as the file `refusals` has lines, with the
# next of them each time. Slurm ends a script whose job it requeues: instead, its sleep of a minute is over at once.
PROGRAMS = {
    "squeue": """\
        case "$*" in
            *"%A %E %o"*) cat "$FAKE/queue" ;;
            *%T*) echo trainyard RUNNING ;;
            *%x*) echo "trainyard $(cat "$FAKE/excluded")" ;;
            *%e*) date -d "+$(cat "$FAKE/left_s") seconds" "+trainyard %FT%T" ;;
        esac""",
    "sinfo": """\
        case "$*" in
            *"%N %T"*) echo 'trainyard a-0 idle' ;;
            *" -n "*) echo 'trainyard gpu:8 big' ;;
            *) sed 's/^/trainyard /' "$FAKE/nodes" ;;
        esac""",
    "scontrol": """\
        if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<<"$3"; exit; fi
        echo "scontrol $*" >>"$FAKE/calls"
        [ -s "$FAKE/refusals" ] || exit 0
        head -n 1 "$FAKE/refusals" >&2
        sed -i 1d "$FAKE/refusals"
        exit 1""",
    "sbatch": """\
        echo "sbatch $*" >>"$FAKE/calls"
        env | grep -E '^(SLURM|SBATCH|SRUN)_' | sort >"$FAKE/environ"
        [ ! -s "$FAKE/no_sbatch" ] || { cat "$FAKE/no_sbatch" >&2; exit 1; }
        echo 'sbatch: welcome to this site' >&2
        cat "$FAKE/next_job" """,
    "scancel": 'echo "scancel $*" >>"$FAKE/calls"',
    "sleep": '[ "$1" -ge 60 ] || exec /bin/sleep 0.1',
}
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
REFUSED = "Requested operation is presently disabled for job 7"
PENDING = "Job is pending execution for job 7"


class Host:
    """A node that runs attempt.sh for one run, with stand-ins for Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        self.run, self.scripts, self.fake, self.bin = (folder / name for name in ("run", "scripts", "fake", "bin"))
        for path in (self.run / "slurm", self.run / "checkpoints", self.scripts, self.fake, self.bin):
            path.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.bin / name).chmod(0o755)
        self.set(left_s="3600", next_job="13\n", queue="", nodes="", excluded="")
        (self.scripts / "attempt.sh").write_text(render_attempt_script())
        self.limits = "preempted=1000 time_limit=100 node_failure=10 crash=2 hung=5 disk_full=30"
        self.environ: dict[str, str] = {}
        self.job, self.element, self.restarts = "7", "", 0
        self.starts_ranks = True
        self.write_submission_files("7", "7")

    def set(self, **texts: str) -> None:
        """Change what the stand-ins read."""
        for name, text in texts.items():
            (self.fake / name).write_text(text)

    def write_submission_files(self, script: str, pickle: str) -> None:
        (self.scripts / f"{script}_submission.sh").write_text("#!/bin/bash\n")
        (self.scripts / f"{pickle}_submitted.pkl").write_text(f"the pickle of {pickle}")

    @property
    def name(self) -> str:
        return f"{self.job}_{self.element}" if self.element else self.job

    def source(self, *words: object) -> int:
        """Source the script as a batch script does; return the exit code."""
        array = {"SLURM_ARRAY_JOB_ID": self.job, "SLURM_ARRAY_TASK_ID": self.element} if self.element else {}
        restarts = {"SLURM_RESTART_COUNT": str(self.restarts)} if self.restarts else {}
        slurm = {"SLURM_JOB_ID": self.job, "SLURM_JOB_NODELIST": "a-0", "SLURM_JOB_PARTITION": "a", **array, **restarts}
        slurm |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURMD_NODENAME": "a-0"}
        own = {"TRAINYARD_RUN": str(self.run), "TRAINYARD_LIMITS": self.limits, "TRAINYARD_SIGNAL_S": "20"}
        path = {"PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE": str(self.fake), "TRAINYARD_REQUEUE_S": "20"}
        line = f"source {self.scripts / 'attempt.sh'} {' '.join(map(str, words))}"
        with (self.scripts / f"{self.name}_0_log.err").open("a") as errors:
            command = ["bash", "-c", line]
            if words[0] == "begin" and self.starts_ranks:
                (self.run / "slurm" / f"started-{self.name}-{self.restarts}").touch()
            return subprocess.run(command, env={**path, **own, **slurm, **self.environ}, stderr=errors).returncode

    def attempt(self, how: str) -> tuple[str, str]:
        """Run one attempt that ends in this way; return the cause and the action that were recorded.

        Args:
            how: crash, hung, full (no memory on a GPU), limit, saved (preempted with time to save) or taken (preempted
                without); "+data" or "+checkpoint" if it made progress before.
        """
        kind, _, progress = how.partition("+")
        assert self.source("begin") == 0
        attempt = f"{self.name}-{self.restarts}"
        if progress == "checkpoint":
            (self.run / "checkpoints" / f"step-{len(list(self.run.glob('checkpoints/*'))):09d}.ckpt").touch()
        elif progress == "data":
            (self.run / "slurm" / f"progress-{attempt}").touch()
        if kind == "hung":
            (self.run / "ranks").mkdir(exist_ok=True)
            (self.run / "ranks" / f"{attempt}-hung.txt").write_text('rank 1 on b: no "progress" for 2 min\n')
            (self.run / "slurm" / f"left-{attempt}").write_text(f"{ExitCode.HUNG}\n")
        elif kind not in ("crash", "full"):
            (self.run / "slurm" / f"signal-{attempt}").write_text("SIGUSR2 1\n" if kind == "limit" else "SIGTERM 1\n")
        if kind == "full":
            (self.run / "slurm" / f"left-{attempt}").write_text(f"{ExitCode.DEVICE_OOM}\n")
        if kind in ("limit", "saved"):
            (self.run / "slurm" / f"left-{attempt}").write_text(f"{ExitCode.PREEMPTED}\n")
        self.set(left_s="60" if kind == "limit" else "3600")
        if kind != "taken":
            self.source("end", 1)
        self.restarts += 1
        if kind == "taken":  # the next attempt records it
            return "", "slurm"
        last = [line for line in self.read_lines() if line["event"] == "end"][-1]
        return last["cause"], last["action"]

    def read_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "slurm" / "attempts.jsonl").read_text().splitlines()]

    def read_calls(self) -> list[str]:
        path = self.fake / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("ends", "causes"),
    [
        pytest.param("saved saved saved crash", "preempted preempted preempted crash", id="preemptions do not count"),
        pytest.param("taken taken crash", "- - crash", id="nor those without time to save"),
        pytest.param("crash crash", "crash no_progress", id="two crashes do"),
        pytest.param("limit limit", "time_limit no_progress", id="two time limits do"),
        pytest.param("crash saved limit", "crash preempted no_progress", id="also with a preemption between them"),
        pytest.param("limit+data limit limit", "time_limit time_limit no_progress", id="packing is progress"),
        pytest.param("crash saved+data crash", "crash preempted crash", id="whoever does it"),
        pytest.param(
            " ".join(["crash+checkpoint"] * 5 + ["crash", "crash"]), "crash " * 6 + "no_progress", id="crashes refill"
        ),
        pytest.param("crash+data crash+data crash+data", "crash crash crash!", id="but not by staging again"),
        pytest.param("hung " * 6, "hung " * 5 + "hung!", id="hangs have a budget of their own"),
        pytest.param("hung hung hung+checkpoint " * 2 + "hung hung hung", "hung " * 9, id="which checkpoints refill"),
        pytest.param("crash hung crash", "crash hung no_progress", id="a hang between crashes is no progress"),
    ],
)
def test_only_crashes_and_time_limits_without_progress_end_a_run(ends: str, causes: str, host: Host):
    """A cause with an exclamation mark ends the run by its budget; - was recorded by the next attempt."""
    found = [host.attempt(how) for how in ends.split()]
    expected = causes.split()
    assert [cause or "-" for cause, _ in found] == [cause.rstrip("!") for cause in expected]
    stops = [cause == Cause.NO_PROGRESS or cause.endswith("!") for cause in expected]
    assert [action == "stop" for _, action in found] == stops


def test_the_sites_command_runs_once_when_a_run_has_ended_and_changes_nothing(host: Host):
    told = host.fake / "told"
    host.environ["TRAINYARD_ON_END"] = f'echo "$TRAINYARD_CAUSE in $TRAINYARD_RUN: $TRAINYARD_REASON" >>{told}; false'
    assert [host.attempt(how) for how in ("saved", "crash", "crash")][-1] == ("no_progress", "stop")
    (line,) = told.read_text().splitlines()
    assert line.startswith(f"no_progress in {host.run}: two crashes")
    assert "on_end of the cluster file: exit code 1" in (host.scripts / "7_0_log.err").read_text()


FOUR = "".join(f"a-{n} gpu:8 big idle\n" for n in range(4))


def fail_on(host: Host, rank: int, cause: str, message: str = "no") -> None:
    """Let a rank of the next attempt, on nodes a-0 and a-1 with two ranks each, record an error."""
    host.environ = {"SLURM_JOB_NODELIST": "a-0,a-1", "SLURM_JOB_NUM_NODES": "2"}
    (host.run / "errors").mkdir(exist_ok=True)
    error = {"rank": rank, "message": message, "cause": cause}
    (host.run / "errors" / f"7-{host.restarts}-rank{rank}.json").write_text(json.dumps(error, indent=2))


@pytest.mark.parametrize(
    ("rank", "cause", "message", "excluded"),
    [
        (2, "signal 11", "no", "a-1"),
        (1, "bug", "CUDA error: uncorrectable ECC error encountered", "a-0"),
        (3, "disk_error", "no", "a-1"),
        (0, "bug", "no column named x", ""),
        (0, "host_oom", "no", ""),
    ],
)
def test_the_node_of_a_rank_that_failed_is_excluded_unless_its_code_or_memory_did(
    rank: int, cause: str, message: str, excluded: str, host: Host
):
    host.set(nodes=FOUR, excluded="b-9")
    fail_on(host, rank, cause, message)
    assert host.attempt("crash") == ("crash", "requeue")
    change = [f"scontrol update jobid=7 excnodelist=b-9,{excluded}"] * bool(excluded)
    assert host.read_calls() == ["scontrol requeue 7", *change]
    assert [line.get("excluded") for line in host.read_lines()[2:]] == [excluded] * bool(excluded)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(FOUR.replace("a-2 gpu:8 big", "a-2 gpu:4 small").replace("a-3 gpu:8", "a-3 gpu:4"), id="others"),
        pytest.param(
            FOUR.replace("big idle", "big down*").replace("a-2 gpu:8 big down*", "a-2 gpu:8 big idle"), id="down"
        ),
        pytest.param("", id="no answer"),
    ],
)
def test_no_node_is_excluded_that_the_job_may_need(nodes: str, host: Host):
    host.set(nodes=nodes)
    fail_on(host, 0, "signal 9")
    assert host.attempt("crash") == ("crash", "requeue")
    assert host.read_calls() == ["scontrol requeue 7"]


def test_a_lost_node_is_excluded_at_the_next_start_that_is_ours_and_only_once(host: Host):
    host.set(nodes=FOUR)
    assert host.attempt("taken") == ("", "slurm")
    with (host.run / "slurm" / "attempts.jsonl").open("a") as log:
        log.write('{"event":"end","job":"7","attempt":0,"cause":"node_failure","reason":"lost: a-3"}\n')
    host.attempt("saved")
    assert host.read_calls() == ["scontrol requeue 7", "scontrol update jobid=7 excnodelist=a-3"]
    host.set(excluded="a-3")
    host.attempt("saved")
    assert host.read_calls()[2:] == ["scontrol requeue 7"]


def test_a_successor_excludes_the_node_too(host: Host):
    host.set(nodes=FOUR, refusals=f"{REFUSED}\n")
    fail_on(host, 2, "hung")
    assert host.attempt("crash") == ("crash", "requeue")
    script = host.scripts / "7_submission.sh"
    assert host.read_calls()[1] == f"sbatch --parsable --dependency=afterany:7 --exclude=a-1 {script}"
    assert [line["event"] for line in host.read_lines()] == ["start", "end", "successor", "exclude"]


def test_two_nodes_that_were_lost_together_leave_a_line_that_can_be_read(host: Host):
    host.attempt("taken")
    (host.bin / "sinfo").write_text("#!/bin/bash\necho 'trainyard a-0 down*'\necho 'trainyard a-1 down'\n")
    host.attempt("saved")
    assert host.read_lines()[1]["reason"] == "lost: a-0 a-1"


def test_a_slurm_that_does_not_answer_is_asked_until_it_requeues(host: Host):
    host.set(refusals=f"{AWAY}\n" * 3)
    assert host.attempt("crash") == ("crash", "requeue")
    assert host.read_calls() == ["scontrol requeue 7"] * 4
    assert not (host.run / "slurm" / "requeue-7-0").exists(), "it says that somebody still asks"
    assert len(host.read_lines()) == 2


def test_a_slurm_that_never_answers_ends_the_attempt_with_its_words(host: Host):
    host.environ = {"TRAINYARD_REQUEUE_S": "1"}
    host.set(refusals=f"{AWAY}\n" * 100)
    assert host.attempt("saved") == ("preempted", "stop")
    reason = host.read_lines()[-1]["reason"]
    assert reason == f"saved after SIGTERM; Slurm did not requeue the job within 1 s: {AWAY}"
    assert AWAY in (host.run / "slurm" / "requeue-7-0").read_text()


def test_a_job_that_an_earlier_request_has_requeued_is_not_asked_for_again(host: Host):
    """A slurmctld that was stopped does what it received meanwhile, though the caller had given up waiting."""
    host.set(refusals=f"{AWAY}\n" + f"{PENDING}\n" * 100)
    assert host.attempt("crash") == ("crash", "requeue")
    assert host.read_calls() == ["scontrol requeue 7"] * 2
    assert not (host.run / "slurm" / "requeue-7-0").exists()


def test_cancelling_ends_the_asking(host: Host):
    host.set(refusals=f"{AWAY}\n" * 100)
    (host.run / "slurm" / "cancelled").touch()
    assert host.attempt("saved") == ("cancelled", "stop")


@pytest.mark.parametrize("element", ["", "3"])
def test_where_slurm_refuses_to_requeue_a_successor_continues_the_run(element: str, host: Host):
    host.element = element
    suffix = f"_{element}" if element else ""
    host.write_submission_files("7", f"7{suffix}")
    host.set(refusals=f"{REFUSED}\n")
    inherited = {"SLURM_MEM_PER_CPU": "1", "SBATCH_EXPORT": "NONE", "SRUN_CPUS_PER_TASK": "4"}
    host.environ = {"SLURM_CONF": "/etc/slurm.conf", **inherited}
    assert host.attempt("crash") == ("crash", "requeue")
    array = f"--array={element} " if element else ""
    script = host.scripts / "7_submission.sh"
    assert host.read_calls() == [
        f"scontrol requeue 7{suffix}",  # with the id of the array, Slurm would requeue all of its elements
        f"sbatch --parsable --dependency=afterany:7{suffix} {array}{script}",
    ]
    assert (host.fake / "environ").read_text() == "SLURM_CONF=/etc/slurm.conf\n"
    assert (host.scripts / "13_submission.sh").read_text() == "#!/bin/bash\n"
    assert (host.scripts / f"13{suffix}_submitted.pkl").read_text() == f"the pickle of 7{suffix}"
    submission = {"scheduler": "slurm", "job": f"7{suffix}", "submitted": "2026-01-01T00:00:00+00:00"}
    (host.run / "slurm" / "submission.json").write_text(json.dumps(submission))
    snapshot = read_run(host.run)
    assert snapshot.slurm_job_id == f"13{suffix}"
    newest = snapshot.find_newest_attempt(f"13{suffix}")
    assert newest is not None and (newest.id, newest.successor) == (f"7{suffix}-0", f"13{suffix}")

    host.job, host.restarts, host.environ = "13", 0, {}  # the crash of the first one counts
    assert host.attempt("crash") == ("no_progress", "stop")
    assert [attempt.id for attempt in read_run(host.run).attempts] == [f"7{suffix}-0", f"13{suffix}-0"]


def test_if_no_successor_can_be_submitted_both_refusals_are_recorded(host: Host):
    host.set(refusals=f"{REFUSED}\n", no_sbatch='sbatch: error: not "here"\n')
    assert host.attempt("saved") == ("preempted", "stop")
    reason = host.read_lines()[-1]["reason"]
    assert reason == f"saved after SIGTERM; {REFUSED}; nor could a successor be submitted: sbatch: error: not here"


@pytest.mark.parametrize("said", ["13\n", "Welcome\n--> job 9 of 10\n13\nBye\n", "8 slots\n13;tower\n"])
def test_a_successor_is_known_whatever_a_site_prints_around_its_id(said: str, host: Host):
    host.set(refusals=f"{REFUSED}\n", next_job=said)
    assert host.attempt("crash") == ("crash", "requeue")
    assert host.read_lines()[-1]["successor"] == "13"


def test_a_successor_whose_id_cannot_be_read_is_not_left_in_the_queue(host: Host):
    ours, waits = f"{host.scripts}/7_submission.sh", "afterany:7(unfulfilled)"
    queue = [f"14 {waits} {ours}", f"15 {waits} /home/ann/own.sh", f"16 afterany:70(unfulfilled) {ours}"]
    host.set(
        refusals=f"{REFUSED}\n",
        next_job="submitted, have fun\n",
        queue="".join(f"trainyard {line}\n" for line in queue),
    )
    assert host.attempt("saved") == ("preempted", "stop")
    assert host.read_calls()[-1] == "scancel 14"
    assert "nor could a successor be submitted: submitted, have fun" in host.read_lines()[-1]["reason"]


def test_options_that_srun_does_not_know_end_the_run_with_its_sentence(host: Host):
    said = "srun: unrecognized option '--container-image=x'"
    assert host.source("begin") == 0
    with (host.scripts / "7_0_log.err").open("a") as log:
        log.write(f'{said}\nTry "srun --help" for more information\n')
    assert host.source("end", 1) == 1
    last = host.read_lines()[-1]
    assert (last["cause"], last["action"]) == ("user_error", "stop")
    assert last["reason"] == "srun did not start the ranks: unrecognized option '--container-image=x'"


SRUN_FOUND_NO_COMMAND = """\
slurmstepd-a100-0: error: execve(): apptainer: No such file or directory
slurmstepd-a100-0: error: execve(): apptainer: No such file or directory
srun: error: a100-0: tasks 0-1: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=26553699.0
"""
NODE_SETUP_FOUND_NO_COMMAND = """\
/usr/bin/bash: line 2: enroot: command not found
srun: error: a100-0: task 0: Exited with exit code 127
"""


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (2, SRUN_FOUND_NO_COMMAND, "exit code 2: apptainer was not found on a100-0"),
        (127, NODE_SETUP_FOUND_NO_COMMAND, "exit code 127: enroot was not found on a100-0"),
    ],
)
def test_a_command_that_a_node_does_not_have_is_no_error_of_the_user(code: int, said: str, reason: str, host: Host):
    ends = []
    for _ in range(2):
        assert host.source("begin") == 0
        with (host.scripts / "7_0_log.err").open("a") as log:
            log.write(said)
        assert host.source("end", code) == code
        ends.append(host.read_lines()[-1])
        host.restarts += 1
    assert [(end["cause"], end["action"]) for end in ends] == [("crash", "requeue"), ("no_progress", "stop")]
    assert ends[0]["reason"] == reason


def test_an_error_of_the_user_is_one_that_a_rank_has_noted(host: Host):
    assert host.source("begin") == 0
    (host.run / "slurm" / "left-7-0").write_text(f"{ExitCode.USER_ERROR}\n")
    assert host.source("end", 1) == ExitCode.USER_ERROR
    assert (host.read_lines()[-1]["cause"], host.read_lines()[-1]["action"]) == ("user_error", "stop")


@pytest.mark.parametrize(
    ("code", "said"), [(137, "killed by signal 9"), (255, "exit code 255"), (213, "exit code 213")]
)
def test_an_exit_code_of_srun_is_a_signal_only_if_there_is_one(code: int, said: str, host: Host):
    assert host.source("begin") == 0
    host.source("end", code)
    assert host.read_lines()[-1]["reason"] == said


def test_an_attempt_that_a_line_of_the_site_ended_says_so(host: Host):
    host.starts_ranks = False
    assert [host.attempt("crash") for _ in range(2)] == [("crash", "requeue"), ("no_progress", "stop")]
    assert host.read_lines()[-1]["reason"].endswith(
        "setup or node_setup in the cluster file ended it, before the ranks"
    )


def test_ranks_that_were_stopped_because_one_failed_were_not_preempted(host: Host):
    """srun tells the others to stop, and they save: three such attempts once looked like preemptions."""
    (host.run / "errors").mkdir()
    ends = []
    for restart in range(2):
        error = {"rank": 1, "message": 'no column\nnamed "x"', "cause": "bug"}
        (host.run / "errors" / f"7-{restart}-rank1.json").write_text(json.dumps(error, indent=2))
        ends.append(host.attempt("saved"))
    assert ends == [("crash", "requeue"), ("no_progress", "stop")]
    assert host.read_lines()[-1]["reason"].endswith("the last: crash, exit code 85: no column named x")


@pytest.mark.parametrize("cause", ["lost_peer", "device_oom"])
def test_an_error_that_did_not_end_its_rank_does_not_make_a_preemption_a_crash(cause: str, host: Host):
    (host.run / "errors").mkdir()
    (host.run / "errors" / "7-0-rank0.json").write_text(json.dumps({"message": "x", "cause": cause}, indent=2))
    assert host.attempt("saved") == ("preempted", "requeue")


def test_a_time_limit_is_recognized_while_slurm_does_not_answer(host: Host):
    (host.bin / "squeue").write_text(f"#!/bin/bash\necho '{AWAY}' >&2\nexit 1\n")
    (host.bin / "sleep").write_text("#!/bin/bash\n")
    host.environ = {"SLURM_JOB_END_TIME": subprocess.check_output(["date", "-d", "+60 seconds", "+%s"], text=True)[:-1]}
    assert host.attempt("limit") == ("time_limit", "requeue")


def test_out_of_memory_starts_again_without_a_budget_because_each_one_halves_the_micro_batch(tmp_path):
    host = Host(tmp_path)
    assert [host.attempt("full") for _ in range(4)] == [("device_oom", "requeue")] * 4
    assert host.attempt("crash") == ("crash", "requeue")
