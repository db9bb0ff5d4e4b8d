"""A ladder's figures and page, from planted losses."""

import json
import math

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.reporting.ladder import Ladder, TrainedRung
from drover.pipeline.reporting.render import html, markdown
from tests.evaluation.test_scaling import LARGER, SIZES, TOKENS, planted

RATES = (0.001, 0.003, 0.009, 0.027)


def best(size):
    return 0.5 * size**-0.32


def loss(size, tokens, rate, best_of=best):
    return planted(size, tokens) + 0.02 * math.log(rate / best_of(size)) ** 2


def rungs(rates=RATES, best_of=best, diverged=()):
    return [TrainedRung(size, tokens, rate, {0: None if (size, rate) in diverged else loss(
        size, tokens, rate, best_of)}) for size in SIZES for tokens in TOKENS for rate in rates]


def test_the_lowest_loss_over_rates_counts_and_the_larger_training_is_predicted():
    ladder = Ladder(rungs(), LARGER)
    assert {rung.lr for rung in ladder.best if rung.parameters == SIZES[0]} == {min(
        RATES, key=lambda rate: loss(SIZES[0], TOKENS[0], rate))}
    assert [one.rate for one in ladder.rates] == pytest.approx([*map(best, SIZES)])
    assert ladder.target_rate == pytest.approx(best(LARGER[0]), rel=0.01)
    assert ladder.prediction.value == pytest.approx(planted(*LARGER), rel=0.01)
    assert ladder.error is None and "Measured" not in ladder.sentence and not [*ladder.notes()]
    made = Ladder(rungs(), LARGER, TrainedRung(*LARGER, 0.003, {0: ladder.prediction.value * 1.05}))
    assert made.error == pytest.approx(1 / 1.05 - 1)
    assert "The prediction is 4.76% too low; the measured value is outside the interval." in made.sentence


def test_seeds_are_averaged_and_all_must_have_finished():
    assert TrainedRung(1, 1, 0.1, {0: 2.0, 1: 3.0}).loss == 2.5
    assert TrainedRung(1, 1, 0.1, {0: 2.0, 1: None}).loss == math.inf


def test_a_diverged_training_is_left_out_and_named():
    ladder = Ladder(rungs(diverged={(SIZES[0], RATES[3])}), LARGER)
    assert next(ladder.notes()) == ("Left out, because training diverged: 120k on 250k tokens at 0.027, 120k on 500k "
                                    "tokens at 0.027, 120k on 1M tokens at 0.027 and 1 more.")
    assert ladder.rates[0].at_edge, "the rate above it is none to compare with"
    assert "edge of those tried, for 120k at 0.009" in list(ladder.notes())[1]
    assert json.loads(json.dumps(ladder.as_json(), allow_nan=False))["rungs"][3]["losses"] == {"0": None}
    failed = Ladder(ladder.rungs, LARGER, TrainedRung(*LARGER, 0.003, {0: None}))
    assert failed.error is None and failed.sentence.endswith("That training diverged at the learning rate 0.003.")
    assert "Measured" not in html(failed.page("x"))


def test_too_little_that_is_left_is_refused_with_what_diverged():
    ladder = Ladder(rungs(rates=(0.1,), diverged={(size, 0.1) for size in SIZES[2:]}), LARGER)
    with pytest.raises(UserError, match=r"2 different sizes.*Left out, because training diverged: 1.5M"):
        _ = ladder.law


@pytest.mark.parametrize(("rates", "expected", "rate"), [
    ((0.006,), "One learning rate was tried", 0.006), ((0.1, 0.2), "Fewer than two sizes", 0.1)])
def test_rates_that_do_not_hold_the_best_one_are_named(rates, expected, rate):
    ladder = Ladder(rungs(rates=rates), LARGER)
    assert any(expected in note for note in ladder.notes())
    assert ladder.rate_law is None and ladder.target_rate == rate


def test_far_predictions_are_called_far():
    assert "times the parameters of the largest size" in next(Ladder(rungs(), (10**9, 10**9)).notes())


def test_the_page_has_charts_and_tables_of_everything():
    ladder = Ladder(rungs(), LARGER, TrainedRung(*LARGER, 0.003, {0: 2.0}))
    document = ladder.page("Ladder")
    page = html(document)
    assert page.count("<svg") == 3 and page.count("<table") == 3
    assert [chapter.title for chapter in document.chapters] == ["Prediction", "Loss", "Learning rate"]
    for text in ("Measured", "2.0000", "1.5M parameters", "E + A / N^a"):
        assert text in page
    assert f"| {SIZES[1] / 1000:.0f}k | 1M |" in markdown(document)
    one_rate = html(Ladder(rungs(rates=(0.006,)), LARGER).page("Ladder"))
    assert one_rate.count("<svg") == 2 and "Best learning rate" not in one_rate
