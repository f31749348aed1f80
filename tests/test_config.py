import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainyard.config.compose import apply_overrides, compose, find_differences, list_options, load_config, save_config
from trainyard.config.families import find_jobs, get_aliases, load_family
from trainyard.config.frozen import read_frozen, write_frozen
from trainyard.config.settings import TrainConfig
from trainyard.errors import ConfigError, UserError
from trainyard.files import write_atomically

ROOT = Path(__file__).parents[1]
JOBS = Path(__file__).parent / "fixtures_jobs" / "jobs"
BASE = "defaults: [schema, _self_]\n"


@pytest.fixture(autouse=True)
def a_process_without_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import its own `jobs` package, as a fresh process would."""

    def pop_jobs_modules() -> dict[str, object]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "jobs"}

    before = pop_jobs_modules()
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    pop_jobs_modules()
    sys.modules.update(before)


@pytest.fixture
def tiny() -> TrainConfig:
    return compose("tiny", [], JOBS)


def make_family(folder: Path, name: str = "tiny", **presets: str) -> Path:
    """Make a folder of jobs with one family that has the options of tiny; return the folder."""
    home = folder / "jobs" / name
    home.mkdir(parents=True)
    (folder / "jobs" / "__init__.py").touch()
    (home / "__init__.py").touch()
    shutil.copy(JOBS / "tiny" / "config.py", home)
    for preset, text in presets.items():
        (home / f"{preset}.yaml").write_text(text)
    return home.parent


def read_refusal(job: str, *overrides: str, jobs: Path = JOBS) -> str:
    """Return the one-line message with which a job is refused."""
    with pytest.raises(ConfigError) as caught:
        compose(job, overrides, jobs)
    message = str(caught.value)
    assert "\n" not in message and "HYDRA" not in message and "full_key" not in message
    return message


# Composing


def test_a_preset_overrides_the_presets_it_is_based_on_and_the_family_defaults():
    config = compose("tiny_big", [], JOBS)
    assert type(config).__name__ == "Config" and isinstance(config, TrainConfig)
    assert (config.job, config.family) == ("tiny_big", "tiny")
    assert (config.seed, config.global_batch_size, config.optimizer.lr) == (7, 16, 2e-3)  # from tiny.yaml
    assert (config.head.width, config.data.cache) == (64, "shards/tiny_big")  # from tiny_big.yaml, interpolated
    assert (config.head.dropout, config.max_duration) == (0.0, "10ep")  # defaults


@pytest.mark.parametrize(
    ("big", "expected"),
    [
        ("defaults: [tiny, more, _self_]\nseed: 9\n", (9, 3e-3, 2)),
        ("defaults: [_self_, tiny]\nseed: 9\n", (7, 2e-3, 8)),
        ("# @package _global_\ndefaults: [tiny, _self_]\nseed: 9\n", (9, 2e-3, 8)),
        ("defaults: [tiny, _self_]\nseed: 9\nhydra: {verbose: false}\n", (9, 2e-3, 8)),
    ],
)
def test_what_else_hydra_knows_of_defaults_works_in_a_preset(tmp_path: Path, big: str, expected: tuple):
    tiny = (JOBS / "tiny" / "tiny.yaml").read_text()
    jobs = make_family(tmp_path, tiny=tiny, more="optimizer: {lr: 3e-3}\nhead: {width: 2}\n", big=big)
    config = compose("big", [], jobs)
    assert (config.seed, config.optimizer.lr, config.head.width) == expected


def test_a_frozen_configuration_means_the_same_to_omegaconf(tiny: TrainConfig, tmp_path: Path):
    tiny.data.path, tiny.trackers, tiny.start_from = "a: 'b' # c", [], "1e3"
    save_config(tiny, tmp_path / "config.yaml")
    read = OmegaConf.merge(OmegaConf.structured(type(tiny)), OmegaConf.load(tmp_path / "config.yaml"))
    assert OmegaConf.to_object(read) == tiny


def test_frozen_options_have_numbers_as_python_writes_them_and_no_alias(tmp_path: Path):
    same = ["1e-4", "on", "2001-01-01"]
    write_frozen({"a": same, "b": same, "c": 1e-5}, tmp_path / "config.yaml")
    assert read_frozen(tmp_path / "config.yaml") == {"a": same, "b": same, "c": 1e-5}
    (tmp_path / "config.yaml").write_text("a: 1e-4\nb: -1.5E3\n")
    assert read_frozen(tmp_path / "config.yaml") == {"a": 1e-4, "b": -1500.0}


def test_no_omegaconf_object_is_left_in_a_configuration():
    def values(config: object) -> Iterator[object]:
        for f in fields(config):
            value = getattr(config, f.name)
            yield from values(value) if is_dataclass(value) else [value]

    config = compose("tiny", ["schedule.milestones=[30ep,60ep]"], JOBS)
    assert {type(value) for value in values(config)} == {str, int, float, bool, list}


def test_overrides_are_typed_and_a_later_one_wins():
    config = compose(
        "tiny",
        ["optimizer.lr=1e-4", "seed=3", "seed=4", "deterministic=false", "trackers=[]", "labels=[1, 2]"]
        + ["schedule.milestones=[30ep,'60ep']", "channels_last=on", "head.dropout=1"],
        JOBS,
    )
    assert (config.optimizer.lr, config.seed, config.deterministic) == (1e-4, 4, False)
    assert (config.trackers, config.labels, config.schedule.milestones) == ([], [1, 2], ["30ep", "60ep"])
    assert config.channels_last == "on" and type(config.head.dropout) is float


def test_an_override_changes_the_options_that_refer_to_it():
    config = compose("tiny_big", ["data.path=/raw", "data.cache=${data.path}/packed"], JOBS)
    assert config.data.cache == "/raw/packed"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("/a path/with spaces", "/a path/with spaces"),
        ("/a,b/c=d/[e]/{f}/(g)", "/a,b/c=d/[e]/{f}/(g)"),
        ("it's", "it's"),
        ("null", "null"),
        ("1e-4", "1e-4"),
        ("", ""),
        ("'/quoted for Hydra'", "/quoted for Hydra"),
        ('"/quoted for Hydra"', "/quoted for Hydra"),
    ],
)
def test_free_text_is_taken_as_typed(typed: str, meant: str):
    assert compose("tiny", [f"data.path={typed}"], JOBS).data.path == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("[J\u00fcrgen,07,1e3]", ["J\u00fcrgen", "07", "1e3"]),
        ("[1.10, 1e3, 007, true, null]", ["1.10", "1e3", "007", "true", "null"]),
        ("['Gr\u00f6\u00dfe [cm]',\"a, b\"]", ["Gr\u00f6\u00dfe [cm]", "a, b"]),
        ("[ depth (cm) , it's, a=b, -x ]", ["depth (cm)", "it's", "a=b", "-x"]),
        (r"""["a\"b",'it\'s',"c\\",a\,b,x\y]""", ['a"b', "it's", "c\\", "a,b", r"x\y"]),
        ("['']", [""]),
        ("[ ]", []),
        ("[${data.cache}/x,b]", ["data/x", "b"]),
        ("sort([b,a])", ["a", "b"]),
    ],
)
def test_each_text_of_a_list_is_taken_as_typed(typed: str, meant: list[str]):
    assert compose("tiny", [f"tracking.tags={typed}"], JOBS).tracking.tags == meant


@pytest.mark.parametrize(
    "typed", ["[a,]", "[,a]", "[a", "[[a]]", "[{a:b}]", '[a"b,c"]', "['a' b]", "[f(a,b)]", "[a\\]"]
)
def test_a_list_whose_texts_are_ambiguous_is_refused(typed: str):
    assert "tracking.tags" in read_refusal("tiny", f"tracking.tags={typed}")


def test_composing_twice_with_different_families_mixes_nothing(tmp_path: Path):
    other = make_family(tmp_path, name="other", other=BASE + "seed: 1")
    (other / "other" / "config.py").write_text(
        "from dataclasses import dataclass\n"
        "from trainyard.config.settings import TrainConfig, option\n\n"
        "@dataclass\nclass Config(TrainConfig):\n    depth: int = option(2, 'layers')\n"
    )
    shutil.copytree(JOBS / "tiny", other / "tiny")
    assert compose("tiny", [], other).head.width == 8
    assert compose("other", [], other).depth == 2
    assert not hasattr(compose("other", [], other), "head")


def test_composing_works_in_a_program_that_has_started_hydra_itself():
    with initialize_config_dir(str(JOBS / "tiny"), version_base="1.3"):
        assert compose("tiny", ["seed=1"], JOBS).seed == 1


def test_composing_leaves_no_files_and_prints_nothing(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    compose("tiny", ["seed=1"], JOBS)
    read_refusal("tiny", "sed=1")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_configuring_and_creating_a_run_load_no_torch_h5py_or_dali(tmp_path: Path):
    program = f"""
