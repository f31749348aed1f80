import json
import os
import re
import subprocess
import sys

import pytest

from tests.images import make_import_environ
from tests.training import FAMILIES
from trainyard.errors import UserError
from trainyard.hardware import (
    GPUS,
    _read_cpu_quota,
    choose_compute_threads,
    choose_precision,
    count_cores,
    explain_missing_gpu,
    explain_missing_kernels,
    find_gpu_by_name,
    read_driver_version,
    read_openmp_wait_policy,
    set_openmp_wait_policy,
    show_own_mig_slice,
)


@pytest.mark.parametrize(
    "printed, memory_gib, key",
    [
        ("Tesla P100-PCIE-16GB", 15.9, "p100-16-pcie"),
        ("Tesla P100-PCIE-12GB", 11.9, "p100-12-pcie"),
        ("Tesla P100-SXM2-16GB", 15.9, "p100-16-sxm"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.75, "2080ti"),
        ("GeForce RTX 2080 Ti", 10.75, "2080ti"),  # an old driver
        ("NVIDIA RTX A5000", 23.7, "a5000"),
        ("Tesla T4", 14.56, "t4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA RTX A5000", 22.5, "a5000"),  # ECC on
        ("A100-PCIE-40GB", 39.4, "a100-40-pcie"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40-sxm"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80-sxm"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H200", 139.8, "h200"),
    ],
)
def test_a_device_is_found_by_the_name_cuda_prints(printed, memory_gib, key):
    gpu = find_gpu_by_name(printed, memory_gib)
    assert gpu is not None and gpu.key == key


@pytest.mark.parametrize(
    "printed, memory_gib",
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5),
        ("NVIDIA A100-SXM4-80GB", 39.5),
        ("NVIDIA GeForce RTX 2080 Ti", 21.5),  # refitted with 22 GB
        ("NVIDIA RTX A5000 Laptop GPU", 16.0),
        ("NVIDIA H100 NVL", 93.1),
        ("NVIDIA H200 NVL", 139.8),
        ("NVIDIA GH200 480GB", 95.0),
        ("NVIDIA GeForce RTX 5090", 31.4),
        ("", 0.0),
    ],
)
def test_an_unknown_card_is_never_matched(printed, memory_gib):
    assert find_gpu_by_name(printed, memory_gib) is None


def test_the_gpu_table_is_consistent():
    assert len({gpu.key for gpu in GPUS}) == len({gpu.name for gpu in GPUS}) == len(GPUS) == 12


@pytest.mark.parametrize(
    "sm, dtype, loss_scaling, tf32, channels_last",
    [
        (52, "fp32", False, False, False),
        (60, "fp32", False, False, False),
        (61, "fp32", False, False, False),
        (70, "fp16", True, False, True),
        (75, "fp16", True, False, True),
        (80, "bf16", False, True, True),
        (86, "bf16", False, True, True),
        (90, "bf16", False, True, True),
    ],
)
def test_auto_chooses_what_each_generation_runs_fastest(sm, dtype, loss_scaling, tf32, channels_last):
    policy = choose_precision(sm)
    assert (policy.dtype, policy.loss_scaling, policy.tf32) == (dtype, loss_scaling, tf32)
    assert policy.channels_last == channels_last
    assert not policy.compile


def test_the_cpu_trains_in_fp32_and_in_bf16_on_request():
    assert (choose_precision(None).dtype, choose_precision(None).compile) == ("fp32", False)
    assert choose_precision(None, precision="bf16").dtype == "bf16"


@pytest.mark.parametrize(
    "sm, precision, device, choices, way_out",
    [
        (None, "fp16", "the CPU", "fp32, bf16", "precision=fp32"),
        (60, "bf16", "sm_60", "fp32, fp16", "precision=fp32"),
        (61, "fp16", "sm_61", "fp32", "precision=fp32"),
        (70, "bf16", "sm_70", "fp16, fp32", "precision=fp16"),
        (75, "bf16", "sm_75", "fp16, fp32", "precision=fp16"),
        (90, "fp8", "sm_90", "bf16, fp16, fp32", "precision=bf16"),
    ],
)
def test_an_unsupported_precision_is_refused_with_what_to_use_instead(sm, precision, device, choices, way_out):
    with pytest.raises(UserError) as refused:
        choose_precision(sm, precision=precision)
    for part in (f"precision={precision}", f"({device})", f"only {choices} at", way_out, "precision=auto"):
        assert part in str(refused.value)


