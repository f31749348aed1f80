"""The CPU image: what it contains, what it does not, and that training in it stops and resumes as anywhere."""

import hashlib
import json
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from tests.container.conftest import ROOT, Image, find_built, run_script, sealed
from tests.container.test_targets import IMAGE, TARGETS, read_pins, table
from tests.training import FAMILIES, find_differences, load_state, read_run_metrics
from tests.waiting import wait_until
from trainyard import __version__


def test_it_contains_the_locked_packages_and_our_code(image: Image):
    printed = image.python(
        "import json, torch, torchvision, h5py, hydra, submitit, nvidia.dali, trainyard\n"
        "from importlib.metadata import distributions\n"
        "found = {d.metadata['Name'].lower().replace('_', '-').replace('.', '-'): d.version for d in distributions()}\n"
        "print(json.dumps([trainyard.__version__, found]))"
    )
    version, found = json.loads(printed)
    assert version == __version__
    assert found.items() >= read_pins("cpu.lock").items()
    assert set(found) - set(read_pins("cpu.lock")) == {"pip"}


def test_its_bill_of_materials_lists_every_package_and_says_what_is_left_out(image: Image):
    text = image.python("print(open('/opt/trainyard/sbom.json').read())")
    parts = json.loads(text)["components"]
    python = {part["name"]: part for part in parts if part["purl"].startswith("pkg:pypi/")}
    assert {name: part["version"] for name, part in python.items() if name != "pip"} == read_pins("cpu.lock")
    assert [name for name, part in python.items() if not part["hashes"]] == ["pip"]
    assert {"triton", "nvidia-cusolver"} <= {name for name, part in python.items() if part["scope"] == "excluded"}
    assert any(part["purl"].startswith("pkg:deb/debian/libc6@") for part in parts)
    # Another program's reading of it: pip install 'cyclonedx-python-lib[json-validation]'
    json_reader = pytest.importorskip("cyclonedx.validation.json").JsonStrictValidator
    assert json_reader(pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_5).validate_str(text) is None


def test_training_in_it_gives_the_bits_of_an_environment_that_leaves_nothing_out(
    image: Image, tmp_path: Path, record_property
):
    inside, outside = (command(tmp_path / name, "3ep") for name in ("inside", "outside"))
    runs = []
    for name, words in (("inside", inside), ("outside", [sys.executable, "-m", "trainyard", "run", *outside[4:]])):
        done = run_script(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(tmp_path / name / "stripes" / "r")
    assert find_differences(*map(load_state, runs)) == []
    assert read_run_metrics(runs[0]) == read_run_metrics(runs[1])
    weights = [value for _, value in sorted(load_state(runs[0]).items()) if isinstance(value, torch.Tensor)]
    record_property("sha256", hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights)).hexdigest())


def test_it_has_the_libraries_with_which_nccl_reaches_infiniband(image: Image):
    """That they find an adapter, and NCCL its plugins, shows only where there is one."""
    printed = image.python(
        "import ctypes, json; from pathlib import Path\n"
        "for name in ('libibverbs.so.1', 'librdmacm.so.1'): ctypes.CDLL(name)\n"
        "drivers = sorted(Path('/usr/lib').glob('*/libibverbs/*.so'))\n"
        "for path in drivers: ctypes.CDLL(path)\n"
        "listed = [path.read_text().split()[1] for path in Path('/etc/libibverbs.d').iterdir()]\n"
        "print(json.dumps([sorted(listed), sorted(path.name[3:].split('-rdmav')[0] for path in drivers)]))"
    )
    listed, found = json.loads(printed)
    assert listed == found and {"mlx4", "mlx5", "efa"} <= set(found)


def test_it_runs_as_any_user_without_network_and_read_only(image: Image):
    printed = image.python(
        "import os, socket, tempfile\n"
        "def may(do):\n"
        "    try: do()\n"
        "    except OSError as error: return type(error).__name__ + ' ' + str(error.errno)\n"
        "    return 'done'\n"
        "print(os.getuid(), os.getgid(), may(lambda: socket.create_connection(('192.0.2.1', 80), 3)),\n"
        "      may(lambda: open('/workspace/x', 'w')), may(lambda: open('/tmp/x', 'w')), sep=';')"
    )
    assert printed.strip() == "10001;10001;OSError 101;OSError 30;done"


def test_it_contains_nothing_of_the_build_machine(image: Image):
    found = image.python(
        "from pathlib import Path\n"
        "places = ['/etc/pip.conf', '/run/secrets', '/run/wheelhouse', '/root/.cache', '/root/.config', '/tmp']\n"
        "places = map(Path, places)\n"
        "print([str(p) for p in places if p.is_file() or (p.is_dir() and any(p.iterdir()))])",
        *("--user", "0:0", "--cap-add", "DAC_OVERRIDE"),
    )
    assert found.strip() == "[]"
    recorded = image.query("image", "inspect", image.name) + image.query("history", "--no-trunc", image.name)
    assert [
        word for word in ("PIP_CERT=", "PIP_INDEX", "find-links", "/certs/", str(Path.home() / ".")) if word in recorded
    ] == []


def test_its_labels_name_target_commit_and_lock(image: Image):
    from local_image import hash_file

    labels = image.engine.labels(image.name)
    assert labels["io.trainyard.target"] == "cpu" and labels["io.trainyard.torch"] == read_pins("cpu.lock")["torch"]
    assert labels["io.trainyard.lock"] == hash_file(ROOT / "containers" / "cpu.lock")
    assert len(labels["org.opencontainers.image.revision"].removesuffix("-dirty")) == 40
    about = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert "bookworm" in about["base.name"] and re.fullmatch(r"sha256:[0-9a-f]{64}", about["base.digest"])
    assert about["version"] == __version__ and datetime.fromisoformat(about["created"]) <= datetime.now(UTC)
    assert re.match(r"https?://|ssh://|[\w.]+@|unknown$", about["source"]), about["source"]


def test_a_file_in_the_current_folder_does_not_shadow_a_module(image: Image, tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise SystemExit('not torch')\n")
    printed = image.python("import torch; print(torch.__file__)", "--volume", f"{tmp_path}:/here", "--workdir", "/here")
    assert printed.startswith("/opt/venv/")


@pytest.mark.long
def test_it_can_compile(image: Image):
    code = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist())"
    assert image.python(code).strip() == "[1.0, 1.0, 1.0]"


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "cpu"])
def test_its_torch_has_kernels_for_its_cards(engine, target: str):
    image = find_built(engine, target)
    flags = image.python("import torch; print(torch._C._cuda_getArchFlags())").split()
    assert flags == [f"sm_{sm}" for sm in table()["sm"][target].split()]


def test_an_image_older_than_its_lock_is_refused(image: Image, checkout: Path):
    with (checkout / "containers" / "cpu.lock").open("a") as lock:
        lock.write("# another line\n")
    said = run_script(sys.executable, checkout / "containers" / "image.py", "run", "cpu", "stripes")
    assert said.returncode == 2
    assert said.stderr.endswith("containers/cpu.lock than this checkout's. Type: make image HW=cpu\n")


def test_a_run_stopped_by_docker_resumes_to_the_same_bits(image: Image, tmp_path: Path):
    whole, stopped = (command(tmp_path / name) for name in ("whole", "stopped"))
    assert run_script(*whole).returncode == 0
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(stopped, cwd=ROOT, stdout=said, stderr=said)
        wait_for_step(tmp_path / "stopped", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 85, (tmp_path / "said").read_text()
    again = run_script(*stopped)
    assert again.returncode == 0, again.stdout + again.stderr
    runs = [tmp_path / name / "stripes" / "r" for name in ("whole", "stopped")]
    events = [json.loads(line)["event"] for line in (runs[1] / "events.jsonl").read_text().splitlines()]
    assert events.count("resume") == 1
    assert find_differences(*map(load_state, runs)) == []
    assert read_run_metrics(runs[0]) == read_run_metrics(runs[1])


def test_two_ranks_train_where_their_launcher_is_process_1_for_a_user_without_name_or_home(image: Image):
    """As Kubernetes' `command:` and docker's --entrypoint start it; sealed, with this checkout's code."""
    words = ["run", "stripes", "--jobs", "/workspace/tests/families", "--runs", "/tmp/runs", "--cpu-ranks", "2"]
    options = [*sealed(), "--user", "12345:12345", "--env", "HOME=", "--volume", f"{ROOT}:/workspace:ro"]
    options += ["--env", "PYTHONPATH=/workspace/src", "--entrypoint", "python", image.name, "-m", "trainyard"]
    said = image.query("run", "--rm", "--pull", "never", *options, *words, "data.cache=/tmp/data", "max_duration=2st")
    assert "stripes" in said and "done" in said


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_suite_passes_in_it(image: Image, record_property):
    done = run_script(*IMAGE, "test", "cpu", timeout_s=3500)
    *_, closing = done.stdout.splitlines()
    record_property("closing line", closing)
    record_property(
        "skipped", sorted({line.partition(": ")[2] for line in re.findall("^SKIPPED .*", done.stdout, re.M)})
    )
    assert done.returncode == 0, done.stdout + done.stderr


def command(runs: Path, duration: str = "20ep") -> list[str]:
    """Return the command that trains a small job in the CPU image for some seconds."""
    words = ["run", "cpu", "stripes", "--jobs", FAMILIES, "--runs", runs, "--name", "r"]
    options = [f"data.cache={runs.parent / runs.name}/cache", f"max_duration={duration}"]
    return [str(word) for word in (*IMAGE, *words, *options)]


def wait_for_step(runs: Path, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the run has trained a few steps."""
    metrics = runs / "stripes" / "r" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5, "five steps", limit_s=120, process=process
    )
