"""Learning rates at the steps that matter, and durations as people write them."""

import pytest

from trainyard.config.duration import Duration
from trainyard.config.settings import ScheduleSettings, TrainConfig, check
from trainyard.errors import UserError
from trainyard.train.schedule import compute_lr_factor


def compute_factors(*steps: int, **settings: object) -> list[float]:
    schedule = ScheduleSettings(**settings)  # type: ignore[arg-type]
    return [compute_lr_factor(step, schedule, total_steps=100, steps_per_epoch=10) for step in steps]


def test_warm_up_rises_in_equal_steps_to_the_peak():
    assert compute_factors(0, 4, 9, 10, warmup="1ep", name="constant") == pytest.approx([0.1, 0.5, 1.0, 1.0])


def test_cosine_falls_from_the_peak_to_the_final_ratio():
    assert compute_factors(0, 50, 100, final_ratio=0.1) == pytest.approx([1.0, 0.55, 0.1])
    assert compute_factors(20, 60, 100, warmup="20st") == pytest.approx([1.0, 0.5, 0.0])


def test_step_drops_at_each_milestone():
    drops = {"name": "step", "milestones": ["6ep", "30st"], "drop": 0.5}
    assert compute_factors(29, 30, 59, 60, **drops) == [1.0, 0.5, 0.5, 0.25]


def test_one_cycle_starts_low_peaks_after_its_rise_and_ends_low():
    assert compute_factors(0, 30, 100, name="one_cycle") == pytest.approx([0.04, 1.0, 0.0])
    assert compute_factors(10, name="one_cycle", warmup="10st") == pytest.approx([1.0])


@pytest.mark.parametrize("name", ["cosine", "one_cycle"])
def test_a_run_limited_by_time_has_no_schedule_that_knows_its_end(name):
    with pytest.raises(UserError, match=rf"schedule.name={name} needs the number of steps.*constant"):
        check(TrainConfig(max_duration="5min", schedule=ScheduleSettings(name=name)))
    check(TrainConfig(max_duration="5min", schedule=ScheduleSettings(name="constant")))


def test_the_parts_of_a_schedule_are_no_times():
    with pytest.raises(UserError, match=r"schedule.warmup: '5min' is a time, but a number of steps is needed"):
        check(TrainConfig(schedule=ScheduleSettings(warmup="5min")))
    with pytest.raises(UserError, match=r"schedule.milestones: '1h' is a time"):
        check(TrainConfig(schedule=ScheduleSettings(name="step", milestones=["3ep", "1h"])))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, "ep"),
        ("0.5ep", 0.5, "ep"),
        ("2000st", 2000, "st"),
        ("30min", 30, "min"),
        ("8h30m", 510, "min"),
        ("8h", 480, "min"),
    ],
)
def test_durations_are_read_as_people_write_them(text, value, unit):
    assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize("text", ["", "10", "ep", "10 ep", "1.5st", "-1ep", "10epochs", "h"])
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(UserError, match="10ep, steps 2000st, minutes 30min, or 8h30m"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: expected 1 or more"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan: expected 0 or more"),
        ({"precision": "fp8"}, "precision=fp8: expected one of auto, fp32, fp16, bf16"),
        ({"max_duration": "ten"}, "max_duration: 'ten' is not a duration"),
    ],
)
def test_values_out_of_range_are_named_with_their_range(changes, message):
    with pytest.raises(UserError) as error:
        check(TrainConfig(**changes))
    assert message in str(error.value)