def test_fp16_on_p100_is_allowed_and_says_that_it_saves_memory():
    policy = choose_precision(60, precision="fp16")
    assert policy.loss_scaling and not policy.channels_last
    assert "memory" in policy.reasons["dtype"]


def test_an_explicit_fp32_is_exact_on_ampere():
    policy = choose_precision(80, precision="fp32")
    assert (policy.dtype, policy.tf32, policy.channels_last) == ("fp32", False, False)


def test_compile_is_impossible_on_p100_and_optional_from_volta_on():
    with pytest.raises(UserError, match=r"compile=on.*Triton.*sm_70.*sm_60.*compile=off"):
        choose_precision(60, compile="on")
    assert not choose_precision(60, compile="off").compile
    assert choose_precision(70, compile="on").compile
    assert choose_precision(None, compile="on").compile


def test_cuda_graphs_are_for_cards_that_compile_and_for_one_shape():
    assert choose_precision(80, compile="graphs").cuda_graphs and choose_precision(80, compile="graphs").compile
    assert not choose_precision(80, compile="on").cuda_graphs and not choose_precision(80).cuda_graphs
    choose_precision(80, compile="on", varying_shapes="texts have different lengths")
    for sm, varying, said in [
        (None, "", "on the CPU, but CUDA graphs need a GPU. Use compile=on, or compile=off."),
        (
            80,
            "texts differ",
            "on sm_80, but a CUDA graph is for one shape: texts differ. Use compile=on, or compile=off.",
        ),
        (
            60,
            "",
            "but torch.compile generates Triton kernels, and Triton needs sm_70 or newer, not sm_60. Use compile=off",
        ),
    ]:
        with pytest.raises(UserError, match=f"^compile=graphs requested.*{said}"):
            choose_precision(sm, compile="graphs", varying_shapes=varying)


def test_a_requested_layout_overrides_the_policy():
    forced = choose_precision(60, channels_last="on")
    assert forced.channels_last and "slower" in forced.reasons["channels_last"]
    assert not choose_precision(90, channels_last="off").channels_last


@pytest.mark.parametrize("sm", [None, 60, 75, 80, 90])
def test_every_choice_has_a_reason(sm):
    policy = choose_precision(sm)
    assert set(policy.reasons) == set(vars(policy)) - {"reasons"}
    assert all(policy.reasons.values())


def test_the_core_count_follows_the_affinity_mask_and_not_the_node():
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert count_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)
    assert 1 <= count_cores() <= len(mask)


