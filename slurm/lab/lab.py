#!/usr/bin/env python3
"""A real Slurm on one machine, for experiments and tests: up, down, status. See README.md in this folder."""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS_PER_NODE = {"p100": 4, "rtx2080ti": 8, "a5000": 8, "a100": 8}  # node type -> simulated GPUs
LOCK = "lab.lock"  # locked while the lab changes; its existence marks the folder as a lab
DAEMONS_FILE = "lab.json"  # the daemons, rewritten after each start
WRITTEN = ("etc", "state", "spool", "run", "dev", "mysql", DAEMONS_FILE)  # files of a lab besides log/ and the lock
MARK = "TRAINYARD_SLURM_LAB"  # environment variable of the processes that the lab starts, and of their descendants


class LabError(Exception):
    """The lab cannot start or stop; the message gives the reason and the command to type."""


class PortTaken(LabError):
    """A daemon died because another process listens on its port."""


@dataclass(frozen=True)
class Options:
    """The options of `up`."""

    nodes: int = 2  # of each type
    accounting: bool = False  # run slurmdbd and a private MariaDB, so that sacct answers
    limits: bool = False  # with accounting: enforce the limits of accounts and QOS
    user_signal: bool = False  # preemption also sends the signal of `sbatch --signal`


@dataclass(frozen=True)
class Daemon:
    """A process that the lab started."""

    program: str
    name: str  # of its logs
    pid: int
    started: str  # field 22 of /proc/<pid>/stat: a reused pid has another value


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command; return 0, 1 (status: the lab is down) or 2 (failed; prints why)."""
    typed = _build_parser().parse_args(arguments)
    folder = Path(typed.dir).absolute()
    try:
        if typed.command == "up":
            options = Options(
                nodes=typed.nodes,
                accounting=typed.accounting or typed.limits,
                limits=typed.limits,
                user_signal=typed.user_signal,
            )
            seconds = up(folder, options, environ=environ)
            overview = f"{read_overview(folder, environ)}\n{_describe_next_commands(folder)}"
            print(f"slurm lab: up in {seconds:.1f} s, in {folder}\n{overview}")
        elif typed.command == "down":
            count = down(folder)
            print(f"slurm lab: down, {count} processes stopped, logs in {folder}" if count else "slurm lab: was not up")
        else:
            running = is_up(folder)
            print(f"slurm lab: {'up' if running else 'down'}, in {folder}")
            if not running:
                return 1
            print(f"{read_overview(folder, environ)}\n{_describe_next_commands(folder)}")
    except (LabError, OSError, subprocess.TimeoutExpired) as error:
        print(f"slurm lab: {error}", file=sys.stderr)
        return 2
    return 0


def up(folder: Path, options: Options, *, environ: Mapping[str, str]) -> float:
    """Start a fresh cluster, replacing one that runs in this folder; return the seconds it took."""
    begin = time.monotonic()
    programs = _find_programs(options.accounting, environ)
    _check_folder(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _hold_lock(folder):
        for last in (False, False, True):
            _end_lab(folder)
            shutil.rmtree(folder / "log", ignore_errors=True)
            try:
                _Startup(folder, options, programs, {**make_client_environ(folder, environ), MARK: str(folder)}).run()
                break
            except PortTaken:  # by another process, such as another checkout's lab, since we checked
                _end_lab(folder)
                if last:
                    raise
            except BaseException:
                _end_lab(folder)
                raise
    return time.monotonic() - begin


def down(folder: Path) -> int:
    """Stop the cluster and all its Slurm jobs, keep only its logs; return how many processes were stopped."""
    if not folder.exists() or not any(folder.iterdir()):
        return 0
    with _hold_lock(folder):
        return _end_lab(folder)


def is_up(folder: Path) -> bool:
    """Return whether all daemons of the lab are running."""
    daemons = _read_daemons(folder)
    return any(daemon.program == "slurmd" for daemon in daemons) and all(map(_is_alive, daemons))


def read_overview(folder: Path, environ: Mapping[str, str]) -> str:
    """Return the table of partitions as Slurm prints it."""
    command = ["sinfo", "--format=%12P %.10l %.5D %.6t  %20N %G"]
    done = subprocess.run(
        command,
        env=make_client_environ(folder, environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        raise LabError(f"sinfo does not answer: {done.stderr.strip()}\n{_read_tail(folder, 'slurmctld')}")
    return done.stdout.rstrip()


def make_client_environ(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Slurm's commands talk to this lab and to no other Slurm."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SUBMITIT_", MARK)
    others = {name: value for name, value in environ.items() if not name.startswith(prefixes)}
    return {**others, "SLURM_CONF": str(folder / "etc" / "slurm.conf")}


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start a fresh cluster")
    start.add_argument("--nodes", type=int, default=2, choices=range(1, 9), metavar="1..8", help="nodes of each type")
    start.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB, so that sacct answers")
    start.add_argument("--limits", action="store_true", help="--accounting, and enforce limits of accounts and QOS")
    start.add_argument("--user-signal", action="store_true", help="preemption sends the signal of sbatch --signal")
    others = [commands.add_parser("down", help="stop it"), commands.add_parser("status", help="show it")]
    for command in [start, *others]:
        command.add_argument("--dir", default=str(REPOSITORY / ".slurm-lab"), help="the lab's folder (%(default)s)")
    return parser


def _describe_next_commands(folder: Path) -> str:
    is_default = folder == REPOSITORY / ".slurm-lab"
    down_command = "make slurm-lab-down" if is_default else f"python {Path(__file__).resolve()} down --dir {folder}"
    return (
        "Type next:\n"
        f"  export SLURM_CONF={folder / 'etc' / 'slurm.conf'}\n"
        "  make submit JOB=fingerprint_demo GPUS=2 HW=a100 CLUSTER=lab\n"
        f"  {down_command}"
    )


# ------------------------------------------------------------------------------------------------ checks before start


def _find_programs(accounting: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the daemons' paths. They are in /usr/sbin, which is not on every user's PATH."""
    path = f"{environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    needed = ["munged", "slurmctld", "slurmd", "sinfo"]
    packages = "slurmctld slurmd slurm-client"
    if accounting:
        needed += ["slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults"]
        packages += " slurmdbd mariadb-server-core mariadb-client-core"
    programs = {name: shutil.which(name, path=path) for name in needed}
    missing = [name for name in needed if programs[name] is None]
    if missing:
        raise LabError(f"{', '.join(missing)}: not found on this machine. Type: apt-get install {packages}")
    return {name: program for name, program in programs.items() if program is not None}


def _check_folder(folder: Path) -> None:
    # Below it slurmstepd binds spool/<node>/<node>_<job>.<step>, and a Unix socket's path has at most 107 bytes.
    longest = 107 - len("/spool/rtx2080ti-7/rtx2080ti-7_60000000.4294967295")
    if len(str(folder)) > longest:
        raise LabError(f"{folder}: {len(str(folder))} characters, but Unix sockets below it allow {longest}: use --dir")
    invalid = re.findall(r"[^A-Za-z0-9._/+@-]", str(folder))
    if invalid:
        raise LabError(f"{folder}: slurm.conf does not allow {invalid[0]!r} in a path: use --dir")


def _get_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise LabError(f"user {os.getuid()} has no name on this machine, and Slurm needs one (/etc/passwd)") from None


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Lock the folder, which must be empty or a lab; the lock is released if its holder is killed."""
    names = {path.name for path in folder.iterdir()}
    if names and LOCK not in names:
        raise LabError(f"{folder}: not empty and not a lab (no {LOCK} in it): use an empty --dir")
    with (folder / LOCK).open("a") as lock:
        deadline = time.monotonic() + 60
        while not _try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                raise LabError(
                    f"{folder}: another lab.py has been working on it for a minute; see: fuser -v {folder / LOCK}"
                )
            time.sleep(0.05)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _find_free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports, below Linux's ephemeral ports."""
    for _ in range(100):
        first = random.randrange(10000, 30000 - count)
        if all(map(_is_free, range(first, first + count))):
            return first
    raise LabError(f"127.0.0.1: found no {count} consecutive free ports between 10000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemons do: TIME_WAIT counts as free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# ------------------------------------------------------------------------------------------------ the start


class _Startup:
    """One start of a cluster in a locked, empty folder."""

    def __init__(self, folder: Path, options: Options, programs: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.options = options
        self.programs = programs
        self.environ = environ
        self.user = _get_user()
        self.nodes = [f"{kind}-{index}" for kind in GPUS_PER_NODE for index in range(options.nodes)]
        self.port = _find_free_ports(3 + len(self.nodes))  # slurmctld, slurmdbd, mariadbd, one per slurmd
        self.daemons: list[Daemon] = []

    def run(self) -> None:
        self._write()
        self._start_munged()
        if self.options.accounting:
            self._start_database()
        self._start("slurmctld", "-D", "-c")
        self._wait_until(lambda: _is_listening(self.port), "slurmctld", limit_s=30)
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node, name=f"slurmd.{node}")
        self._wait_until(self._are_all_idle, "slurmctld", limit_s=60)

    def _write(self) -> None:
        for name in ("etc", "state", "run", "dev", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        # Slurm accepts only character devices as GPUs, numbered by their trailing digits. A link to /dev/null is
        # one, needs no privilege, and can be shared by all nodes.
        for index in range(max(GPUS_PER_NODE.values())):
            (self.folder / "dev" / f"gpu{index}").symlink_to("/dev/null")
        etc = self.folder / "etc"
        (etc / "slurm.conf").write_text(self._render_slurm_conf())
        (etc / "gres.conf").write_text(self._render_gres_conf())
        # Without this line slurmd detects a plugin and dies on machines with only cgroup v2, or without cgroups.
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        _write_secret(etc / "munge.key", secrets.token_bytes(128))

    def _start_munged(self) -> None:
        # A private munge: with auth/none every user of this machine could run jobs as us. --force skips its checks that
        # nobody else can write above its key and that everybody can reach its socket; the folder is closed to others.
        run = self.folder / "run"
        self._start(
            "munged",
            "--foreground",
            "--force",
            "--num-threads=2",
            f"--key-file={self.folder / 'etc' / 'munge.key'}",
            f"--log-file={self.folder / 'log' / 'munged.log'}",
            f"--pid-file={run / 'munged.pid'}",
            f"--seed-file={run / 'munged.seed'}",
            f"--socket={run / 'munge.socket'}",
        )
        self._wait_until((run / "munge.socket").exists, "munged", limit_s=30)

    def _start_database(self) -> None:
        run, etc, data = self.folder / "run", self.folder / "etc", self.folder / "mysql"
        password = secrets.token_hex(16)
        _write_secret(etc / "slurmdbd.conf", self._render_slurmdbd_conf(password).encode())
        accounts = (
            f"CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
        )
        _write_secret(etc / "accounts.sql", accounts.encode())
        as_root = ["--user=root"] if os.getuid() == 0 else []  # MariaDB refuses to run as root unless told to
        # Its root user connects only through the Unix socket, as us; over TCP only slurmdbd connects, with a password.
        self._run("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db", *as_root,
                  "--auth-root-authentication-method=socket", f"--auth-root-socket-user={self.user}")  # fmt: skip
        self._start(
            "mariadbd",
            "--no-defaults",
            f"--datadir={data}",
            f"--socket={run / 'mariadb.socket'}",
            f"--pid-file={run / 'mariadb.pid'}",
            f"--init-file={etc / 'accounts.sql'}",
            "--bind-address=127.0.0.1",
            f"--port={self.port + 2}",
            "--skip-name-resolve",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",  # slurmdbd requires it
            *as_root,
        )
        self._wait_until(lambda: _is_listening(self.port + 2), "mariadbd", limit_s=60)
        self._start("slurmdbd", "-D")
        self._wait_until(lambda: _is_listening(self.port + 1), "slurmdbd", limit_s=60)

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        name = name or program
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [self.programs[program], *arguments],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )
        self.daemons.append(Daemon(program, name, process.pid, _read_start_time(process.pid) or "dead already"))
        partial = self.folder / f"{DAEMONS_FILE}.new"
        partial.write_text(json.dumps([asdict(daemon) for daemon in self.daemons], indent=1))
        partial.replace(self.folder / DAEMONS_FILE)

    def _run(self, program: str, *arguments: str) -> None:
        out = self.folder / "log" / f"{program}.out"
        with out.open("ab") as log:
            command = [self.programs[program], *arguments]
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=120,
            )
        if done.returncode:
            raise LabError(
                f"{program} failed with code {done.returncode}. Its log:\n{_read_tail(self.folder, program)}"
            )

    def _wait_until(self, ready: Callable[[], bool], name: str, *, limit_s: float) -> None:
        """Wait until `ready`, which depends on daemon `name`; raise as soon as any daemon has died."""
        deadline = time.monotonic() + limit_s
        while not ready():
            for daemon in self.daemons:
                if not _is_alive(daemon):
                    log = _read_tail(self.folder, daemon.name)
                    error = PortTaken if "ddress already in use" in log else LabError
                    raise error(f"{daemon.name} died. Its log:\n{log}")
            if time.monotonic() > deadline:
                raise LabError(f"{name} is not ready after {limit_s:.0f} s. Its log:\n{_read_tail(self.folder, name)}")
            time.sleep(0.02)

    def _are_all_idle(self) -> bool:
        done = subprocess.run(
            [self.programs["sinfo"], "-h", "-N", "-o", "%N %t"],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        state = dict(line.split() for line in done.stdout.splitlines())
        return sorted(state) == sorted(self.nodes) and set(state.values()) == {"idle"}

    def _render_slurm_conf(self) -> str:
        count = self.options.nodes
        first_port = {kind: self.port + 3 + index * count for index, kind in enumerate(GPUS_PER_NODE)}
        nodes = [
            f"NodeName={kind}-[0-{count - 1}] NodeHostname=localhost NodeAddr=127.0.0.1 "
            f"Port=[{first_port[kind]}-{first_port[kind] + count - 1}] Gres=gpu:{kind}:{gpus} Feature={kind}"
            for kind, gpus in GPUS_PER_NODE.items()
        ]
        partitions = [
            f"PartitionName={kind} Nodes={kind}-[0-{count - 1}] Default={'YES' if kind == 'p100' else 'NO'}"
            for kind in GPUS_PER_NODE
        ]
        return _SLURM_CONF.format(
            folder=self.folder,
            user=self.user,
            port=self.port,
            controller="SlurmctldParameters=preempt_send_user_signal\n" if self.options.user_signal else "",
            # Slurm job ids grow across restarts, so that files of an earlier lab's job are never mistaken for those
            # of a new one: by 8 per second; they wrap after 87 days.
            first_job=1000 + int(time.time() * 8) % 60_000_000,
            accounting=_ACCOUNTING.format(folder=self.folder, port=self.port + 1)
            + "\nAccountingStorageEnforce=limits,qos" * self.options.limits
            if self.options.accounting
            else _NO_ACCOUNTING,
            nodes="\n".join(nodes),
            partitions="\n".join(partitions),
            last=count - 1,
        )

    def _render_gres_conf(self) -> str:
        lines = [
            f"NodeName={kind}-[0-{self.options.nodes - 1}] Name=gpu Type={kind} "
            f"File={self.folder / 'dev'}/gpu[0-{gpus - 1}]\n"
            for kind, gpus in GPUS_PER_NODE.items()
        ]
        return "".join(lines)

    def _render_slurmdbd_conf(self, password: str) -> str:
        return _SLURMDBD_CONF.format(
            folder=self.folder, user=self.user, port=self.port + 1, storage_port=self.port + 2, password=password
        )


_SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job restarts only after cred_expire + 1 s (120 s by default). Not below KillWait + 4: its old step may
# still be alive on the node then, and Slurm drains the node because of the duplicate.
AuthInfo=socket={folder}/run/munge.socket,cred_expire=6
KillWait=2
# Without these every daemon listens on all interfaces.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# Nodes may claim more cores and memory than the machine has.
SlurmdParameters=config_overrides
{controller}ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# With 2, a node that a test has just set DOWN would return to service.
ReturnToService=1
SlurmctldTimeout=20
SlurmdTimeout=20
MinJobAge=600
MaxArraySize=10001
MaxJobCount=20000
FirstJobId={first_job}
{accounting}
NodeName=DEFAULT CPUs=16 RealMemory=64000 State=UNKNOWN
{nodes}
PartitionName=DEFAULT MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1
{partitions}
PartitionName=a100-urgent Nodes=a100-[0-{last}] PriorityTier=10
PartitionName=a100-grace Nodes=a100-[0-{last}] GraceTime=20
PartitionName=short Nodes=p100-[0-{last}] MaxTime=1 DefaultTime=1
"""

_NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none"

_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
# With munge, this "password" is the path of its socket.
AccountingStoragePass={folder}/run/munge.socket
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux"""

_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _read_tail(folder: Path, name: str, lines: int = 12) -> str:
    """Return the last lines that a daemon printed (Slurm's daemons also print their log), or else of its log."""
    logs = [folder / "log" / f"{name}{suffix}" for suffix in (".out", ".log")]
    texts = [text for log in logs if log.exists() and (text := log.read_text(errors="replace").strip())]
    return "\n".join(f"  {line}" for line in texts[0].splitlines()[-lines:]) if texts else "  (empty)"


# ------------------------------------------------------------------------------------------------ the stop


def _end_lab(folder: Path) -> int:
    """Stop every process of the lab and delete its files except the logs; return the number of processes."""
    count = _terminate(folder) + _kill_strays(folder)
    for name in (*WRITTEN, f"{DAEMONS_FILE}.new"):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return count


def _terminate(folder: Path) -> int:
    """Send SIGTERM to the recorded daemons, last started first; `_kill_strays` kills those that do not exit."""
    daemons = [daemon for daemon in reversed(_read_daemons(folder)) if _is_alive(daemon)]
    for _, group in itertools.groupby(daemons, key=lambda daemon: daemon.program):
        terminated = list(group)
        for daemon in terminated:
            _send_signal(daemon.pid, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while any(map(_is_alive, terminated)) and time.monotonic() < deadline:
            time.sleep(0.01)
    return len(daemons)


def _kill_strays(folder: Path) -> int:
    """Kill processes that outlive the daemons, such as slurmstepd and jobs, and daemons that were never recorded."""
    killed: set[int] = set()
    deadline = time.monotonic() + 10
    while strays := _find_strays(folder):
        if time.monotonic() > deadline:
            raise LabError(f"these processes survive SIGKILL: {sorted(strays)}; see: ps -f -p <pid>")
        for pid in strays:
            _send_signal(pid, signal.SIGKILL)
        killed |= strays
        time.sleep(0.02)
    return len(killed)


def _find_strays(folder: Path) -> set[int]:
    """Return the lab's processes, recognized by their environments, with all their descendants."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    children: dict[int, list[int]] = {}
    for pid in pids:
        children.setdefault(_read_parent(pid), []).append(pid)
    strays: set[int] = set()
    to_visit = [pid for pid in pids if _belongs_to_lab(pid, folder)]
    while to_visit:
        pid = to_visit.pop()
        if pid not in strays and pid != os.getpid():
            strays.add(pid)
            to_visit += children.get(pid, [])
    return strays


def _belongs_to_lab(pid: int, folder: Path) -> bool:
    """Return whether a process is a daemon of this lab, in one of its jobs, or an srun that waits for one.

    SLURM_CONF alone proves nothing: people export it in their shells.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # it has exited, or belongs to another user
        return False
    if f"{MARK}={folder}".encode() in variables:
        return True
    in_job = program == "srun" or any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
    return in_job and f"SLURM_CONF={folder / 'etc' / 'slurm.conf'}".encode() in variables


def _read_daemons(folder: Path) -> list[Daemon]:
    path = folder / DAEMONS_FILE
    return [Daemon(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def _is_alive(daemon: Daemon) -> bool:
    return _read_start_time(daemon.pid) == daemon.started


def _read_start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it is dead."""
    fields = _read_stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def _read_parent(pid: int) -> int:
    fields = _read_stat(pid)
    return 0 if fields is None else int(fields[1])


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third on; the second, the name, may contain ' ' and ')'."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