import sys
from pathlib import Path
from trainyard.config import compose as config
from trainyard.runs.create import create_run
from trainyard.runs.lock import RunLock
run = create_run(Path({str(tmp_path)!r}), config.compose("tiny", ["seed=1"], Path({str(JOBS)!r})))
config.load_config(run / "config.yaml", Path({str(JOBS)!r}))
with RunLock(run):
    pass
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "torchvision", "h5py", "nvidia", "submitit"}}))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


# User errors


def test_an_unknown_job_gets_the_nearest_names():
    message = read_refusal("tiny_bigg")
    assert "no job 'tiny_bigg'" in message and "Nearest: tiny_big, tiny" in message and "trainyard jobs" in message


def test_an_unknown_job_without_a_near_name_says_how_to_list_them():
    assert "has 2 jobs. List them: trainyard jobs" in read_refusal("quantum")


def test_a_misspelt_option_gets_the_nearest_one_and_those_of_its_group():
    message = read_refusal("tiny", "optimizer.lrr=1")
    assert message.startswith("optimizer.lrr=1: there is no option 'optimizer.lrr'. Nearest: optimizer.lr.")
    assert "Valid in optimizer: name, lr, weight_decay, beta1, beta2." in message


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("lr", "optimizer.lr"),
        ("schedul.name", "schedule.name"),
        ("head.widht", "head.width"),
        ("global_batchsize", "global_batch_size"),
        ("seed.x", "seed"),
    ],
)
def test_the_nearest_option_is_found_with_or_without_its_group(typed: str, nearest: str):
    assert re.search(rf"Nearest: {re.escape(nearest)}[.,]", read_refusal("tiny", f"{typed}=1"))


