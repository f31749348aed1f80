"""Passwords and keys do not reach run folders: not from the environment, uncommitted code, or a folder of jobs."""

import json
import re
import stat
import subprocess
from pathlib import Path

import pytest

from tests.training import FAMILIES
from trainyard import cli
from trainyard.config.compose import compose, load_config, save_config
from trainyard.config.settings import TrainConfig
from trainyard.errors import ConfigError, UserError
from trainyard.launch.submit import snapshot_code
from trainyard.masking import find_secrets, mask_diff, mask_text
from trainyard.runs.create import Origin, create_run
from trainyard.runs.folder import record_error

ROOT = Path(__file__).resolve().parents[1]
VALUE = "correct-horse-7"
KEY = "-----BEGIN RSA " + "PRIVATE KEY-----"  # in two parts, so that no scanner takes this file for a leak
DIGITS = "0123456789abcdef0123456789abcdef01234567"
LINES = {
    "AWS": "key = 'AK" + "IAIOSFODNN7EXAMPLE'",
    "GitHub": "gh" + "p_0123456789abcdefghijklmnopqrstuvwxyz",
    "Hugging Face": "login('hf" + "_abcdefghijklmnopqrstuvwxyz01234567')",
    "W&B": f"wandb.login(key='{DIGITS}')",
    "W&B, shell": f"wandb login {DIGITS}",
    "OpenAI": "sk" + "-proj-abcdefghijklmnop0123456789",
    "password": f'connect(user="ann", password="{VALUE}")',
    "dict": f"""options = {{"password": "{VALUE}"}}""",
    "environment": f'os.environ["MY_SECRET"] = "{VALUE}"',
    "token": f'TOKEN = "{VALUE}0123"',
    "URL": f"https://ann:{VALUE}@example.com/data",
    "query": f"https://example.com/data?token={VALUE}",
    "bearer": f'"Authorization: Bearer {VALUE}0123456789"',
    "option": f"--password {VALUE}",
}
HARMLESS = [
    'pad_token = "[PAD]"',
    'eos_token="</s>"',
    "token = tokenizer.encode(text)",
    "password = os.environ['PASSWORD']",
    'secret = getpass("password: ")',
    "for token in tokens: count[token] += 1",
    "key = jax.random.PRNGKey(0)",
    "x = sk-learn",
    "tokens_per_s: 123456.0",
    'token_type = "bert-base-uncased-2018"',
    f"commit {DIGITS}",
    "ssh://git@example.com/repository",
]


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
    save_config(compose("stripes", ["data.path=/harmless"], FAMILIES), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "path: /harmless" in text
    (tmp_path / "config.yaml").write_text(text.replace("/harmless", "${oc.env:PLANTED}"))
    with pytest.raises(ConfigError, match=r"config\.yaml: has a reference to other values, \$\{\.\.\.\}"):
        load_config(tmp_path / "config.yaml", FAMILIES)


def test_other_code_may_still_read_the_environment_through_omegaconf(monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setenv("PLANTED", VALUE)
    compose("stripes", [], FAMILIES)
    assert OmegaConf.create({"a": "${oc.env:PLANTED}"}).a == VALUE


@pytest.mark.parametrize("family", ["../../elsewhere", "/elsewhere", "[a]", "''"])
def test_a_run_cannot_name_a_family_outside_the_folder_of_jobs(tmp_path, family):
    (tmp_path / "config.yaml").write_text(f"job: tiny\nfamily: {family}\n")
    with pytest.raises(ConfigError, match=r"is not the name of a family|including 'family'\. The file was changed"):
        load_config(tmp_path / "config.yaml", FAMILIES)


# Uncommitted code


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_secrets_in_uncommitted_code_are_masked_and_named(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init", "-q")
    for name in ("model.py", ".env", "server.pem", "settings.yaml"):
        (checkout / name).write_text("first = 1\n")
    (checkout / "old.py").write_text(f'password = "{VALUE}"\n')
    git(checkout, "add", "-f", ".")
    git(checkout, "commit", "-qm", "first")
    (checkout / "model.py").write_text("first = 1\n" + "".join(f"# {line}\n" for line in LINES.values()) + "last = 2\n")
    (checkout / ".env").write_text(f"FIRST={VALUE}\n")
    (checkout / "server.pem").write_text(f"{KEY}\nMIIEpAIBAAKC\n{KEY.replace('BEGIN', 'END')}\n")
    (checkout / "settings.yaml").write_text(f"user: ann\npassword: {VALUE}\nnested_token: {VALUE}\n")
    (checkout / "old.py").write_text("import os\n")
    (checkout / "untracked.env").write_text(f"A={VALUE}\n")
    run = create_run(tmp_path / "runs", TrainConfig(job="tiny", family="tiny"), origin=Origin.collect(code=checkout))
    diff = (run / "code.diff").read_text()
    assert VALUE not in diff and DIGITS not in diff and "MIIE" not in diff
    assert not [name for name, line in LINES.items() if line in diff]
    assert {"+last = 2", "+user: ann", " first = 1", "+import os"} <= set(diff.splitlines())
    masked = json.loads((run / "env.json").read_text())["code"]["masked"]
    assert [f"model.py:{2 + i}" in " ".join(masked) for i in range(len(LINES))] == [True] * len(LINES)
    assert {place.partition(":")[0] for place in masked} == {
        "model.py",
        ".env",
        "server.pem",
        "settings.yaml",
        "old.py",
    }
    assert diff.startswith("# masked, because it looks like a secret: .env:1 (a file of secrets)\n")
    assert stat.S_IMODE((run / "code.diff").stat().st_mode) == 0o600
    assert not any(VALUE in path.read_text() for path in run.iterdir())


@pytest.mark.parametrize("name", LINES)
def test_each_kind_of_secret_is_masked_once(name):
    masked = mask_text(LINES[name])
    assert masked.count("<masked: ") == 1 and VALUE not in masked and DIGITS not in masked


@pytest.mark.parametrize("line", HARMLESS)
def test_ordinary_code_is_not_masked(line):
    assert mask_text(line) == line


def test_a_private_key_is_masked_whole_and_what_follows_is_not():
    diff = f"diff --git a/x b/x\n@@ -1,1 +1,5 @@\n a\n+{KEY}\n+MIIE\n+{KEY.replace('BEGIN', 'END')}\n+b\n"
    masked, findings = mask_diff(diff.encode())
    assert b"MIIE" not in masked and masked.endswith(b"\n+b\n")
    assert [str(finding) for finding in findings] == ["x:2 (a private key)"]


def test_a_diff_without_secrets_is_stored_byte_for_byte():
    diff = bytes(range(256)) + b"\ndiff --git a/x b/x\n@@ -1 +1 @@\n-a\n+b\xff\r\n\\ No newline at end of file\n"
    assert mask_diff(diff) == (diff, [])


def test_an_error_that_contains_a_password_is_recorded_without_it(tmp_path):
    error = RuntimeError(f"no answer from https://ann:{VALUE}@example.com")
    text = record_error(tmp_path, error, attempt="a", rank=0).read_text()
    assert "no answer from https://ann:<masked: a password in a URL>@example.com" in text and VALUE not in text


# The copy of the code


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tiny/module.py", "a = 1\n" + LINES["AWS"], "module.py:2: is or contains an AWS access key"),
        ("tiny/server.txt", KEY, "server.txt:1: is or contains a private key"),
        ("tiny/id_rsa", "x", "id_rsa: is or contains a file of passwords or keys, by its name"),
        ("credentials.json", "{}", "credentials.json: is or contains a file of passwords or keys"),
    ],
)
def test_a_secret_in_the_folder_of_jobs_is_not_copied(tmp_path, name, text, said):
    path = tmp_path / "jobs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        snapshot_code(tmp_path / "jobs", tmp_path / "code")
    assert "setup: [source ~/.secrets]" in str(caught.value) and not (tmp_path / "code").exists()


def test_hidden_files_are_neither_copied_nor_refused(tmp_path):
    (tmp_path / "jobs" / ".secrets").mkdir(parents=True)
    for name in (".env", ".secrets/id_rsa"):
        (tmp_path / "jobs" / name).write_text(KEY)
    code = snapshot_code(tmp_path / "jobs", tmp_path / "code")
    assert list(code.jobs.iterdir()) == []


def test_our_own_families_contain_no_secret():
    assert [*find_secrets(ROOT / "jobs"), *find_secrets(FAMILIES)] == []


def test_a_typed_secret_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PLANTED", VALUE)
    monkeypatch.chdir(tmp_path)
    words = ["stripes", "data.path=${oc.env:PLANTED}", "--jobs", str(FAMILIES)]
    for verb in (["run"], ["submit", "--local"], ["sweep", "--sweep", "seed=1,2"]):
        assert cli.main([*verb, *words]) == 2
        printed = capsys.readouterr()
        assert VALUE not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []
