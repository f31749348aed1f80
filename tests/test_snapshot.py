"""The code that a submission copies: the families, and what they import from next to their folder."""

from pathlib import Path

import pytest

from tests.test_secrets import LINES
from trainyard.errors import UserError
from trainyard.launch.submit import find_imported_packages, snapshot_code

FILES = {
    "jobs/tab/module.py": "import numpy\nimport mylab.net\nfrom helpers import say\n",
    "jobs/tab/test_module.py": "import only_tests\n",
    "mylab/__init__.py": "",
    "mylab/net.py": "from deeper import cell\n",
    "deeper/cell.py": "",
    "helpers.py": "def say(): pass\n",
    "only_tests.py": "",
    "unrelated/big.bin": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_submission_copies_what_its_families_import_from_next_to_their_folder(project: Path):
    assert [path.name for path in find_imported_packages(project / "jobs")] == ["deeper", "helpers.py", "mylab"]
    code = snapshot_code(project / "jobs", project / "copy")
    copied = {str(path.relative_to(code.folder)) for path in code.folder.rglob("*") if path.is_file()}
    own = {name for name in copied if not name.startswith("trainyard/")}
    assert own == FILES.keys() - {"only_tests.py", "unrelated/big.bin"}


def test_data_and_secrets_in_what_is_imported_are_refused_too(project: Path):
    for name in ("mylab/key.py", "helpers.py"):
        before = (project / name).read_text() if (project / name).exists() else ""
        (project / name).write_text(f"{before}\n{LINES['AWS']}")
        with pytest.raises(UserError, match=rf"{name}:\d+: is or contains an AWS access key"):
            snapshot_code(project / "jobs", project / "copy")
        (project / name).write_text(before)
    with (project / "mylab" / "weights.bin").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(UserError, match=r"Largest: .*weights\.bin"):
        snapshot_code(project / "jobs", project / "copy")


def test_a_checkout_of_trainyard_copies_nothing_else():
    assert find_imported_packages(Path(__file__).parents[1] / "jobs") == []
