"""Cluster files: read strictly, found by name or by their Slurm, with precise errors for mistakes."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from trainyard.cluster.check import Finding, check_cluster, render_findings
from trainyard.cluster.description import (
    CARDS,
    Attempts,
    Cluster,
    Container,
    GpuNodes,
    find_cluster,
    format_minutes,
    load_cluster,
    parse_minutes,
)
from trainyard.errors import UserError
from trainyard.hardware import get_gpu

EXAMPLES = Path(__file__).resolve().parents[1] / "slurm" / "examples"

SMALLEST = """\
slurm_name: tower
shared: [/home]
gpus:
  a100:
    card: a100-80-sxm
    partition: gpu
    per_node: 8
    nodes: 2
    gres: gpu:a100
    cores_per_gpu: 8
    memory_gib_per_gpu: 60
"""


def write_cluster_file(folder: Path, text: str, name: str = "tower") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def read_error(path: Path) -> str:
    """Return the error of loading a file, without the leading folder."""
    with pytest.raises(UserError) as raised:
        load_cluster(path)
    return str(raised.value).removeprefix(f"{path.parent}/")


def test_the_three_examples_show_the_three_ways_to_request_a_gpu():
    examples = {path.stem: load_cluster(path) for path in EXAMPLES.glob("*.yaml")}
    assert sorted(examples) == ["constraint-venv", "gres-apptainer", "partition-pyxis"]
    by_type, by_feature, by_partition = (
        [(kind.gres, kind.constraint, kind.partition) for kind in examples[name].gpus.values() if kind.card != "cpu"]
        for name in ("gres-apptainer", "constraint-venv", "partition-pyxis")
    )
    assert by_type == [("gpu:a100", "", "gpu"), ("gpu:a5000", "", "gpu"), ("gpu:rtx2080ti", "", "gpu")]
    assert by_feature == [("gpu", "p100", "short"), ("gpu", "p100", "long")]
    assert by_partition == [("gpu", "", "h100"), ("gpu", "", "a100"), ("gpu", "", "a100-preempt")]
    assert [examples[name].container.kind for name in sorted(examples)] == ["", "apptainer", "pyxis"]
    assert len({example.slurm_name for example in examples.values()}) == 3


def test_the_first_example_shows_and_explains_every_key_and_every_card():
    text = (EXAMPLES / "gres-apptainer.yaml").read_text()
    shown = yaml.safe_load(text)
    first_gpus = next(iter(shown["gpus"].values()))
    expected = {f.name for f in fields(Cluster)} - {"name", "path"}
    assert set(shown) == expected
    for kind, part in ((GpuNodes, first_gpus), (Container, shown["container"]), (Attempts, shown["attempts"])):
        assert set(part) == {f.name for f in fields(kind)}
    one_line = text.replace("\n", " ")
    assert [card for card in CARDS if card not in one_line] == []


def test_a_file_with_only_the_required_keys_gets_the_defaults(tmp_path):
    cluster = load_cluster(write_cluster_file(tmp_path, SMALLEST))
    a100 = GpuNodes(
        card="a100-80-sxm",
        partition="gpu",
        per_node=8,
        nodes=2,
        gres="gpu:a100",
        cores_per_gpu=8,
        memory_gib_per_gpu=60,
    )
    assert cluster == Cluster(
        name="tower", path=tmp_path / "tower.yaml", slurm_name="tower", shared=["/home"], gpus={"a100": a100}
    )
    assert (cluster.time_default, cluster.signal_delay_s, cluster.attempts) == ("8h", 120, Attempts())


def test_values_stay_as_typed(tmp_path):
    """YAML 1.1 would make these 83, false and a dictionary's integer key, and OmegaConf an interpolation."""
    text = SMALLEST.replace("  a100:\n", "  3090:\n").replace("partition: gpu\n", "partition: no\n")
    text += "account: 0123\nscratch: ${SLURM_TMPDIR}/data\nqos:\nsbatch: {mail-type: END, exclusive: true}\n"
    cluster = load_cluster(write_cluster_file(tmp_path, text))
    assert list(cluster.gpus) == ["3090"]
    assert cluster.gpus["3090"].partition == "no"
    assert (cluster.account, cluster.scratch, cluster.qos) == ("0123", "${SLURM_TMPDIR}/data", "")
    assert cluster.sbatch == {"mail-type": "END", "exclusive": True}


SENTENCES = {
    # name: (text replaced in SMALLEST, its replacement, the error)
    "an unknown key": (
        "slurm_name:",
        "slurm_nam:",
        "tower.yaml, line 1: there is no key 'slurm_nam'. Nearest: slurm_name. Keys: slurm_name, shared, gpus, "
        "time_default, signal_delay_s, requeue_wait_s, account, qos, wckey, exclude, srun_args, sbatch, "
        "variables, setup, node_setup, on_end, python, container, scratch, group, attempts, data.",
    ),
    "an unknown key of the GPUs": (
        "cores_per_gpu",
        "cores_per_gpus",
        "tower.yaml, line 10: there is no key 'cores_per_gpus' in gpus.a100. Nearest: cores_per_gpu. Keys: card, "
        "partition, per_node, nodes, gres, constraint, cores_per_gpu, memory_gib_per_gpu, time_max, gpu_option, "
        "account, qos.",
    ),
    "an unknown card": (
        "a100-80-sxm",
        "a100-80-smx",
        "tower.yaml, line 5: gpus.a100.card: expected one of cpu, p100-12-pcie, p100-16-pcie, p100-16-sxm, 2080ti, "
        "a5000, a100-40-pcie, a100-40-sxm, a100-80-pcie, a100-80-sxm, h100-pcie, h100-sxm, h200, v100-16-pcie, "
        "v100-32-pcie, v100-16-sxm, v100-32-sxm, t4, 3090, a6000, 4090, l40s, b200, found 'a100-80-smx'. Nearest: "
        "a100-80-sxm. For any other NVIDIA card write its compute capability and memory: "
        "card: {sm: 89, memory_gib: 48}",
    ),
    "a missing key": (
        "    nodes: 2\n",
        "",
        "tower.yaml, line 5: gpus.a100.nodes: must be given. See slurm/examples/gres-apptainer.yaml.",
    ),
    "a word for a number": (
        "per_node: 8",
        "per_node: eight",
        "tower.yaml, line 7: gpus.a100.per_node: expected a whole number, found 'eight'.",
    ),
    "a number too small": (
        "per_node: 8",
        "per_node: 0",
        "tower.yaml, line 7: gpus.a100.per_node: expected 1 or more, found 0.",
    ),
    "an empty partition": (
        "partition: gpu",
        'partition: ""',
        "tower.yaml, line 6: gpus.a100.partition: must not be empty.",
    ),
    "a count in gres": (
        "gres: gpu:a100",
        "gres: gpu:a100:8",
        "tower.yaml, line 9: gpus.a100.gres: expected a name and a type such as gpu:a100, without a count (that is "
        "per_node), found 'gpu:a100:8'.",
    ),
    "GPUs without gres": (
        "    gres: gpu:a100\n",
        "",
        "tower.yaml: gpus.a100.gres: expected gpu, gpu:a100 or the like, as the card has GPUs, found ''.",
    ),
    "a CPU with gres": (
        "a100-80-sxm",
        "cpu",
        "tower.yaml: gpus.a100.gres: expected no value, as card is cpu, found 'gpu:a100'.",
    ),
    "no GPUs": (
        SMALLEST[SMALLEST.index("gpus:") :],
        "gpus: {}\n",
        "tower.yaml, line 3: gpus: names no GPUs, so nothing can run. Describe one kind of node, with card: cpu if "
        "it has none.",
    ),
    "GPUs that are no mapping": (
        SMALLEST[SMALLEST.index("gpus:") :],
        "gpus: [a100]\n",
        "tower.yaml, line 3: gpus: expected keys with values, found a list.",
    ),
    "text for a list": (
        "shared: [/home]",
        "shared: /home",
        "tower.yaml, line 2: shared: expected a list such as [a, b], found '/home'.",
    ),
    "a relative folder": (
        "[/home]",
        "[/home, data]",
        "tower.yaml, line 2: shared: expected absolute paths such as /home, found 'data'.",
    ),
    "a card of AMD": (
        "a100-80-sxm",
        "mi300x",
        "tower.yaml, line 5: gpus.a100.card: 'mi300x' is an AMD card, and Trainyard computes on NVIDIA cards only "
        "(CUDA). Describe other nodes, or use the CPUs of these: card: cpu, without gres.",
    ),
    "GPUs by an option that counts only GPUs": (
        "gres: gpu:a100",
        "gres: shard\n    gpu_option: gpus-per-node",
        "tower.yaml: gpus.a100.gpu_option: gpus-per-node requests GPUs only, but gres is 'shard'. Write "
        "gpu_option: gres",
    ),
    "half a description of a card": (
        "card: a100-80-sxm",
        "card: {sm: 89}",
        "tower.yaml, line 5: gpus.a100.card.memory_gib: must be given. See slurm/examples/gres-apptainer.yaml.",
    ),
    "a compute capability with a point": (
        "card: a100-80-sxm",
        "card: {sm: 8.9, memory_gib: 48}",
        "tower.yaml, line 5: gpus.a100.card.sm: expected a whole number, found '8.9'.",
    ),
    "a time in no format": (
        "shared:",
        "time_default: 08:00:00h\nshared:",
        "tower.yaml, line 2: time_default: '08:00:00h' is not a time. Write days, hours, minutes: 2d, 8h, 8h30m, 30m; "
        "90 for minutes; or as for Slurm: 8:00:00, 1-12, 1-12:30.",
    ),
    "an unknown container": (
        "shared:",
        "container: {kind: aptainer, image: x.sif}\nshared:",
        "tower.yaml, line 2: container.kind: expected one of \"\", apptainer, pyxis, found 'aptainer'. "
        "Nearest: apptainer.",
    ),
    "a container without an image": (
        "shared:",
        "container: {kind: pyxis}\nshared:",
        "tower.yaml: container.image: is empty, but container.kind is given. Give both or none.",
    ),
    "another brace in an image": (
        "shared:",
        "container: {kind: pyxis, image: 'yard-{gpu}'}\nshared:",
        "tower.yaml, line 2: container.image: may contain {target} but no other braces, found 'yard-{gpu}'.",
    ),
    "an option of sbatch that has a key": (
        "shared:",
        "sbatch: {partition: gpu}\nshared:",
        "tower.yaml, line 2: sbatch: 'partition' is set by 'partition' of the GPUs. Remove it here.",
    ),
    "an option of sbatch with dashes": (
        "shared:",
        "sbatch: {--mail-type: END}\nshared:",
        "tower.yaml, line 2: sbatch: expected long options of sbatch without leading dashes, such as mail-type, "
        "found '--mail-type'.",
    ),
    "a line break, which would end a line of the batch script": (
        "shared:",
        'account: "me\\nrm -rf x"\nshared:',
        "tower.yaml, line 2: account: expected one line of text, found a line break or another control character.",
    ),
    "the same key twice": (
        "shared:",
        "slurm_name: other\nshared:",
        "tower.yaml, line 2: slurm_name: is there twice. Remove one of them.",
    ),
    "no YAML": ("shared: [/home]", "shared: [/home", "tower.yaml, line 3: not YAML: expected ',' or ']', but got ':'."),
    "nesting without an end": (
        "shared: [/home]",
        "shared: " + "[" * 30_000,
        "tower.yaml: not YAML: nested too deeply.",
    ),
    "a number of 5,000 digits": (
        "    nodes: 2\n",
        f"    nodes: {'9' * 5000}\n",
        f"tower.yaml, line 8: gpus.a100.nodes: expected a whole number, found '{'9' * 38}..'.",
    ),
    "nothing": (SMALLEST, "# empty\n", "tower.yaml: is empty. Start from one of slurm/examples/."),
}


