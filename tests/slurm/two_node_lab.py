"""A lab whose two nodes have network namespaces, host names and addresses of their own."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.conftest import Lab, make_lab_environ, run_lab_command
from tests.two_nodes import ADDRESSES

_OTHER_NODES = re.compile(r"(NodeName|PartitionName)=.*(p100|rtx2080ti|a5000)-\[0-1\]|PartitionName=a100-")


@dataclass(frozen=True)
class TwoNodeLab(Lab):
    """Its nodes are a100-0, whose host also runs slurmctld, and a100-1; its commands run on the first host."""

    enter: list[str]  # start of a command line that runs a command there

    def try_run(
        self, *command: str | Path, cwd: Path | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that may fail."""
        return super().try_run(*self.enter, *command, cwd=cwd, timeout_s=timeout_s)


@contextmanager
def run_two_node_lab(lab: Path, hosts: list[list[str]]) -> Iterator[TwoNodeLab]:
    """Start lab.py's Slurm, then two nodes of it again on hosts of `make_two_nodes`, and stop it afterwards.

    Args:
        lab: folder with a short path.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        _run_lab_command("up", lab)
        _spread(lab, hosts, started)
        yield TwoNodeLab(lab, make_lab_environ(lab), hosts[0])
    finally:
        _run_lab_command("down", lab)
        for daemon in started:
            daemon.wait()


def _run_lab_command(command: str, lab: Path) -> None:
    done = run_lab_command(command, lab)
    assert done.returncode == 0, done.stderr


def _spread(lab: Path, hosts: list[list[str]], started: "list[subprocess.Popen[bytes]]") -> None:
    """Start slurmctld and two of the slurmd again, with a configuration that names the hosts' addresses."""
    daemons = json.loads((lab / "lab.json").read_text())
    for daemon in daemons:
        if daemon["program"] != "munged":
            os.kill(daemon["pid"], signal.SIGTERM)
            _wait_until_gone(daemon["pid"])
    _write_configuration(lab / "etc" / "slurm.conf")
    environ = {**make_lab_environ(lab), "TRAINYARD_SLURM_LAB": str(lab)}  # lab.py ends what has this
    for enter, command in (
        (hosts[0], ["slurmctld", "-D", "-c"]),
        *((hosts[node], ["slurmd", "-D", "-N", f"a100-{node}"]) for node in range(2)),
    ):
        path = f"{environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
        with (lab / "log" / f"{command[0]}-{command[-1]}.out").open("wb") as out:
            words, found = [*enter, *command], {**environ, "PATH": path}
            started.append(subprocess.Popen(words, env=found, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
    deadline = time.monotonic() + 60
    command = [*hosts[0], "sinfo", "-h", "-N", "-o", "%T"]
    while (done := subprocess.run(command, env=environ, capture_output=True, text=True)).stdout.split() != ["idle"] * 2:
        assert time.monotonic() < deadline, f"the nodes are not idle: {done.stdout}{done.stderr}"
        time.sleep(0.1)


def _write_configuration(path: Path) -> None:
    text = path.read_text().replace("SlurmctldHost=localhost(127.0.0.1)", f"SlurmctldHost=node0({ADDRESSES[0]})")
    text = re.sub("^CommunicationParameters=.*", "", text, flags=re.MULTILINE)  # there, hosts' names are loopback
    nodes = re.search(r"^NodeName=a100-\[0-1\] .* Port=\[(\d+)-(\d+)\] (.*)$", text, re.MULTILINE)
    assert nodes, text
    lines = [line for line in text.splitlines() if not _OTHER_NODES.match(line) and line != nodes[0]]
    at = next(index for index, line in enumerate(lines) if line.startswith("PartitionName=DEFAULT"))
    lines[at:at] = [
        f"NodeName=a100-{node} NodeHostname=node{node} NodeAddr={ADDRESSES[node]} Port={nodes[1 + node]} {nodes[3]}"
        for node in range(2)
    ]
    path.write_text("\n".join(lines) + "\n")


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while (stat := Path(f"/proc/{pid}/stat")).exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, pid
        time.sleep(0.02)
