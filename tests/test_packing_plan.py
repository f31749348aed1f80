"""What the Slurm job that packs requests: cores and time by how much there is to pack."""

from pathlib import Path

import pytest

from tests.slurm.cluster_runs import LAB_FILE, count_listings
from tests.training import FAMILIES
from trainyard.cluster.description import Cluster, load_cluster
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.plan.make_plan import make_plan
from trainyard.plan.packing import PackingChoice, choose_packing
from trainyard.plan.resources import ResourceRequest

JOBS = Path(__file__).resolve().parents[1] / "jobs"
HALF_A_DAY_MIN = 720


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """The lab with CPU nodes of 64 cores and jobs of half a day."""
    nodes = "cpus: {card: cpu, partition: p100, per_node: 16, nodes: 2, cores_per_gpu: 4, memory_gib_per_gpu: 8}"
    text = (
        LAB_FILE.read_text().replace("time_default: 30m", "time_default: 12h").replace("gpus:\n", f"gpus:\n  {nodes}\n")
    )
    (tmp_path / "site.yaml").write_text(text)
    return load_cluster(tmp_path / "site.yaml")


def choose(cluster: Cluster, job: str, *options: str, jobs: Path = JOBS) -> PackingChoice:
    config = compose(job, [*options, f"data.cache={cluster.path.parent / 'cache'}"], jobs)
    return choose_packing(make_plan(config, cluster, ResourceRequest(hw="a100")), jobs)


def test_few_drawn_samples_take_neither_a_whole_node_nor_half_a_day(cluster):
    found = choose(cluster, "fingerprint_smoke", "data.synthetic=2400")
    assert found.plan is not None
    assert (found.plan.kind.cores_per_gpu, found.plan.time_min, found.plan.kind.memory_gib_per_gpu) == (4, 30, 8)
    assert found.where.value == "Slurm job on p100: 4 cores, 30m"
    assert "2,400 drawn samples" in found.where.reason and "at least 4 cores and 30m" in found.where.reason


@pytest.mark.parametrize(
    "job", [f"{name}_smoke" for name in ("antispoof", "fingerprint", "pricing", "tinydet", "twins")]
)
def test_more_samples_take_more_cores_then_more_time_and_never_more_than_the_cluster_gives(job, cluster):
    sizes = []
    for exponent in range(2, 13):
        plan = choose(cluster, job, f"data.synthetic={10**exponent}").plan
        assert plan is not None
        sizes.append((plan.kind.cores_per_gpu, plan.time_min))
    assert sizes == sorted(sizes) and sizes[0] == (4, 30) and sizes[-1] == (64, HALF_A_DAY_MIN)
    assert any(4 < cores < 64 for cores, _ in sizes) or (64, 30) in sizes


def test_raw_files_are_counted_and_larger_ones_take_more(cluster, tmp_path):
    raw = tmp_path / "raw"
    load_family(FAMILIES, "stripes", "pack").synthesize(raw, count=40, seed=0)
    small = choose(cluster, "stripes", f"data.path={raw}", jobs=FAMILIES)
    assert small.plan is not None and small.plan.kind.cores_per_gpu == 4
    assert "40 samples" in small.where.reason
    for path in raw.glob("*.png"):
        with path.open("r+b") as file:
            file.truncate(2**30)  # sparse
    large = choose(cluster, "stripes", f"data.path={raw}", jobs=FAMILIES)
    assert large.plan is not None and large.plan.kind.cores_per_gpu == 64
    assert "40.000 GiB" in large.where.reason


def test_raw_files_are_listed_once_to_see_whether_they_are_packed_and_how_many_they_are(cluster, tmp_path):
    raw, other = tmp_path / "raw", cluster.path.parent / "cache" / "stripes-other" / "index.h5"
    load_family(FAMILIES, "stripes", "pack").synthesize(raw, count=8, seed=0)
    other.parent.mkdir(parents=True)
    other.touch()
    with count_listings(raw) as listings:
        found = choose(cluster, "stripes", f"data.path={raw}", jobs=FAMILIES)
    assert "8 samples" in found.where.reason and listings == [str(raw)]


def test_what_cannot_be_counted_takes_a_node_for_as_long_as_before(cluster, tmp_path):
    found = choose(cluster, "stripes", f"data.path={tmp_path / 'nowhere'}", jobs=FAMILIES)
    assert found.plan is not None
    assert (found.plan.kind.cores_per_gpu, found.plan.time_min) == (64, HALF_A_DAY_MIN)
    assert "not counted yet" in found.where.reason