def make_cgroup(tmp_path, membership, **limits):
    """Make a cgroup v2 tree: `limits` maps a group ("root", "a", "a__b") to its cpu.max."""
    for group, text in limits.items():
        folder = tmp_path / "cgroup" / ("" if group == "root" else group.replace("__", "/"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(text)
    (tmp_path / "membership").write_text(membership)
    return tmp_path / "cgroup", tmp_path / "membership"


def test_the_tightest_quota_up_to_the_root_counts(tmp_path):
    tree = make_cgroup(tmp_path, "0::/a/b\n", root="max 100000\n", a="150000 100000\n", a__b="400000 100000\n")
    assert _read_cpu_quota(*tree) == 1.5


def test_a_container_that_sees_itself_as_the_root_has_its_quota_there(tmp_path):
    assert _read_cpu_quota(*make_cgroup(tmp_path, "0::/\n", root="50000 100000\n")) == 0.5


def test_a_quota_of_the_older_cgroups_counts_too(tmp_path):
    tree = make_cgroup(tmp_path, "4:memory:/m\n3:cpuacct,cpu:/slurm/job\n2:cpuset:/\n0::/\n")
    for group, quota in (("", "-1"), ("slurm", "250000"), ("slurm/job", "50000")):
        folder = tmp_path / "cgroup" / "cpu" / group
        folder.mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert _read_cpu_quota(*tree) == 0.5


@pytest.mark.parametrize("membership", ["0::/\n", "0::/gone\n", "4:memory:/x\n1:cpu:/\n"])
def test_no_quota_is_no_limit(tmp_path, membership):
    assert _read_cpu_quota(*make_cgroup(tmp_path, membership, root="max 100000\n")) is None
    assert _read_cpu_quota(tmp_path / "cgroup", tmp_path / "nowhere") is None


def test_hardware_loads_no_torch():
    code = "import sys, trainyard.hardware; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("driver", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"TRAINYARD_TARGET": "cpu"}, None),
        (None, {"TRAINYARD_TARGET": "cuda13", "TRAINYARD_MIN_DRIVER": "580.65.06"}, "image cuda13 is for GPUs"),
        (
            "590.10",
            {"TRAINYARD_TARGET": "cuda12-pascal", "TRAINYARD_MIN_DRIVER": "525.1", "TRAINYARD_MAX_DRIVER": "580"},
            "needs driver 580 or older",
        ),
        ("580.65.06", {"CUDA_VISIBLE_DEVICES": ""}, None),
        ("580.65.06", {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ("580.65.06", {"CUDA_VISIBLE_DEVICES": "-1,0"}, None),
        ("535.54.03", {"TRAINYARD_TARGET": "cuda13", "TRAINYARD_MIN_DRIVER": "580.65.06"}, "Use image cuda12, which"),
        ("470.82.01", {"TRAINYARD_TARGET": "cuda13", "TRAINYARD_MIN_DRIVER": "580.65.06"}, "Ask for a newer driver"),
        ("580.65.06", {"TRAINYARD_TARGET": "cpu"}, "but this is the CPU image"),
        ("580.65.06", {"TRAINYARD_TARGET": "cuda13", "TRAINYARD_MIN_DRIVER": "580.65.06"}, "start it with GPUs"),
        ("580.65.06", {"CUDA_VISIBLE_DEVICES": "0"}, "torch finds no GPU"),
    ],
)
def test_a_gpu_that_torch_cannot_see_is_an_error_and_never_replaced_by_the_cpu(driver, environ, expected):
    fault = explain_missing_gpu(driver, environ)
    assert (fault is None) == (expected is None)
    assert expected is None or expected in str(fault)


@pytest.mark.parametrize(
    ("sm", "arch_list", "image"),
    [
        (60, ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], "cuda12-pascal"),
        (75, ["sm_80", "sm_90"], "cuda12"),
        (80, ["sm_50", "sm_60"], "cuda13"),
        (60, ["sm_50", "sm_60", "sm_70"], None),
        (86, ["sm_80", "sm_90"], None),
        (80, ["sm_86", "sm_90"], "cuda13"),
        (90, ["sm_80", "compute_80"], None),
    ],
)
def test_a_card_without_kernels_gets_the_name_of_the_container_image_that_has_them(sm, arch_list, image):
    fault = explain_missing_kernels(sm, arch_list)
    assert (fault is None) == (image is None)
    assert image is None or (f"sm_{sm}" in str(fault) and f"make image HW={image}." in str(fault))


def test_the_driver_is_read_from_the_kernel(tmp_path):
    file = tmp_path / "version"
    assert read_driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n")
    assert read_driver_version(file) == "535.54.03"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert read_driver_version(file) == "580.65.06"


@pytest.mark.parametrize(
    ("stated", "after", "record"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive"}, ("passive", "waiting threads sleep")),
        (
            {"OMP_WAIT_POLICY": "active"},
            {"OMP_WAIT_POLICY": "active"},
            ("OMP_WAIT_POLICY=active", "set in the environment"),
        ),
        ({"GOMP_SPINCOUNT": "1000"}, {"GOMP_SPINCOUNT": "1000"}, ("GOMP_SPINCOUNT=1000", "set in the environment")),
    ],
)
def test_waiting_threads_sleep_unless_another_policy_is_set(stated, after, record):
    environ = dict(stated)
    set_openmp_wait_policy(environ)
    assert environ == after
    value, reason = read_openmp_wait_policy(environ)
    assert value == record[0] and reason.startswith(record[1])


@pytest.mark.parametrize(
    ("environ", "launcher", "threads", "reason"),
    [
        ({}, "one process", 4, "why"),
        ({"OMP_NUM_THREADS": "2"}, "one process", 2, "OMP_NUM_THREADS=2 in the environment"),
        ({"OMP_NUM_THREADS": "3,1"}, "slurm", 3, "OMP_NUM_THREADS=3,1 in the environment"),
        ({"OMP_NUM_THREADS": "1"}, "one process", 1, "OMP_NUM_THREADS=1 in the environment"),
        ({"OMP_NUM_THREADS": "1"}, "torchrun", 4, "why; ignores OMP_NUM_THREADS=1, which torchrun sets by default"),
        ({"OMP_NUM_THREADS": "2"}, "torchrun", 2, "OMP_NUM_THREADS=2 in the environment"),
    ],
)
def test_a_users_number_of_threads_counts_but_not_torchruns_default(environ, launcher, threads, reason):
    chosen, why = choose_compute_threads(environ, cores=4, reason="why", launcher=launcher)
    assert chosen == threads and why.startswith(reason)


@pytest.mark.parametrize("stated", ["many", "0", "-1"])
def test_an_invalid_number_of_threads_is_refused(stated):
    with pytest.raises(UserError, match=rf"OMP_NUM_THREADS={stated}: expected a number of threads, such as 4\."):
        choose_compute_threads({"OMP_NUM_THREADS": stated}, cores=4, reason="", launcher="one process")


@pytest.mark.slow
@pytest.mark.parametrize("stated", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_openmp_itself_reports_how_the_threads_of_a_run_wait(stated, tmp_path):
    environ = {name: value for name, value in make_import_environ().items() if name != "OMP_WAIT_POLICY"}
    environ |= {"OMP_DISPLAY_ENV": "TRUE", "OMP_NUM_THREADS": "1"} | stated
    command = [sys.executable, "-m", "trainyard", "run", "stripes", "--jobs", str(FAMILIES), "--runs", "runs"]
    words = ["--name", "r", "max_duration=1ep", "data.cache=cache"]
    done = subprocess.run([*command, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    policy = stated.get("OMP_WAIT_POLICY", "passive")
    shown = re.findall(r"OMP_WAIT_POLICY = '(\w+)'", done.stderr)
    assert shown and set(shown) == {policy.upper()}
    choices = json.loads((tmp_path / "runs" / "stripes" / "r" / "env.json").read_text())["choices"]
    assert choices["openmp_wait"]["value"] == ("OMP_WAIT_POLICY=active" if stated else "passive")
    assert choices["compute_threads"] == {"value": 1, "reason": "OMP_NUM_THREADS=1 in the environment"}


def test_each_rank_sees_its_own_mig_slice_and_no_other():
    visible = "MIG-aa,MIG-bb,MIG-cc"
    for local_rank, own in enumerate(visible.split(",")):
        environ = {"CUDA_VISIBLE_DEVICES": visible}
        show_own_mig_slice(environ, local_rank)
        assert environ == {"CUDA_VISIBLE_DEVICES": own}
    with pytest.raises(UserError, match="Local rank 3 has no MIG slice: CUDA_VISIBLE_DEVICES has 3"):
        show_own_mig_slice({"CUDA_VISIBLE_DEVICES": visible}, 3)


@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "MIG-aa"}])
def test_whole_gpus_and_a_single_slice_stay_visible(visible: dict[str, str]):
    environ = dict(visible)
    show_own_mig_slice(environ, 1)
    assert environ == visible
