"""What may take long between two steps is no hang: on a clock that the tests turn."""

from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from drover.model.config import ModelConfig
from drover.model.generate import generate
from drover.model.llama import Llama
from drover.pipeline.config.guarding import FIRST
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.training.monitor import Samples
from drover.pipeline.training.watchdog import STEP_S, Watchdog

LIMIT = 600.0


class Watched:
    """A watchdog that is asked every second of a made-up time."""

    def __init__(self, tmp_path):
        self.dog, self.hung = Watchdog(tmp_path / "hangs", 0, LIMIT), False

    def passes(self, seconds):
        """Time goes by; the process is over where the watchdog found it hanging."""
        for _ in range(int(seconds)):
            self.hung = self.hung or self.dog.hangs_for(1.0) is not None
        if self.hung:
            raise HungError


class HungError(BaseException):
    """The end of a process."""


@pytest.fixture
def watched(tmp_path):
    """After some steps of a second."""
    found = Watched(tmp_path)
    for step in range(1, 4):
        found.dog.finished(step, 1.0)
        found.passes(1)
    return found


def test_the_limit_is_what_it_says(watched):
    watched.passes(LIMIT - 1)
    watched.dog.pulse()
    watched.passes(LIMIT)
    with pytest.raises(HungError):
        watched.passes(3)


def test_what_is_done_for_the_first_time_may_compile(watched, tmp_path):
    watched.dog.pulse(first=True)
    watched.passes(FIRST * LIMIT - 1)
    watched.dog.pulse()
    with pytest.raises(HungError):
        watched.passes(LIMIT + 2)
    start = Watched(tmp_path)
    start.dog.pulse()
    start.passes(FIRST * LIMIT - 1)


def test_within_a_step_where_nobody_waits_for_data_the_limit_is_shorter(watched):
    watched.dog.step_begins()
    watched.passes(STEP_S - 1)
    watched.dog.finished(4, 1.0)
    watched.passes(LIMIT - 1)
    watched.dog.step_begins()
    with pytest.raises(HungError):
        watched.passes(STEP_S + 2)


def test_ten_slow_steps_are_no_hang_within_a_step(tmp_path):
    slow = Watched(tmp_path)
    for step in range(1, 4):
        slow.dog.finished(step, 30.0)
    slow.dog.step_begins()
    slow.passes(299)


@pytest.mark.parametrize("use_cache", [True, False])
def test_drawing_a_text_is_watched_token_by_token(watched, use_cache):
    """A model of which each token takes most of the limit."""
    model = Llama(ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=16, vocab_size=32, context_length=16))
    model.register_forward_pre_hook(lambda *_: watched.passes(0.9 * LIMIT))

    def draw(**pulse):
        return generate(model, [[1, 2], [3]], 4, temperature=0.8, top_p=0.9, seed=0, stop_ids=(), use_cache=use_cache,
                        **pulse)
    watched.dog.pulse()
    texts = draw(pulse=watched.dog.pulse)
    assert [len(text) for text in texts] == [4, 4]
    with pytest.raises(HungError):
        draw()


def test_texts_that_could_not_be_drawn_for_want_of_numbers_are_no_end(monkeypatch):
    error = FloatingPointError("the model's scores are NaN")
    monkeypatch.setattr("drover.pipeline.training.monitor.generate", Mock(side_effect=error))
    samples, loop = Samples.__new__(Samples), MagicMock(config=SimpleNamespace(train=TrainConfig(sample_every=10)))
    samples.prompts, loop.progress.step = [("a", [1])], 10
    assert samples.look(loop) == {}
    loop.say.assert_called_once_with("no sample texts after step 10: the model's scores are NaN")
    loop.engine.free_unsharded.assert_called_once()


def test_a_quick_rank_is_not_taken_to_hang_while_it_waits_for_a_slow_one(watched):
    """Loading, comparing, copying: all ranks are through before any is watched again."""
    with watched.dog.paused(lambda: watched.passes(4 * LIMIT)):
        watched.passes(4 * LIMIT)
    with pytest.raises(HungError):
        watched.passes(2 * LIMIT)
