"""Laws of mixtures: trainings that were made by a law give it back, with intervals that hold it."""

import numpy as np
import pytest

from drover.pipeline.evaluation.mixtures import fit_mixtures, least_mixtures

CONSTANTS = np.array([1.4, 0.9, 1.2])
SLOPES = np.array([[-1.5, 0.1, -0.3], [0.2, -1.2, 0.3], [-0.4, -0.2, -0.9]])
WEIGHTS = [2.0, 1.0, 1.0]


def losses(shares):
    return CONSTANTS + np.exp(shares @ SLOPES.T)


def weighted(shares):
    return losses(shares) @ np.array(WEIGHTS) / sum(WEIGHTS)


def trained(noise, draw):
    """The law of 14 trainings on random mixtures."""
    random = np.random.default_rng(draw)
    shares = random.dirichlet(np.ones(3), 14)
    return fit_mixtures(shares, losses(shares) * np.exp(random.normal(0, noise, shares.shape)), WEIGHTS)


@pytest.fixture(scope="module")
def lowest():
    """The best mixture and its loss, by trying all of a fine grid."""
    first, second = np.meshgrid(np.linspace(0, 1, 401), np.linspace(0, 1, 401))
    grid = np.stack([first, second, 1 - first - second], axis=-1)[first + second <= 1]
    values = weighted(grid)
    return grid[values.argmin()], values.min()


def test_the_best_mixture_and_its_loss_come_back_without_noise(lowest):
    law = trained(0, 0)
    best = np.array([one.value for one in law.best()])
    np.testing.assert_allclose(best, lowest[0], atol=0.02)
    assert law.predict(best).value == pytest.approx(lowest[1], rel=1e-3)


def test_with_noise_the_intervals_hold_the_best_shares_and_the_best_mixture_is_nearly_as_good(lowest):
    inside = []
    for draw in range(8):
        best = trained(0.003, draw).best()
        inside += [one.low - 0.005 <= share <= one.high + 0.005 for one, share in zip(best, lowest[0], strict=True)]
        assert weighted(np.array([one.value for one in best])) < lowest[1] * 1.002
    assert sum(inside) >= 21 and least_mixtures(3) == 6, "of 24"
