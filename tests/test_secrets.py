"""Passwords and keys do not reach run folders from the environment."""

import re

import pytest

from tests.training import FAMILIES
from trainyard import cli
from trainyard.config import ConfigError, compose, freeze, thaw

VALUE = "correct-horse-7"


# Options


@pytest.mark.parametrize(
    "override",
    [
        "data.path=${oc.env:PLANTED}",
        "data.path=/a/${oc.env:PLANTED}/b",
        "seed=${oc.env:PLANTED}",
        "max_duration=${oc.env:PLANTED}",
        "schedule.milestones=[${oc.env:PLANTED}]",
        "data.path=${oc.env:ABSENT,${oc.env:PLANTED}}",
        "data.path=${oc.${data.cache}:PLANTED}",
        r"data.path=${oc.decode:'\${oc.env:PLANTED}'}",
    ],
)
def test_an_option_cannot_read_the_environment(monkeypatch, override):
    monkeypatch.setenv("PLANTED", VALUE)
    with pytest.raises(ConfigError) as caught:
        compose("stripes", [override, "data.cache=env"], FAMILIES)
    said = str(caught.value)
    assert re.match(
        r"job stripes: [\w.]+(\[0\])?: reads the environment variable (PLANTED|ABSENT), but every option", said
    )
    assert 'let the shell write its value: "$' in said and 'os.environ["' in said
    assert VALUE not in said and "\n" not in said


def test_a_preset_cannot_read_the_environment_either(monkeypatch, tmp_path):
    monkeypatch.setenv("PLANTED", VALUE)
    family = tmp_path / "planted_jobs" / "tiny"
    family.mkdir(parents=True)
    family.joinpath("config.py").write_text((FAMILIES / "stripes" / "config.py").read_text())
    family.joinpath("tiny.yaml").write_text("defaults: [schema, _self_]\ndata: {path: '${oc.env:PLANTED}'}\n")
    with pytest.raises(ConfigError, match=r"data\.path: reads the environment variable PLANTED"):
        compose("tiny", [], family.parent)


def test_a_run_that_somebody_handed_over_cannot_read_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PLANTED", VALUE)
    freeze(compose("stripes", ["data.path=/harmless"], FAMILIES), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "path: /harmless" in text
    (tmp_path / "config.yaml").write_text(text.replace("/harmless", "${oc.env:PLANTED}"))
    with pytest.raises(ConfigError, match=r"config\.yaml: data\.path: reads the environment variable PLANTED"):
        thaw(tmp_path / "config.yaml", FAMILIES)


def test_other_code_may_still_read_the_environment_through_omegaconf(monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setenv("PLANTED", VALUE)
    compose("stripes", [], FAMILIES)
    assert OmegaConf.create({"a": "${oc.env:PLANTED}"}).a == VALUE


@pytest.mark.parametrize("family", ["../../elsewhere", "/tmp/elsewhere", "[a]", "''"])
def test_a_run_cannot_name_a_family_outside_the_folder_of_jobs(tmp_path, family):
    (tmp_path / "config.yaml").write_text(f"job: tiny\nfamily: {family}\n")
    with pytest.raises(ConfigError, match=r"family: expected the name of a folder in"):
        thaw(tmp_path / "config.yaml", FAMILIES)


def test_a_typed_secret_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PLANTED", VALUE)
    monkeypatch.chdir(tmp_path)
    words = ["stripes", "data.path=${oc.env:PLANTED}", "--jobs", str(FAMILIES)]
    for verb in (["run"], ["submit", "--local"], ["sweep", "--sweep", "seed=1,2"]):
        assert cli.main([*verb, *words]) == 2
        printed = capsys.readouterr()
        assert VALUE not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []
