"""Which data a job trains on when none is typed: data roots, synthetic samples, and folders that hold nothing."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slurm.test_dry import GOLDEN
from tests.test_trust import STRANGER, needs_root
from tests.training import FAMILIES
from trainyard.cli import main
from trainyard.cluster.description import load_cluster
from trainyard.config import compose as configs
from trainyard.data.prepare import describe_synthetic, restore_source
from trainyard.errors import UserError
from trainyard.plan.choose_data import DataChoice, choose_data, find_user_file, require_data

JOBS = Path(__file__).resolve().parents[1] / "jobs"
TYPED = ["submit", "fingerprint_1m", "--gpus", "8"]


@pytest.fixture(autouse=True)
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's own file would be; there is none yet."""
    (tmp_path / "config").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "trainyard.yaml"


def choose(
    tmp_path: Path, job: str, *overrides: str, roots: str = "{}", synthetic: bool = False, jobs: Path = JOBS
) -> DataChoice:
    """Choose data on the golden cluster, with these roots in its file."""
    file = tmp_path / "tower.yaml"
    file.write_text(f"{(GOLDEN / 'cluster.yaml').read_text()}data: {roots}\n")
    return choose_data(
        configs.compose(job, overrides, jobs),
        overrides=overrides,
        wants_synthetic=synthetic,
        cluster=load_cluster(file),
        jobs_dir=jobs,
        environ=os.environ,
    )


def read_refusal(choice: DataChoice, typed: Sequence[str] = TYPED) -> str:
    with pytest.raises(UserError) as raised:
        require_data(choice, jobs_dir=JOBS, typed=typed)
    return str(raised.value)


@pytest.mark.parametrize(
    ("job", "overrides", "own", "roots", "chosen"),
    [
        ("fingerprint_1m", ["data.path=/typed"], "{fingerprint_1m: /own}", "{}", ("/typed", "typed")),
        ("fingerprint_1m", ["data.synthetic=90"], "{fingerprint: /own}", "{}", ("90 synthetic samples", "typed")),
        (
            "fingerprint_1m",
            [],
            "{fingerprint_1m: /own}",
            "{fingerprint_1m: /a}",
            ("/own", "{own}, data.fingerprint_1m"),
        ),
        ("fingerprint_1m", [], "{fingerprint: /own}", "{fingerprint_1m: /a}", ("/a", "{file}, data.fingerprint_1m")),
        ("fingerprint_1m", [], "{fingerprint: /own}", "{fingerprint: /a}", ("/own", "{own}, data.fingerprint")),
        ("fingerprint_1m", [], "{pricing: /own}", "{fingerprint: /a}", ("/a", "{file}, data.fingerprint")),
        (
            "fingerprint_smoke",
            [],
            "{fingerprint: /own}",
            "{fingerprint: /a}",
            ("128 synthetic samples", "stated by preset fingerprint_smoke"),
        ),
        ("fingerprint_smoke", [], "{}", "{fingerprint_smoke: /a}", ("/a", "{file}, data.fingerprint_smoke")),
    ],
)
def test_the_nearest_statement_decides_and_is_named(job, overrides, own, roots, chosen, tmp_path, user_file):
    user_file.write_text(f"data: {own}\n")
    choice = choose(tmp_path, job, *overrides, roots=roots)
    expected = (chosen[0], chosen[1].format(own=user_file, file=tmp_path / "tower.yaml"))
    assert (choice.value, choice.reason) == expected
    assert choice.config.data.path == (chosen[0] if chosen[0].startswith("/") else "")


@pytest.mark.parametrize(("roots", "synthetic"), [("{fingerprint: synthetic}", False), ("{fingerprint: /a}", True)])
def test_a_job_draws_its_own_samples_when_told_as_few_as_the_demo(roots, synthetic, tmp_path):
    choice = choose(tmp_path, "fingerprint_1m", roots=roots, synthetic=synthetic)
    assert (choice.config.data.path, choice.config.data.synthetic) == ("", 960)
    assert "as many as fingerprint_demo, data.synthetic=N makes another number" in choice.reason
    assert require_data(choice, jobs_dir=JOBS, typed=TYPED) == 960
    other = configs.compose("fingerprint_1m", choice.overrides, JOBS)
    assert (other.data.path, other.data.synthetic) == ("", 960), "a run of a sweep gets other data"


def test_a_typed_number_of_samples_is_kept_and_a_folder_as_well_is_a_contradiction(tmp_path):
    choice = choose(tmp_path, "fingerprint_1m", "data.synthetic=64", roots="{fingerprint: /a}", synthetic=True)
    assert choice.config.data.synthetic == 64
    with pytest.raises(UserError, match=r"--synthetic .* and data.path=/x were both typed. Leave one out"):
        choose(tmp_path, "fingerprint_1m", "data.path=/x", synthetic=True)


def test_a_family_that_states_no_number_of_samples_asks_for_one(tmp_path):
    with pytest.raises(
        UserError, match=r"no preset stripes_demo or stripes_smoke .* Type the number: data.synthetic=N"
    ):
        choose(tmp_path, "stripes", "data.synthetic=0", synthetic=True, jobs=FAMILIES)


def test_without_data_the_refusal_says_where_it_looked_and_prints_both_lines(tmp_path, user_file):
    error = read_refusal(choose(tmp_path, "fingerprint_1m", roots="{pricing: /a}"))
    assert f"{user_file} does not exist; {tmp_path / 'tower.yaml'} has roots of: pricing" in error
    assert error.splitlines()[1:] == [
        "  trainyard submit fingerprint_1m --gpus 8 data.path=FOLDER",
        "  trainyard submit fingerprint_1m --gpus 8 --synthetic",
    ]


def test_an_empty_folder_is_named_with_who_chose_it_and_what_is_in_it(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    choice = choose(tmp_path, "fingerprint_1m", roots=f"{{fingerprint_1m: {raw}}}")
    error = read_refusal(choice)
    assert error.startswith(f"{raw} ({tmp_path / 'tower.yaml'}, data.fingerprint_1m): contains no sample")
    assert "Expected: images named FINGER_IMPRESSION" in error and "Found: no file. " in error
    assert f"more: {JOBS / 'fingerprint'}/README.md." in error
    first = "A first try with 50 to 500 of your files: trainyard run fingerprint_few data.path=FOLDER."
    assert first in error
    assert error.endswith("Type: trainyard submit fingerprint_1m --gpus 8 data.path=FOLDER") and "\n" not in error
    (raw / "notes.txt").touch()
    error = read_refusal(choice)
    assert "found 1 .txt (notes.txt)" in error and "data.fingerprint_1m. Nothing was submitted.)" in error
    (raw / "7_1.png").touch()
    assert require_data(choice, jobs_dir=JOBS, typed=TYPED) == 1
    raw.rename(tmp_path / "away")
    assert f"{raw}: no such folder ({tmp_path / 'tower.yaml'}, data.fingerprint_1m)" in read_refusal(choice)


def test_packed_samples_are_counted_by_their_index(tmp_path, packed_images):
    choice = choose(tmp_path, "stripes", f"data.path={packed_images}", jobs=FAMILIES)
    assert require_data(choice, jobs_dir=FAMILIES, typed=TYPED) == 26


# The user's own file


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dat: {}\n", "{file}, line 1: there is no key 'dat'. Nearest: data. Keys: data."),
        ("data: {fingerprint: prints}\n", "{file}, line 1: data: expected an absolute path such as /data/prints, or "),
        ("data: {fingerprint: [a]}\n", "{file}, line 1: data.fingerprint: expected text, found a list."),
        ("data: [/a]\n", "{file}, line 1: data: expected keys with values, found a list."),
        ("data: {a: /a\n", "{file}, line 2: not YAML: expected ',' or '}}', but got '<stream end>'."),
        (
            "data: {fingerprnt_1m: /a}\n",
            "{file}: data.fingerprnt_1m: there is no job or family 'fingerprnt_1m'. Nearest: fingerprint_1m.",
        ),
    ],
)
def test_a_mistake_in_it_is_one_sentence(text, sentence, tmp_path, user_file):
    user_file.write_text(text)
    with pytest.raises(UserError) as raised:
        choose(tmp_path, "fingerprint_1m")
    assert str(raised.value).startswith(sentence.format(file=user_file)) and "\n" not in str(raised.value)