def test_an_unknown_option_at_the_top_names_the_command_that_lists_all():
    message = read_refusal("tiny", "sed=1")
    assert "Nearest: seed" in message and message.endswith("All: trainyard options tiny.")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("epochs=5", "max_duration=5ep"),
        ("steps=100", "max_duration=100st"),
        ("batch_size=16", "global_batch_size=16"),
        ("optimizer.learning_rate=1e-3", "optimizer.lr=1e-3"),
        ("warmup_epochs=2", "schedule.warmup=2ep"),
    ],
)
def test_an_option_by_the_name_that_other_tools_give_it_is_answered_with_what_to_type(typed: str, meant: str):
    assert f" Nearest: {meant}. " in read_refusal("tiny", typed)
    compose("tiny", [meant], JOBS)


def test_a_group_cannot_be_set_as_a_whole():
    message = read_refusal("tiny", "optimizer=sgd")
    assert "'optimizer' is a group of options. Set one of: optimizer.name, optimizer.lr" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=fast", "expected a number (float), found 'fast'"),
        ("optimizer.lr=", "expected a number (float), found ''"),
        ("seed=1.5", "expected a whole number (int), found '1.5'"),
        ("seed=null", "expected a whole number (int), found 'null'"),
        ("deterministic=perhaps", "expected true or false (bool), found 'perhaps'"),
        ("trackers=wandb", "expected a list such as [a,b], each text, found 'wandb'"),
        ("trackers=[wandb", "expected a list such as [a,b], each text, found '[wandb'"),
        ("labels=[a]", "expected a list such as [a,b], each a whole number, found '[a]'"),
        ("labels=[[1]]", "expected a list such as [a,b], each a whole number"),
        (f"optimizer.lr={'1' * 400}", "expected a number (float)"),
        (f"seed={'1' * 5000}", "expected a whole number (int)"),
        ("data.path=${data.cache", "expected text (str), found '${data.cache'"),
    ],
)
def test_a_value_of_the_wrong_type_names_the_option_and_what_was_expected_and_found(override: str, expected: str):
    message = read_refusal("tiny", override)
    assert override.partition("=")[0] in message and expected in message


