"""Without OmegaConf, YAML has the values that OmegaConf reads, and a mistake in it has PyYAML's words."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainyard.yaml_text import dump_yaml, load_yaml, scan_yaml

JOBS = Path(__file__).parents[1] / "jobs"
SCALARS = (
    *("1", "0x1f", "1_000", "-1", "1.5", "1e-4", "1E5", ".5e-3", "1.", "1:30", "1:30.5", ".inf", "-.INF", ".nan"),
    *("yes", "off", "True", "~", "null", "", "2001-01-01", "2001-01-01 10:00:00", "a b", "'1'", '"x"'),
    *("[a, 1]", "{a: 1}", "[]", "{}", "|\n  two\n  lines", ">\n  folded\n  lines", '"\\ud800"', "0o17", "017", "1__0"),
)


TEXTS = st.text() | st.sampled_from(
    ["yes", "ON", "n", "No", "nO", "1_0", " 1", "1e3", "nan", "0x1", "null", "~", "\u0663"]
)
LEAVES = TEXTS | st.floats() | st.integers() | st.booleans() | st.none()
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(min_size=1), LEAVES, max_size=3)


def read_with_omegaconf(text: str) -> object:
    return OmegaConf.to_container(OmegaConf.create(text))


@pytest.mark.parametrize("scalar", SCALARS)
def test_a_value_is_read_as_omegaconf_reads_it(scalar: str):
    text = f"a: {scalar}\nb:\n- {scalar}\n"
    assert repr(load_yaml(text)) == repr(read_with_omegaconf(text))


@settings(max_examples=25)
@given(st.dictionaries(st.text(st.characters(), min_size=1), st.text() | st.floats() | st.integers() | st.none()))
def test_whatever_was_written_is_read_as_omegaconf_reads_it(values: dict[str, object]):
    text = yaml.dump(values, allow_unicode=True)
    if "${" not in text:
        assert repr(load_yaml(text)) == repr(read_with_omegaconf(text) if values else {})


@settings(max_examples=50)
@given(values=st.dictionaries(st.text(min_size=1), VALUES))
def test_whatever_is_written_is_what_omegaconf_writes(values: dict[str, object]):
    if all("${" not in text and text != "???" for text in list_texts(values)):
        assert dump_yaml(values) == OmegaConf.to_yaml(OmegaConf.create(values))


def list_texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(text for part in value.values() for text in list_texts(part))]
    if isinstance(value, list):
        return [text for part in value for text in list_texts(part)]
    return [value] if isinstance(value, str) else []


def test_a_list_that_is_there_twice_is_written_twice():
    names = ["a", "b"]
    assert dump_yaml({"x": names, "y": names}) == OmegaConf.to_yaml({"x": names, "y": names})


def test_all_presets_are_read_as_omegaconf_reads_them():
    presets = sorted(JOBS.glob("*/*.yaml"))
    assert len(presets) > 40
    for preset in presets:
        text = preset.read_text()
        assert repr(load_yaml(text)) == repr(OmegaConf.to_container(OmegaConf.create(text))), preset


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: 1\na: 2",
        "a: b: c",
        "a: \x01",
        "- 1\nb: 2",
        "a: 'b",
        "? [x]\n: 1",
        "a: *b",
        "a: !!python/object:x 1",
        "a: =",
    ],
)
def test_a_mistake_has_the_words_of_pyyaml_and_its_line(text: str):
    with pytest.raises(yaml.YAMLError) as ours:
        load_yaml(text)
    with pytest.raises(yaml.YAMLError) as theirs:
        OmegaConf.create(text)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("text", ["a: &b [1, {c: *b}]\nd: !!set {x}\n", "a: 1\nb: '", "\tx", "a: [[[1]]]"])
def test_tokens_are_those_of_pyyaml_up_to_a_mistake(text: str):
    def collect(tokens: object) -> tuple[list[str], str]:
        found = []
        try:
            for token in tokens:
                found.append(type(token).__name__)
        except yaml.YAMLError as error:
            return found, str(error)
        return found, ""

    assert collect(scan_yaml(text)) == collect(yaml.scan(text))


def test_reading_yaml_does_not_load_omegaconf():
    code = "import sys, trainyard.frozen; print('omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