def test_an_empty_one_and_roots_of_other_jobs_say_nothing(tmp_path, user_file):
    for text in ("", "# nothing yet\n", "data:\n", "data: {another_folder_of_jobs: /a, twins_demo: /b}\n"):
        user_file.write_text(text)
        assert choose(tmp_path, "fingerprint_1m").value == ""


def test_it_is_not_read_if_others_can_change_it_until_it_is_closed_as_the_message_says(tmp_path, user_file):
    user_file.write_text("data: {fingerprint: /own}\n")
    user_file.chmod(0o666)
    with pytest.raises(UserError, match="everybody can change it: its mode is 0666") as raised:
        choose(tmp_path, "fingerprint_1m")
    line = str(raised.value).split("close it: ")[1].split(", or")[0]
    subprocess.run(shlex.split(line), check=True)
    assert choose(tmp_path, "fingerprint_1m").value == "/own"


@needs_root
def test_it_is_not_read_if_it_is_another_users(tmp_path, user_file):
    user_file.write_text("data: {fingerprint: /own}\n")
    os.chown(user_file, STRANGER, STRANGER)
    with pytest.raises(UserError, match=f"belongs to uid {STRANGER}"):
        choose(tmp_path, "fingerprint_1m")


def test_it_is_in_xdg_config_home_and_else_in_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert find_user_file({"XDG_CONFIG_HOME": "/etc/mine"}) == Path("/etc/mine/trainyard.yaml")
    for environ in ({}, {"XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "relative"}):
        assert find_user_file(environ) == Path("/home/ada/.config/trainyard.yaml")


# The source that a run recorded, when its packed data is gone


def test_packed_data_that_is_gone_is_packed_again_from_what_was_recorded(tmp_path):
    gone = f"data.path={tmp_path / 'fingerprint-0'}"
    config = configs.compose("fingerprint_demo", [gone, "data.synthetic=24"], JOBS)
    assert restore_source(config, describe_synthetic(24), JOBS).data.path == "", "synthesized again"
    (tmp_path / "raw").mkdir()
    assert restore_source(config, str(tmp_path / "raw"), JOBS).data.path == str(tmp_path / "raw")


@pytest.mark.parametrize("source", ["/nowhere/raw", "", "25 synthetic samples"])
def test_packed_data_and_raw_files_that_are_gone_are_said_with_the_command_that_packs_the_same(source, tmp_path):
    folder = tmp_path / "fingerprint-0"
    config = configs.compose("fingerprint_demo", [f"data.path={folder}", "image.fill=200", "seed=4"], JOBS)
    with pytest.raises(UserError, match="is gone, and so are the raw files") as raised:
        restore_source(config, source, JOBS)
    assert str(raised.value).endswith(f"trainyard pack fingerprint_demo RAW {folder} image.fill=200")


# The command


def test_the_plan_shows_the_data_and_its_reason(user_file, capsys):
    user_file.write_text("data: {fingerprint: /own}\n")
    command = [*TYPED, "--dry", "--cluster", str(GOLDEN / "cluster.yaml"), "--runs", "/shared/runs"]
    assert main(command) == 0
    assert f"data        /own  ({user_file}, data.fingerprint)\n" in capsys.readouterr().out
    assert main([*command, "--synthetic"]) == 0
    assert "data        960 synthetic samples  (requested; as many as fingerprint_demo" in capsys.readouterr().out


def test_without_slurm_too_a_job_without_data_leaves_nothing_behind(tmp_path, capsys):
    assert main([*TYPED[:2], "--local", "--runs", str(tmp_path / "runs")]) == 2
    assert "fingerprint_1m needs data: data.path=FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