@pytest.mark.parametrize(
    "override", ["optimizer.lr", "optimizer.lr:1", "+seed=1", "~seed", "seed =1", "=1", "--seed=1"]
)
def test_a_malformed_override_shows_what_one_looks_like(override: str):
    assert read_refusal("tiny", override).startswith(f"'{override}' is not an override. Write option=value, such as")


@pytest.mark.parametrize(
    "override",
    ["seed=1,2", "seed=range(1,4)", "schedule.name=cosine,step", "max_duration=1ep,2ep", "tracking.tags=[a],[b]"],
)
def test_several_values_in_one_run_are_refused_with_what_to_do(override: str):
    message = read_refusal("tiny", override)
    assert message.endswith("several values, but this is one run. Start one run per value.")


@pytest.mark.parametrize("option", ["job", "family"])
def test_what_the_preset_decides_cannot_be_overridden(option: str):
    assert f"'{option}' is set by the preset" in read_refusal("tiny", f"{option}=x")


def test_a_value_out_of_range_names_job_option_and_choices():
    message = read_refusal("tiny", "schedule.name=cosin")
    assert message.startswith("job tiny: schedule.name=cosin: expected one of cosine, step")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trackers=[tensorboard,tensorbord]",
            "trackers=tensorbord: expected each entry one of tensorboard, wandb, mlf",
        ),
        ("schedule.milestones=[3ep,6epp]", "schedule.milestones: '6epp' is not a duration"),
        ("max_duration=0st", "max_duration=0st: expected more than 0, such as 10ep, 2000st or 30min"),
        ("eval_every=0ep", "eval_every=0ep: expected more than 0"),
        ("log_every=0st", "log_every=0st: expected more than 0"),
        ("checkpoint.every=0min", "checkpoint.every=0min: expected more than 0"),
        ("max_duration=99999999999999999999ep", "'99999999999999999999ep' is too long: expected at most"),
        (f"max_runtime={'9' * 5000}h", "is too long: expected at most 9007199254740992min"),
        ("seed=18446744073709551616", "seed=18446744073709551616: expected 0 to 18446744073709551615."),
        ("labels=[1,-9223372036854775808]", "expected -9223372036854775807 to 9223372036854775807."),
        ("optimizer.lr=inf", "optimizer.lr=inf: expected 0 or more, and finite."),
        ("optimizer.lr=1e400", "optimizer.lr=inf: expected 0 or more, and finite."),
        ("ema_decay=nan", "ema_decay=nan: expected 0 to 0.99999, and finite."),
        ("image.scales=[1,nan]", "image.scales=nan: expected a finite number."),
        (f"image.mean={'1' * 400}", "expected -9223372036854775807 to 9223372036854775807."),
        ("monitor=eer", "monitor=eer: expected metrics, each with min or max, such as monitor=eer:min,d_prime:max"),
    ],
)
def test_what_only_a_started_run_would_refuse_is_refused_with_the_options(override: str, expected: str):
    assert expected in read_refusal("tiny", override)


def test_a_rise_of_nothing_and_a_session_of_nothing_are_durations():
    config = compose("tiny", ["schedule.warmup=0st", "max_runtime=0min", "trackers=[]"], JOBS)
    assert (config.schedule.warmup, config.max_runtime, config.trackers) == ("0st", "0min", [])


def test_a_shell_variable_that_nobody_expanded_is_refused():
    message = read_refusal("tiny", "data.path=${SCRATCH}/x")
    assert "data.path" in message and "'SCRATCH' not found" in message and "write the value itself" in message


def test_a_value_that_must_be_given_is_requested(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE)
    config = jobs / "tiny" / "config.py"
    config.write_text(config.read_text().replace("option(8,", "option('???',"))  # no default, as OmegaConf writes it
    assert "'head.width' must be given: head.width=<value>" in read_refusal("tiny", jobs=jobs)
    assert compose("tiny", ["head.width=2"], jobs).head.width == 2


# Errors in presets


