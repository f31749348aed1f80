"""A bundle for machines without network: it trains, and one changed byte is noticed."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.container.conftest import Image, run_script
from tests.container.test_targets import IMAGE, read_pins

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(image: Image, sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the SIF."""
    out = tmp_path_factory.mktemp("bundle") / "trainyard.tar"
    done = run_script(*IMAGE, "bundle", "cpu", out, "--sif", sif, timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_a_bundle_is_verified_and_trains_without_network(bundle: Path):
    done = run_script(*IMAGE, "verify-bundle", bundle, timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained  4 of 4 steps" in done.stdout and done.stdout.endswith("is intact, and trains.\n")
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name], "left behind"


def test_the_bill_of_materials_lists_every_package(bundle: Path):
    with tarfile.open(bundle) as tar:
        bill = json.load(tar.extractfile("sbom.json"))
        names = tar.getnames()
    listed = {part["name"]: part["version"] for part in bill["components"] if part["purl"].startswith("pkg:pypi/")}
    assert listed.pop("pip") and listed == read_pins("cpu.lock")
    assert any(part["purl"].startswith("pkg:deb/debian/libc6@") for part in bill["components"])
    assert {"data/index.h5", "image.sif", "code/containers/cpu.lock", "code/src/trainyard/cli/__init__.py"} <= set(
        names
    )


@pytest.mark.parametrize("member", ["code/src/trainyard/train/step.py", "manifest.json"])
def test_one_changed_byte_is_found(bundle: Path, member: str):
    with tarfile.open(bundle) as tar:
        place = tar.getmember(member).offset_data + 200
    with bundle.open("r+b") as file:
        file.seek(place)
        before = file.read(1)
        file.seek(place)
        file.write(bytes([before[0] ^ 1]))
    said = run_script(*IMAGE, "verify-bundle", bundle, timeout_s=1800)
    with bundle.open("r+b") as file:
        file.seek(place)
        file.write(before)
    assert said.returncode == 2, said.stdout + said.stderr
    assert said.stderr == f"{bundle}: differs from its list of hashes: {member} was changed. Copy it again.\n"


def test_a_file_that_is_not_a_bundle_is_refused(tmp_path: Path):
    (tmp_path / "x.tar").write_bytes(b"no tar")
    for name in ("x.tar", "absent.tar"):
        said = run_script(*IMAGE, "verify-bundle", tmp_path / name)
        assert said.returncode == 2 and said.stderr.startswith(f"{tmp_path / name}: "), said.stderr
