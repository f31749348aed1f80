"""Augmentation on the device."""

import math
from functools import partial

import pytest
import torch

from tests.cases.antispoof import make_noise, make_row_noise

from . import augment


@pytest.mark.parametrize("kind", ["series", "parallel"])
def test_the_augmentation_of_an_utterance_depends_only_on_its_own_noise(kind: str) -> None:
    wave, u = make_noise(4, 8000), make_row_noise(4)
    both = augment.apply_rawboost(wave, u, chance=1, kind=kind, rate_hz=8000)
    single = augment.apply_rawboost(wave[2:3], u[2:3], chance=1, kind=kind, rate_hz=8000)
    torch.testing.assert_close(both[2:3], single, rtol=0, atol=1e-6)
    assert not torch.allclose(both[0], wave[0], atol=1e-3)
    assert float(both.abs().max()) <= 1
    other = augment.apply_rawboost(wave, make_row_noise(4, seed=1), chance=1, kind=kind, rate_hz=8000)
    assert not torch.allclose(both, other, atol=1e-3)


def test_a_rolled_utterance_starts_elsewhere_and_has_the_same_samples() -> None:
    wave, u = make_noise(5, 800), make_row_noise(5)
    rolled = augment.roll(wave, u)
    for i in range(5):
        start = int(float(u[i, augment.Slot.START]) * 800)
        assert torch.equal(rolled[i], torch.roll(wave[i], -start))
    u[:, augment.Slot.START] = 1 - 2**-24
    assert torch.equal(augment.roll(wave, u), torch.roll(wave, 1, dims=1))


def test_chance_is_the_share_of_utterances_changed_and_zero_changes_none() -> None:
    wave, u = make_noise(400, 800), make_row_noise(400)
    for change in (
        partial(augment.apply_reverb, wave, u, rate_hz=8000),
        partial(augment.apply_rawboost, wave, u, kind="series", rate_hz=8000),
        partial(augment.apply_codec, wave, u, rate_hz=8000),
    ):
        assert torch.equal(change(chance=0.0), wave)
        share = float((change(chance=0.3) != wave).any(dim=1).float().mean())
        assert share == pytest.approx(0.3, abs=0.07)  # three standard deviations of 400 draws


def test_a_room_adds_echoes_of_the_drawn_energy_that_decay_by_60_db_in_the_drawn_time() -> None:
    click, u = torch.zeros(200, 8000), make_row_noise(200)
    click[:, 0], u[:, augment.Slot.DECAY] = 0.5, 3 / 7  # T60 of 0.4 s
    played = augment.apply_reverb(click, u, chance=1, rate_hz=8000)
    torch.testing.assert_close(played.square().sum(dim=1), torch.full((200,), 0.25))
    echo = played[:, 1:] / played[:, :1]
    torch.testing.assert_close(echo.square().sum(dim=1).log10(), -2 * u[:, augment.Slot.DIRECT], rtol=0, atol=0.01)
    early, late = (float(echo[:, at : at + 400].square().mean()) for at in (0, 1600))
    assert 10 * math.log10(early / late) == pytest.approx(30, abs=0.5)  # half of T60 later


def test_the_echoes_of_an_utterance_do_not_reach_back_to_its_start() -> None:
    late, u = torch.zeros(3, 8000), make_row_noise(3)
    late[:, 4000] = 0.5
    played = augment.apply_reverb(late, u, chance=1, rate_hz=8000)
    assert float(played[:, :4000].abs().max()) < 1e-6 < 1e-3 < float(played[:, 4001:].abs().max())
    torch.testing.assert_close(augment.apply_reverb(late[1:2], u[1:2], chance=1, rate_hz=8000), played[1:2])


def test_stationary_noise_has_the_drawn_signal_to_noise_ratio() -> None:
    wave, u = make_noise(20, 8000), make_row_noise(20)
    added = augment._add_stationary_noise(wave, u, 8000) - wave
    ratio = 10 * torch.log10(wave.square().sum(dim=1) / added.square().sum(dim=1))
    torch.testing.assert_close(ratio, 10 + 30 * u[:, augment.Slot.SNR], rtol=0, atol=0.02)


def test_telephone_laws_change_a_waveform_by_at_most_their_steps() -> None:
    wave = torch.linspace(-1, 1, 2001)
    for law in (augment._apply_mu_law, augment._apply_a_law):
        error = (law(wave) - wave).abs()
        assert float(error.max()) < 0.03 and float(error[950:1051].max()) < 0.002  # finer for quiet samples


def test_a_codec_removes_frequencies_above_its_cutoff() -> None:
    tone = 0.5 * torch.sin(2 * math.pi * 7800 * torch.arange(16000) / 16000)[None]
    u = make_row_noise(1)
    u[:, augment.Slot.CODEC_CUT] = 0.0
    assert float(augment.apply_codec(tone, u, chance=1, rate_hz=16000).abs().max()) < 0.01


def test_masks_are_no_wider_than_requested_and_are_filled_with_the_mean() -> None:
    maps, u = torch.randn(300, 60, 404) + 5, make_row_noise(300)
    masked = augment.apply_specaugment(maps, u, chance=1, bins=20, frames=50)
    mask = masked != maps
    bins, frames = mask.all(dim=2).sum(dim=1), mask.all(dim=1).sum(dim=1)
    assert (int(bins.min()), int(bins.max())) == (0, 20)
    assert (int(frames.min()), int(frames.max())) == (0, 50)
    mean = maps.mean(dim=(1, 2), keepdim=True).expand_as(maps)
    assert torch.equal(masked[mask], mean[mask])
    assert torch.equal(augment.apply_specaugment(maps, u, chance=0, bins=20, frames=50), maps)


def test_hashed_numbers_are_uniform_and_uncorrelated() -> None:
    u = augment.draw_uniforms(make_row_noise(3), augment.Stream.COLOUR, 100_000)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert u.mean(dim=1).tolist() == pytest.approx([0.5] * 3, abs=0.004)
    assert float((torch.corrcoef(u) - torch.eye(3)).abs().max()) < 0.015
    assert not torch.equal(u, augment.draw_uniforms(make_row_noise(3), augment.Stream.FILTERS, 100_000))