def test_a_yaml_error_names_file_and_line(tmp_path: Path):
    jobs = make_family(
        tmp_path, tiny=BASE + "seed: 1\noptimizer: {lr: 1\nprecision: fp32\n", big="defaults: [tiny, _self_]"
    )
    message = read_refusal("big", jobs=jobs)
    assert str(jobs / "tiny" / "tiny.yaml") + ", line 4: not YAML" in message


def test_an_option_given_twice_in_a_preset_names_file_and_line(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE + "seed: 1\nseed: 2\n")
    message = read_refusal("tiny", jobs=jobs)
    assert str(jobs / "tiny" / "tiny.yaml") + ", line 3" in message and "duplicate key seed" in message


def test_an_unprintable_character_in_a_preset_names_the_file(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE + "max_duration: \x01\n")
    assert str(jobs / "tiny" / "tiny.yaml") + ": not YAML: unacceptable character" in read_refusal("tiny", jobs=jobs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer: {lrr: 1}", "there is no option 'optimizer.lrr'. Nearest: optimizer.lr."),
        ("sead: 1", "there is no option 'sead'. Nearest: seed."),
        ("optimizer: {lr: fast}", "optimizer.lr: expected a number (float). Value 'fast'"),
        ("trackers: wandb", "trackers: expected a list such as [a,b]"),
        ("optimizer: 3", "int is not a subclass of OptimizerSettings"),
    ],
)
def test_a_wrong_option_in_a_preset_names_its_file(tmp_path: Path, text: str, expected: str):
    jobs = make_family(tmp_path, tiny=BASE + text, big="defaults: [tiny, _self_]\nseed: 1")
    message = read_refusal("big", jobs=jobs)
    assert message.startswith(f"{jobs / 'tiny' / 'tiny.yaml'}: ") and expected in message


def test_a_preset_based_on_one_that_does_not_exist_lists_the_others(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE, big="defaults: [tinny, _self_]")
    message = read_refusal("big", jobs=jobs)
    assert message.startswith(f"{jobs / 'tiny' / 'big.yaml'}: its defaults name 'tinny'") and "one of: tiny" in message


@pytest.mark.parametrize("text", ["seed: 1", "", "words"])
def test_a_preset_without_the_family_options_is_told_how_to_begin(tmp_path: Path, text: str):
    jobs = make_family(tmp_path, tiny=text)
    message = read_refusal("tiny", jobs=jobs)
    assert str(jobs / "tiny" / "tiny.yaml") in message and "defaults: [schema, _self_]" in message


def test_a_preset_that_is_a_list_names_its_file(tmp_path: Path):
    jobs = make_family(tmp_path, tiny="- 1")
    assert read_refusal("tiny", jobs=jobs).startswith(f"{jobs / 'tiny' / 'tiny.yaml'}: ")


# Families


def test_jobs_are_found_by_preset_name():
    assert find_jobs(JOBS) == {"tiny": JOBS / "tiny" / "tiny.yaml", "tiny_big": JOBS / "tiny" / "tiny_big.yaml"}


def test_two_presets_with_one_name_are_refused_and_both_are_named(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE)
    make_family(tmp_path / "other", tiny=BASE)
    (tmp_path / "other" / "jobs" / "tiny").rename(jobs / "other")
    with pytest.raises(UserError) as caught:
        find_jobs(jobs)
    assert str(jobs / "tiny" / "tiny.yaml") in str(caught.value)
    assert str(jobs / "other" / "tiny.yaml") in str(caught.value)


def test_a_missing_folder_of_jobs_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere: no such folder of jobs.*--jobs DIR"):
        find_jobs(tmp_path / "nowhere")


def test_a_folder_without_presets_says_so(tmp_path: Path):
    assert "contains no preset" in read_refusal("tiny", jobs=tmp_path)


def test_a_family_in_another_folder_is_imported_from_there(tmp_path: Path):
    jobs = make_family(tmp_path, name="mine", mine=BASE)
    module = load_family(jobs, "mine", "config")
    assert Path(module.__file__) == jobs / "mine" / "config.py"
    assert module.__name__ == "jobs.mine.config" and sys.path[0] == str(tmp_path)


def test_two_folders_of_the_same_name_live_side_by_side(tmp_path: Path):
    """The first keeps the name, under which other processes find it; the other gets one of its own."""
    assert compose("tiny", [], JOBS).family == "tiny"
    jobs = make_family(tmp_path, name="mine", mine=BASE)
    assert compose("mine", [], jobs).family == "mine"
    first, second = load_family(JOBS, "tiny", "config"), load_family(jobs, "mine", "config")
    assert first.__name__ == "jobs.tiny.config"
    assert re.fullmatch(r"jobs_[0-9a-f]{8}\.mine\.config", second.__name__)
    assert (Path(first.__file__).parents[1], Path(second.__file__).parents[1]) == (JOBS, jobs)
    assert load_family(jobs, "mine", "config") is second


def test_what_one_process_pickles_of_a_second_folder_another_process_reads(tmp_path: Path):
    load_family(JOBS, "tiny", "config")
    jobs = make_family(tmp_path, name="mine", mine=BASE)
    pickled = pickle.dumps(load_family(jobs, "mine", "config").Config)
    names = {name: str(place) for name, place in get_aliases().items() if place == jobs}
    code = (
        "import pathlib, pickle, sys; from trainyard.config.families import import_aliases;"
        f"import_aliases({{name: pathlib.Path(place) for name, place in {names!r}.items()}});"
        f"print(pickle.loads({pickled!r}).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == load_family(jobs, "mine", "config").__name__, done.stderr


def test_a_folder_that_python_cannot_name_is_refused(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE).rename(tmp_path / "my-jobs")
    with pytest.raises(UserError, match=r"my-jobs: the folder's name must be a Python name"):
        compose("tiny", [], jobs)


@pytest.mark.parametrize(
    ("part", "needs"),
    [("config", "class Config(TrainConfig)"), ("pack", "samples(raw, config)"), ("module", "build(config, data)")],
)
def test_a_part_that_is_missing_or_empty_says_what_it_must_define(tmp_path: Path, part: str, needs: str):
    jobs = make_family(tmp_path, tiny=BASE)
    file = jobs / "tiny" / f"{part}.py"
    file.unlink(missing_ok=True)
    with pytest.raises(UserError) as caught:
        load_family(jobs, "tiny", part)
    assert f"{file}: no such file" in str(caught.value) and needs in str(caught.value)
    file.write_text("")
    with pytest.raises(UserError) as caught:
        load_family(jobs, "tiny", part)
    assert f"{file}: has no '" in str(caught.value) and needs in str(caught.value)


def test_a_config_that_does_not_extend_the_options_of_every_job_is_refused(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE)
    (jobs / "tiny" / "config.py").write_text("class Config: pass\n")
    with pytest.raises(UserError, match="is not a dataclass that extends TrainConfig"):
        compose("tiny", [], jobs)


def test_a_bug_in_a_family_keeps_its_traceback(tmp_path: Path):
    jobs = make_family(tmp_path, tiny=BASE)
    (jobs / "tiny" / "config.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        compose("tiny", [], jobs)


# Listing, freezing, comparing


def test_every_option_is_listed_once_with_value_and_doc(tiny: TrainConfig):
    listed = {option.name: option for option in list_options(tiny)}
    assert len(listed) == len(list(list_options(tiny)))
    assert listed["optimizer.lr"].value == 2e-3 and "learning rate" in listed["optimizer.lr"].doc
    assert listed["head.width"] == ("head.width", 8, "channels", (), True)
    assert listed["trackers"].choices == ("tensorboard", "wandb", "mlflow")
    assert "optimizer" not in listed and all(option.doc for option in listed.values())


def test_overrides_of_an_existing_configuration_make_a_checked_copy(tiny: TrainConfig):
    changed = apply_overrides(tiny, ["checkpoint.keep_last=5", "data.path=/a b"])
    assert (changed.checkpoint.keep_last, changed.data.path) == (5, "/a b")
    assert (tiny.checkpoint.keep_last, tiny.data.path) == (2, "")
    assert type(changed) is type(tiny) and changed.job == "tiny"
    for override, expected in [
        ("sed=1", "Nearest: seed"),
        ("seed=-1", "job tiny: seed=-1"),
        ("seed=1,2", "seed=1,2: several values, but this is one run"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            apply_overrides(tiny, [override])


def test_differences_name_what_changed_and_whether_a_resume_may_change_it(tiny: TrainConfig):
    changed = apply_overrides(tiny, ["seed=8", "eval_batch_size=8", "trackers=[]", "head.width=9"])
    assert find_differences(tiny, changed) == [
        ("seed", 7, 8, False),
        ("eval_batch_size", 64, 8, True),
        ("trackers", ["tensorboard"], [], True),
        ("head.width", 8, 9, True),  # mutable, because its group is
    ]
    assert find_differences(tiny, tiny) == []


def test_a_frozen_configuration_has_every_option_and_says_how_to_resume(tiny: TrainConfig, tmp_path: Path):
    save_config(tiny, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith("#") and "trainyard resume" in text
    assert "  beta2: 0.999" in text and "width: 8" in text
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    assert load_config(tmp_path / "config.yaml", JOBS) == tiny


# All examples share one folder and one configuration; each example overwrites the file.
@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters()),  # lone surrogates too: a path that is not UTF-8
    lr=st.floats(0, 1e300),
    seed=st.integers(0, 2**63),
    words=st.lists(st.sampled_from(["on", "off", "null", "1e3", "~", "0x1", "1:30", "2001-01-01", "a b", ""])),
)
def test_a_frozen_configuration_thaws_equal(
    tiny: TrainConfig, tmp_path: Path, text: str, lr: float, seed: int, words: list[str]
):
    tiny.data.path = text.replace("${", "")
    tiny.optimizer.lr, tiny.seed, tiny.start_from_partial = lr, seed, words
    if tiny.data.path != "???":
        save_config(tiny, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml", JOBS) == tiny


def test_a_configuration_frozen_by_a_version_with_other_options_is_refused(tiny: TrainConfig, tmp_path: Path):
    path = tmp_path / "config.yaml"
    save_config(tiny, path)
    path.write_text(path.read_text().replace("beta2:", "beta3:"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, JOBS)
    assert str(caught.value).startswith(
        f"{path}: there is no option 'optimizer.beta3'. Nearest: optimizer.beta2, optimizer.beta1."
    )
    assert "created by another version of family 'tiny'" in str(caught.value) and "\n" not in str(caught.value)


def test_an_option_newer_than_the_run_takes_its_default(tiny: TrainConfig, tmp_path: Path):
    path = tmp_path / "config.yaml"
    save_config(tiny, path)
    path.write_text(path.read_text().replace("  beta2: 0.999\n", ""))
    assert load_config(path, JOBS) == tiny


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, r"no such file, so .* is not the folder of a run"),
        ("seed: [", r"config.yaml, line 1: not YAML"),
        (f"seed: {'9' * 5000}", r"config.yaml: not YAML: Exceeds the limit"),
        ("seed: 1", r"including 'family'"),
        ("- 1", r"including 'family'"),
        ("family: tiny\nseed: -1", r"config.yaml: seed=-1: expected 0"),
    ],
)
def test_a_file_that_is_not_a_frozen_configuration_is_named(tmp_path: Path, text: str | None, expected: str):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path / "config.yaml", JOBS)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path):
    write_atomically(tmp_path / "file", "whole")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "half\n" * 10_000 + "\ud800")
    assert (tmp_path / "file").read_text() == "whole"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_normalisation_is_a_number_or_one_for_each_channel(tiny: TrainConfig, tmp_path: Path):
    config = compose("tiny", ["image.channels=3", "image.mean=[0.485,0.456,0.406]", "image.std=0.5"], JOBS)
    assert (config.image.mean, config.image.std) == ([0.485, 0.456, 0.406], 0.5)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", JOBS) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("image.mean=[0.4,0.5]", "image.mean=[0.4, 0.5]: 2 numbers for image.channels=3. Give one per channel"),
        ("image.std=[0.5,0.5,0]", "image.std=0: expected 1e-06 or more"),
        ("image.mean=gray", "image.mean=gray: expected a number, or a list with one per channel"),
        ("image.mean=[a,b,c]", "expected a number, or a list with one per channel"),
        ("image.std=true", "image.std=True: expected a number"),
        ("image.mean=nan", "image.mean=nan: expected a number"),
    ],
)
def test_another_normalisation_is_refused(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        compose("tiny", ["image.channels=3", override], JOBS)
    assert message in str(caught.value)
