"""The pipeline resolves every waiter: whatever an item or a callback does, jobs end, the next job runs, close returns."""

from __future__ import annotations

import threading
import time

import pytest

from zinf.pipeline import Job, Pipeline

STAGES = ["start", "work", "finish", "abandon"]


class Item:
    """Goes wrong in the stages it is told to."""

    def __init__(self, *bad: str):
        self.bad = bad

    def _do(self, stage: str) -> bool:
        if stage in self.bad:
            raise ValueError(stage)
        return True

    def start(self) -> bool:
        return self._do("start")

    def work(self) -> None:
        self._do("work")

    def finish(self, timeout: float | None) -> bool:
        return self._do("finish")

    def abandon(self) -> None:
        self._do("abandon")


@pytest.fixture
def pipeline():
    pipeline = Pipeline("zinf-test")
    yield pipeline
    closer = threading.Thread(target=pipeline.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive(), "close hangs"


def ended(job: Job) -> BaseException | None:
    assert job._ready.wait(10) and job._over.wait(10), f"{job.what} has waiters for ever"
    return job.error


@pytest.mark.parametrize("then", [(), ("abandon",)], ids=["", "then in abandon"])
@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_an_item_that_raises_ends_its_job_alone(pipeline, stage, then, position):
    items = [Item(*((stage, *then) if i == position else then)) for i in range(5)]
    error = ended(pipeline.submit(Job(items, "bad")))
    assert isinstance(error, ValueError) and str(error) == stage  # the first error is the one that is told
    assert pipeline.error is error
    assert ended(pipeline.submit(Job([Item(), Item()], "good"))) is None


@pytest.mark.parametrize("callback", ["on_ready", "on_over"])
@pytest.mark.parametrize("failed", [False, True])
def test_a_callback_that_raises(pipeline, callback, failed):
    def bad() -> None:
        raise ValueError("callback")

    error = ended(pipeline.submit(Job([Item("work") if failed else Item()], "bad", **{callback: bad})))
    assert str(error) == ("work" if failed else "callback")
    assert ended(pipeline.submit(Job([Item()], "good"))) is None


def test_items_that_cannot_be_made(pipeline):
    def items():
        yield Item()
        raise ValueError("items")

    assert str(ended(pipeline.submit(Job(items(), "bad")))) == "items"
    assert ended(pipeline.submit(Job([Item()], "good"))) is None


def test_drain_waits_for_what_still_moves(pipeline):
    """Not only until the last item was started."""
    over = []

    class Slow(Item):
        def work(self) -> None:
            time.sleep(0.02)

        def finish(self, timeout: float | None) -> bool:
            time.sleep(0.02)
            over.append(self)
            return True

    job = pipeline.submit(Job([Slow() for _ in range(4)], "slow"))
    pipeline.drain()
    assert len(over) == 4 and job.over