@pytest.mark.parametrize("mistake", SENTENCES)
def test_an_error_is_a_sentence_that_names_file_line_and_key(mistake, tmp_path):
    right, wrong, sentence = SENTENCES[mistake]
    assert right in SMALLEST
    assert read_error(write_cluster_file(tmp_path, SMALLEST.replace(right, wrong, 1))) == sentence


def test_a_cluster_is_found_by_path_by_name_and_by_its_slurm(tmp_path):
    tower = write_cluster_file(tmp_path, SMALLEST)
    write_cluster_file(tmp_path, SMALLEST.replace("tower", "other"), name="other")
    for wanted, slurm_name in ((str(tower), None), ("tower", "other"), ("", "tower")):
        assert find_cluster(wanted, tmp_path, slurm_name).path == tower


def test_a_cluster_is_found_even_if_the_file_of_another_is_invalid(tmp_path):
    write_cluster_file(tmp_path, SMALLEST)
    write_cluster_file(tmp_path, SMALLEST.replace("tower", "other").replace("card:", "cart:"), name="other")
    assert find_cluster("", tmp_path, "tower").name == "tower"


@pytest.mark.parametrize(
    ("wanted", "slurm_name", "sentence"),
    [
        ("towr", None, "There is no cluster 'towr'. Nearest: tower. {there}"),
        ("", None, "No Slurm answers here, so the cluster must be named. {there}"),
        ("", "galaxy", "The Slurm here is named 'galaxy', and no file has this slurm_name. {there}"),
        ("", "tower", "Several files describe the Slurm 'tower': again, tower. Name one: --cluster NAME."),
    ],
)
def test_the_error_for_an_unknown_cluster_lists_the_cluster_files(wanted, slurm_name, sentence, tmp_path):
    for name in ("tower", "again"):
        write_cluster_file(tmp_path, SMALLEST, name=name)
    write_cluster_file(tmp_path, SMALLEST.replace("slurm_name: tower\n", ""), name="third")
    there = f"{tmp_path} has: again (tower), third (no slurm_name), tower (tower). Name one: --cluster NAME."
    with pytest.raises(UserError) as raised:
        find_cluster(wanted, tmp_path, slurm_name)
    assert str(raised.value) == sentence.format(there=there)


