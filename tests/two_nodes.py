"""Two nodes with addresses of their own on one machine: network namespaces joined by a veth pair."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.91.7.1", "10.91.7.2")
_WAIT = "read line"  # keeps a namespace until its standard input is closed


@contextmanager
def make_two_nodes(folder: Path) -> Iterator[list[list[str]]]:
    """Yield, for each node, the start of a command line that runs a command there.

    Each node's host name (node0, node1) maps to 127.0.1.1 in its /etc/hosts, as Debian's installer leaves it.

    Raises:
        subprocess.CalledProcessError: this machine does not permit it.
    """
    nodes: list[subprocess.Popen[str]] = []
    try:
        for index in range(2):
            hosts = folder / f"hosts{index}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{index}\n")
            script = (
                f"mount --bind {hosts} /etc/hosts && hostname node{index} && ip link set lo up && echo ready && {_WAIT}"
            )
            command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script]
            node = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            nodes.append(node)
            assert node.stdout is not None and node.stderr is not None
            if node.stdout.readline() != "ready\n":
                raise subprocess.CalledProcessError(node.wait(), command, stderr=node.stderr.read())
        enter = [["nsenter", f"--target={node.pid}", "--net", "--uts", "--mount"] for node in nodes]
        pair = ["ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", str(nodes[1].pid)]
        _run([*enter[0], *pair])
        for index, address in enumerate(ADDRESSES):
            _run([*enter[index], "ip", "address", "add", f"{address}/24", "dev", f"veth{index}"])
            _run([*enter[index], "ip", "link", "set", f"veth{index}", "up"])
        yield enter
    finally:
        for node in nodes:
            node.communicate()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
