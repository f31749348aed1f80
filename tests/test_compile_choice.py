"""compile: off unless a run asks for it, refused without a compiler; others cannot change compiled code."""

import os
import stat
import subprocess
import sys
import time

import pytest

from tests.images import make_import_environ
from tests.training import FAMILIES, new_run, train
from trainyard.errors import UserError
from trainyard.hardware import explain_missing_compiler
from trainyard.node.compile_cache import CACHE_VARIABLES, choose_cache
from trainyard.node.rank_task import execute
from trainyard.runs.folder import read_env


@pytest.mark.slow
def test_a_run_that_states_nothing_does_not_compile_and_says_why(tmp_path):
    run = new_run(tmp_path, "max_duration=1st")
    assert train(run) == 0
    reason = "auto is off: whether it pays was not measured; compile=on tries it"
    assert read_env(run)["choices"]["compile"] == {"value": False, "reason": reason}


def test_a_run_that_compiles_where_there_is_no_compiler_is_refused_with_what_to_type(tmp_path):
    run = new_run(tmp_path, "max_duration=1st", "compile=on")
    with pytest.raises(
        UserError, match=r"compiles its model, but there is no C\+\+ compiler here \(absent\).*compile=off"
    ):
        execute(run, FAMILIES, environ={"CXX": "absent"}, started=time.time())


@pytest.mark.parametrize(("sm", "names", "variable"), [(None, ["g++"], "CXX"), (80, ["gcc", "clang"], "CC")])
def test_a_machine_that_cannot_compile_says_so_in_one_sentence(sm, names, variable, tmp_path):
    headers, programs = tmp_path / "include", tmp_path / "bin"
    headers.mkdir()
    programs.mkdir()
    environ = {"PATH": str(programs)}
    assert all(name in str(explain_missing_compiler(sm, environ, headers=headers)) for name in names)
    for name in (*names, "mine"):
        (programs / name).touch(mode=0o755)
    assert "Python.h" in str(explain_missing_compiler(sm, environ, headers=headers))
    (headers / "Python.h").touch()
    assert explain_missing_compiler(sm, environ, headers=headers) is None
    assert explain_missing_compiler(sm, environ | {variable: "mine"}, headers=headers) is None
    assert "absent" in str(explain_missing_compiler(sm, environ | {variable: "absent"}, headers=headers))


# Where compiled code is kept


def choose(
    environ: dict[str, str], *, card: str | None = "A100", torch_version: str = "2.13.0", attempt: str = "987654321-0"
):
    return choose_cache(environ, card=card, torch_version=torch_version, attempt=attempt)


def test_compiled_code_is_kept_on_scratch_in_a_folder_of_this_user_for_this_card_and_torch(tmp_path):
    environ = {"TRAINYARD_SCRATCH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder, reason = choose(environ)
    assert folder.parent == tmp_path / f"trainyard-{os.getuid()}" / "compiled"
    assert "TRAINYARD_SCRATCH" in reason
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (folder, folder.parent, folder.parent.parent))
    assert choose(environ, attempt="987654322-1")[0] == folder
    others = [choose(environ, **other)[0] for other in ({"card": "H100"}, {"card": None}, {"torch_version": "2.7.1"})]
    assert len({folder, *others}) == 4


def test_without_a_lasting_scratch_compiled_code_is_kept_in_the_users_cache(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    own, longer = tmp_path / "987654321", tmp_path / "9876543210"
    own.mkdir()
    longer.mkdir()
    for scratch, attempt, why in [
        (None, "987654321-0", "no TRAINYARD_SCRATCH"),
        ("relative", "987654321-0", "not a folder here"),
        (str(tmp_path / "absent"), "987654321-0", "not a folder here"),
        (str(own), "987654321-1", "ends with this Slurm job"),
    ]:
        folder, reason = choose(
            environ if scratch is None else environ | {"TRAINYARD_SCRATCH": scratch}, attempt=attempt
        )
        assert folder.parent == tmp_path / "cache" / "trainyard" / "compiled"
        assert why in reason
    for attempt in ("987654321-0", "local-5"):
        folder, _ = choose(environ | {"TRAINYARD_SCRATCH": str(longer)}, attempt=attempt)
        assert folder.is_relative_to(longer)


@pytest.mark.slow
@pytest.mark.skipif(bool(explain_missing_compiler(None, os.environ)), reason="there is no C++ compiler here")
def test_a_run_keeps_compiled_code_in_the_users_cache_although_torch_exports_another_folder(tmp_path):
    run = new_run(tmp_path, "compile=on", "max_duration=1st")
    unset = ("TRAINYARD_SCRATCH", *CACHE_VARIABLES)
    environ = {name: value for name, value in make_import_environ().items() if name not in unset}
    environ |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TORCHDYNAMO_DISABLE": "1"}  # compiling takes a minute
    command = [sys.executable, "-m", "trainyard", "resume", str(run), "--jobs", str(FAMILIES)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cache = read_env(run)["choices"]["compile_cache"]
    assert cache["value"].startswith(f"{tmp_path}/cache/trainyard/compiled/")
    assert cache["reason"] == "in this user's cache: no TRAINYARD_SCRATCH"


def test_a_file_system_that_runs_no_code_is_refused_for_compiled_code(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        for environ in (
            {"TRAINYARD_SCRATCH": str(disk)},
            {"XDG_CACHE_HOME": str(disk)},
            {CACHE_VARIABLES[0]: f"{disk}/x"},
        ):
            with pytest.raises(
                UserError, match=f"^{disk}/.*: .* runs no code from there \\(noexec\\).*--tmpfs /tmp:exec"
            ):
                choose(environ)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("place", ["", "compiled", "stated"])
def test_a_folder_that_others_can_write_to_is_refused_because_its_content_is_executed(place, tmp_path):
    environ = {"TRAINYARD_SCRATCH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = choose(environ)[0]
    if place == "stated":
        environ[CACHE_VARIABLES[0]] = str(folder)
        assert choose(environ) == (folder, "TORCHINDUCTOR_CACHE_DIR in the environment")
    shared = folder.parent if place == "compiled" else folder
    shared.chmod(0o770)
    with pytest.raises(UserError, match=f"{shared} is not a folder that only this user can write to"):
        choose(environ)
    shared.rmdir() if place != "compiled" else None
    if place == "":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="only this user"):
            choose(environ)
