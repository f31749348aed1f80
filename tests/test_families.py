"""Several folders of families side by side, and runs that know theirs."""

import csv
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.training import FAMILIES
from trainyard import cli
from trainyard.cli import verb
from trainyard.cli.verb import choose_families
from trainyard.config.compose import compose
from trainyard.config.families import Root, choose_root, load_family
from trainyard.errors import UserError
from trainyard.runs import folder as runs
from trainyard.runs.create import create_run
from trainyard.runs.families import OWN, describe_families, find_families

SHORT = ("max_duration=2st", "eval_every=2st", "data.synthetic=60", "global_batch_size=6")


def copy_families(folder: Path) -> Path:
    """Copy the family of the tests, so that it is independent of the folder's name, and the name of its preset."""
    jobs = folder / "jobs"
    shutil.copytree(FAMILIES / "stripes", jobs / "stripes", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (jobs / "stripes").glob("*.py"):
        path.write_text(path.read_text().replace("from families.stripes.", "from ."))
    return jobs


def run_command(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    capsys.readouterr()
    found = cli.main([str(word) for word in words])
    output = capsys.readouterr()
    assert found == code, output.out + output.err
    return output.out + output.err


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of families elsewhere, of the same name as Trainyard's own, which is imported already."""
    compose("fingerprint_smoke", [], Path(__file__).parents[1] / "jobs")
    return copy_families(tmp_path_factory.mktemp("families"))


def name_families(root: Root) -> dict[str, dict[str, Any]]:
    return {"choices": {name: choice._asdict() for name, choice in describe_families(root).items()}}


@pytest.fixture
def here(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder with a run, which has not begun, and from which nothing leads to its family."""
    config = compose("stripes", [f"data.cache={tmp_path / 'data'}", *SHORT], elsewhere)
    create_run(tmp_path / "runs", config, name="r", chosen=name_families(Root(elsewhere, "--jobs")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_command_about_a_run_finds_its_family(here, capsys):
    assert "stripes" in run_command(capsys, "resume", "stripes", "--dry")


@pytest.mark.long
def test_a_run_remembers_where_its_family_is(elsewhere, here, capsys):
    run_command(capsys, "resume", "stripes")
    said = run_command(capsys, "resume", "stripes", "max_duration=3st", "--inexact")
    options = f"options stripes --jobs {elsewhere}"
    assert f"trainyard {options}\n" in said
    run_command(capsys, *options.split())
    load_family(elsewhere, "stripes", "pack").synthesize(here / "new", count=6, seed=1)
    run_command(capsys, "predict", "stripes", "new", "out.csv")
    with Path("out.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    run_command(capsys, "export", "stripes")


def test_a_typed_folder_wins_over_the_remembered_one(here, capsys):
    said = run_command(capsys, "resume", "stripes", "--dry", "--jobs", "nowhere", code=2)
    assert "nowhere/stripes/config.py: no such file" in said


def test_a_family_that_has_moved_is_found_in_the_folder_here_or_asked_for(elsewhere, here, capsys):
    gone = elsewhere.parent / "gone"
    runs.update_env(here / "runs" / "stripes" / "r", "choices", {"families": {"value": str(gone), "reason": "--jobs"}})
    said = run_command(capsys, "predict", "stripes", "new", "out.csv", code=2)
    assert f"was started with the families in {gone}, where there is no 'stripes' now" in said and "--jobs DIR" in said
    copy_families(here)
    said = run_command(capsys, "resume", "stripes", "--dry")
    assert f"{gone} has no stripes any more, so that in jobs is used" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("owned", ["run", "family"])
def test_a_family_that_the_run_of_another_names_is_not_imported(elsewhere, here, capsys, owned):
    """Without --jobs the run decides what is executed, so it and the family must be this user's."""
    jobs = copy_families(here / "theirs")
    run = here / "runs" / "stripes" / "r"
    runs.update_env(run, "choices", {"families": {"value": str(jobs), "reason": "--jobs"}})
    os.chown(run / "env.json" if owned == "run" else jobs / "stripes" / "pack.py", 1234, -1)
    said = run_command(capsys, "predict", "stripes", "new", "out.csv", code=2)
    assert "UntrustedRun" in said and "--trust" in said
    assert not (jobs / "stripes" / "__pycache__").exists()


@pytest.mark.slow
def test_jobs_of_both_folders_are_listed_and_found(tmp_path, monkeypatch, capsys):
    jobs = copy_families(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = run_command(capsys, "jobs")
    assert said.index("  stripes ") < said.index("  fingerprint_demo ")
    run_command(capsys, "options", "stripes")
    run_command(capsys, "options", "fingerprint_demo")
    said = run_command(capsys, "options", "fingerprint_dem", code=2)
    assert "no job 'fingerprint_dem'. Nearest: fingerprint_demo" in said
    with (jobs / "stripes" / "fingerprint_demo.yaml").open("w") as file:  # a person's own comes first
        file.write("defaults: [stripes, _self_]\nmodel: {channels: 3}\n")
    assert "model.channels=3" in run_command(capsys, "options", "fingerprint_demo")
    assert run_command(capsys, "jobs").count("  fingerprint_demo ") == 1


def test_runs_of_trainyards_own_families_do_not_depend_on_where_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("family: fingerprint\n")
    runs.write_env(run, name_families(choose_root("fingerprint_demo")))
    assert runs.read_env(run)["choices"]["families"]["value"] == OWN
    found = find_families(run)
    assert found.folder == Path(__file__).parents[1] / "jobs" and not found.is_named


@pytest.mark.parametrize("job", [None, ""])
def test_a_command_without_a_job_uses_the_first_folder(job, tmp_path, monkeypatch):
    """Such as `plan --all` and `sweep --continue`."""
    args = Namespace(jobs=None, job=job)
    monkeypatch.chdir(tmp_path)
    choose_families(args)
    assert (args.jobs, args.typed_jobs) == (Path(__file__).parents[1] / "jobs", False)
    (tmp_path / "jobs").mkdir()
    args.jobs = None
    choose_families(args)
    assert args.jobs == Path("jobs")


def test_without_a_checkout_a_folder_of_the_project_is_the_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert verb.find_project_folder("slurm") == Path(__file__).parents[1] / "slurm"
    monkeypatch.setattr(verb, "CHECKOUT", tmp_path / "lib")
    assert verb.find_project_folder("slurm") == Path("slurm")


def test_a_family_that_imports_itself_by_a_taken_name_is_told_how(tmp_path):
    compose("fingerprint_smoke", [], Path(__file__).parents[1] / "jobs")
    jobs = copy_families(tmp_path)
    pack = jobs / "stripes" / "pack.py"
    pack.write_text(pack.read_text().replace("from .config", "from jobs.stripes.config"))
    with pytest.raises(UserError, match=r"imports 'jobs\.stripes'.*'from \.config import Config'"):
        load_family(jobs, "stripes", "pack")


def test_a_broken_family_takes_nothing_from_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad", "worse"):
        shutil.copytree(FAMILIES / "stripes", tmp_path / "jobs" / name)
        for preset in (tmp_path / "jobs" / name).glob("*.yaml"):
            preset.rename(preset.with_name(f"{name}_{preset.name}"))
    (tmp_path / "jobs" / "bad" / "config.py").write_text("x = 1\nclass (\n")
    (tmp_path / "jobs" / "worse" / "commands.py").write_text("import not_there\n")
    assert cli.main(["jobs"]) == 0
    assert "good_stripes" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    shown = capsys.readouterr()
    assert ended.value.code == 0 and "check-family" in shown.out
    assert "worse/commands.py: its commands are left out: ModuleNotFoundError: No module named 'not_there'" in shown.err
    with pytest.raises(UserError, match=r"bad/config\.py, line 2: not Python: "):
        load_family(tmp_path / "jobs", "bad", "config")
