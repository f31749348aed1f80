"""Lists the checks of `trainyard gpu-check` for the families in a folder of jobs, in the order in which they run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainyard import config as configs
from trainyard.errors import UserError
from trainyard.text import find_nearest
from trainyard.tools.gpu_checks import card, decoding, exact_runs, memory, overflow, preset_steps
from trainyard.tools.gpu_checks.check import ONE_FAMILY, SMALL, STEPS, Check, Figures, Work

_MODES = (
    ("auto", ["precision=auto", "compile=off"]),
    ("fp16", ["precision=fp16", "compile=off"]),
    ("compile", ["precision=auto", "compile=on"]),
)
_NO_CARD = "there is no card here"
_SLOW_COMPILER = "compiling takes minutes on a CPU, and says nothing about a card"
_NO_GRAPHS = "CUDA graphs need a card"
_QUICK = "--quick leaves it out"
_TIMINGS: Mapping[str, tuple[Callable[..., Figures], str]] = {
    "eager": (preset_steps.measure_eager_steps, ""),
    "compiled": (preset_steps.measure_compiled_steps, _SLOW_COMPILER),
    "graphs": (preset_steps.compare_graphs, _NO_GRAPHS),
}


def list_checks(jobs: Path, *, small: bool, quick: bool) -> list[Check]:
    """List all checks.

    Args:
        small: of the families' smoke and demo presets alone, as on a CPU; otherwise of every preset.
        quick: leave out most presets and settings; on a CPU, all but one family in the steps of `ONE_FAMILY`.
    """
    families = _find_families(jobs)
    one_each = {name: f"{name}_smoke" if small else name for name in families}
    few = list(families)[:1] if small and quick else list(families)
    checks = [
        *_list_card_checks(),
        *_list_contact_checks(families, small=small, quick=quick),
        *_list_bitwise_checks(families),
        *(Check("decode", name, partial(decoding.compare_decoding, preset=name)) for name in one_each.values()),
        *_list_speed_checks(one_each.values(), small=small, quick=quick),
        *_list_overlap_checks(one_each.values()),
        *(Check("memory", name, partial(memory.compare_memory, preset=name)) for name in one_each.values()),
    ]
    chosen = {*few, *(one_each[name] for name in few)}
    return [_leave_out(check, check.step in ONE_FAMILY and check.name.split("/")[0] not in chosen) for check in checks]


def _leave_out(check: Check, unwanted: bool) -> Check:
    return replace(check, left_out=_QUICK) if unwanted else check


def select_checks(checks: Sequence[Check], patterns: Sequence[str]) -> list[Check]:
    """Return the checks that any pattern means, all without patterns.

    Raises:
        UserError: a pattern means none.
    """
    for pattern in patterns:
        if not any(check.matches(pattern) for check in checks):
            names = sorted({part for check in checks for part in check.full_name.split("/")})
            near = find_nearest(pattern, names, most=3)
            hint = f"Nearest: {', '.join(near)}. " if near else ""
            raise UserError(
                f"--only {pattern}: there is no such check. {hint}"
                f"Name a step ({', '.join(STEPS)}) or a preset of this list: trainyard gpu-check --list"
            )
    return [check for check in checks if not patterns or any(check.matches(pattern) for pattern in patterns)]


def _find_families(jobs: Path) -> dict[str, list[str]]:
    """Return the presets of each family that has a smoke preset, base preset first.

    Raises:
        UserError: there is no such folder, or no family in it.
    """
    found: dict[str, list[str]] = {}
    for preset, path in configs.find_jobs(jobs).items():
        found.setdefault(path.parent.name, []).append(preset)
    families = {name: sorted(found[name]) for name in sorted(found) if f"{name}_smoke" in found[name]}
    if not families:
        raise UserError(f"{jobs}: no family with a preset FAMILY_smoke.yaml. Name the folder of jobs: --jobs DIR")
    return families


def _list_card_checks() -> Iterator[Check]:
    yield Check("environment", "kernels", card.check_kernels)
    yield Check("environment", "products", card.check_products)
    for optimizer in ("adamw", "sgd"):
        yield Check("environment", f"overflow/{optimizer}", partial(overflow.check_overflow, optimizer=optimizer))
    yield Check("environment", "copies", card.measure_copies, card_only=_NO_CARD)
    yield Check("environment", "peers", card.check_peers, card_only=_NO_CARD)
    yield Check("environment", "clocks", card.read_clocks, card_only=_NO_CARD)


def _list_contact_checks(families: dict[str, list[str]], *, small: bool, quick: bool) -> Iterator[Check]:
    """Yield the first steps of presets: all in one mode, then all in the next, small presets before large ones."""
    demos = [f"{name}_demo" for name in families if f"{name}_demo" in families[name]]
    smoke = [f"{name}_smoke" for name in families]
    full = [preset for presets in families.values() for preset in presets if not preset.endswith(SMALL)]
    presets = [*smoke, *demos] if small else [*demos, *full]
    wanted = {*demos, *families, *(f"{name}_smoke" for name in families if f"{name}_demo" not in demos)}
    for mode, overrides in _MODES:
        for preset in presets:
            work: Work = partial(preset_steps.take_first_steps, preset=preset, overrides=overrides)
            slow = small and mode == "compile" and (quick or not preset.endswith("_smoke"))
            unwanted = quick and (preset not in wanted or (small and mode == "fp16"))
            check = Check("contact", f"{preset}/{mode}", work, card_only=_SLOW_COMPILER if slow else "")
            yield _leave_out(check, unwanted)


def _list_bitwise_checks(families: Iterable[str]) -> Iterator[Check]:
    for graphs in (False, True):
        for name in families:
            work = partial(exact_runs.compare_runs, family=name, overrides=["compile=graphs"] if graphs else [])
            yield Check("bitwise", f"{name}/graphs" if graphs else name, work, card_only=_NO_GRAPHS if graphs else "")


def _list_speed_checks(presets: Iterable[str], *, small: bool, quick: bool) -> Iterator[Check]:
    """Yield the timings: eager ones of all presets before compiled ones, the likeliest settings first."""
    settings = [(deterministic, layout) for layout in ("on", "off") for deterministic in ("false", "true")]
    for kind in ("eager", "compiled", "graphs"):
        for number, (deterministic, layout) in enumerate(settings[:1] if small and kind != "eager" else settings):
            for check in _list_timings(kind, presets, deterministic, layout):
                yield _leave_out(check, quick and number > 0)


def _list_timings(kind: str, presets: Iterable[str], deterministic: str, layout: str) -> Iterator[Check]:
    measure, card_only = _TIMINGS[kind]
    words = (
        f"{kind}/{'deterministic' if deterministic == 'true' else 'any-order'}/{'nhwc' if layout == 'on' else 'nchw'}"
    )
    overrides = ["precision=auto", f"deterministic={deterministic}", f"channels_last={layout}"]
    overrides += ["compile=off"] if kind == "eager" else []
    for preset in presets:
        work: Work = partial(measure, preset=preset, overrides=overrides)
        yield Check("speed", f"{preset}/{words}", work, card_only=card_only)


def _list_overlap_checks(presets: Iterable[str]) -> Iterator[Check]:
    for preset in presets:
        work: Work = partial(preset_steps.measure_overlap, preset=preset, overrides=["compile=off"])
        yield Check("overlap", preset, work)