def test_a_folder_without_cluster_files_says_where_to_start(tmp_path):
    with pytest.raises(UserError, match=r"holds no cluster file\. Copy one of slurm/examples/ to .*/NAME\.yaml"):
        find_cluster("", tmp_path, "tower")


@pytest.mark.parametrize(
    ("card", "sm", "memory_gib"), [("{sm: 89, memory_gib: 48}", 89, 48), ("l40s", 89, 48), ("b200", 100, 180)]
)
def test_a_card_is_named_or_described(card, sm, memory_gib, tmp_path):
    nodes = load_cluster(write_cluster_file(tmp_path, SMALLEST.replace("a100-80-sxm", card))).gpus["a100"]
    gpu = get_gpu(nodes.card)
    assert gpu is not None and (gpu.sm, gpu.memory_gib) == (sm, memory_gib)


def test_times_are_days_hours_and_minutes():
    texts = {"90": 90, "30m": 30, "8h": 480, "8h30m": 510, "2d": 2880, "2d12h": 3600, "1d1m": 1441}
    assert {text: parse_minutes(text) for text in texts} == texts
    assert [format_minutes(parse_minutes(text)) for text in texts] == [
        "1h30m",
        "30m",
        "8h",
        "8h30m",
        "2d",
        "2d12h",
        "1d1m",
    ]
    slurm = {"8:00:00": 480, "90:00": 90, "0:30": 1, "1:00:01": 61, "1-12": 2160, "1-12:30": 2190, "1-0:0:1": 1441}
    assert {text: parse_minutes(text) for text in slurm} == slurm
    for text in (
        "",
        "0",
        "0h",
        "h",
        "8h30",
        "0:00",
        "1-",
        "-1:00",
        "1:2:3:4",
        "1-2:3:4:5",
        "1.5h",
        "-5",
        "30s",
        "30m8h",
    ):
        with pytest.raises(UserError, match="is not a time"):
            parse_minutes(text)


def test_without_slurm_a_check_still_looks_at_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    text = SMALLEST.replace("[/home]", f"[{tmp_path}, {tmp_path}/none]")
    text += f"container: {{kind: apptainer, image: '{tmp_path}/yard-{{target}}.sif'}}\n"
    (tmp_path / "yard-cpu.sif").touch()
    assert check_cluster(load_cluster(write_cluster_file(tmp_path, text))) == [
        Finding("ok", "shared", f"{tmp_path} is here."),
        Finding("wrong", "shared", f"{tmp_path}/none is not a folder here.", "Correct the path, or remove it."),
        Finding(
            "note",
            "container.kind",
            "apptainer is not on PATH here.",
            "The nodes need it: on their PATH, or from a line in `setup`.",
        ),
        Finding(
            "wrong",
            "container.image",
            f"there is no {tmp_path}/yard-cuda13.sif. Build it: make sif HW=a100-80-sxm. Or correct the path.",
        ),
        Finding(
            "wrong",
            "Slurm",
            "There is no Slurm here: sbatch is not on PATH.",
            "Check on a login node of the cluster.",
        ),
    ]


def test_a_data_root_is_looked_for_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    roots = f"data: {{a: '{tmp_path}', b: '{tmp_path}/none', c: synthetic}}\n"
    found = check_cluster(load_cluster(write_cluster_file(tmp_path, SMALLEST + roots)))
    assert [finding for finding in found if finding.what.startswith("data.")] == [
        Finding("ok", "data.a", f"{tmp_path} is here."),
        Finding("wrong", "data.b", f"{tmp_path}/none is not a folder here.", "Correct the path, or remove it."),
    ]


def test_findings_are_lines_and_the_last_line_says_what_to_do():
    fine, note = Finding("ok", "shared", "/home is here."), Finding("note", "python", "elsewhere.", "Look.")
    wrong = Finding("wrong", "gpus.a100.nodes", "3, but there are 2.", "Write nodes: 2")
    assert render_findings([fine, note]).splitlines() == [
        "ok     shared: /home is here.",
        "note   python: elsewhere. Look.",
        "Nothing is wrong (notes: 1). Next: trainyard submit JOB",
    ]
    assert render_findings([wrong, note]).splitlines() == [
        "wrong  gpus.a100.nodes: 3, but there are 2. Write nodes: 2",
        "note   python: elsewhere. Look.",
        "1 wrong (notes: 1). Correct the file, then check again.",
    ]
