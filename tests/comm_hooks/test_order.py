"""Exchanges run one after another, and the next is begun while one waits for its last messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from distamp.comm_hooks.order import Staged, in_order, through


class _Log:
    """Staged jobs that write down what they do; the first waits to begin until it is let go."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.go = threading.Event()

    def job(self, name: str, *, failing: int | None = None) -> Callable[[], Staged[Tensor]]:
        def staged() -> Staged[Tensor]:
            self.go.wait(60)
            for stage in range(3):
                self.lines.append(f"{name}{stage}")
                if stage == failing:
                    raise RuntimeError(f"{name} failed")
                if stage < 2:
                    yield
            return torch.tensor(len(self.lines))

        return staged

    def plain(self, name: str) -> Callable[[], Tensor]:
        def job() -> Tensor:
            self.go.wait(60)
            self.lines.append(name)
            return torch.tensor(len(self.lines))

        return job


@pytest.fixture
def log() -> Iterator[_Log]:
    log = _Log()
    yield log
    log.go.set()


def test_the_first_message_of_the_next_follows_the_last_of_the_one_before(log):
    runner = in_order(torch.device("cpu"))
    results = [runner.submit(log.job(name)) for name in "abc"]
    log.go.set()
    assert [int(result.wait()) for result in results] == [4, 7, 9]
    assert log.lines == ["a0", "a1", "b0", "a2", "b1", "c0", "b2", "c1", "c2"]


def test_one_that_comes_alone_does_not_wait_for_another(log):
    runner = in_order(torch.device("cpu"))
    log.go.set()
    assert int(runner.submit(log.job("a")).wait()) == 3
    assert int(runner.submit(log.job("b")).wait()) == 6
    assert log.lines == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_what_is_over_is_told_before_the_next_is_begun(log):
    runner = in_order(torch.device("cpu"))
    results = [runner.submit(log.plain(name)) for name in "ab"]
    waiting = threading.Event()

    def second() -> Tensor:
        waiting.wait(60)
        return torch.zeros(())

    kept = runner.submit(second)
    log.go.set()
    assert [int(result.wait()) for result in results] == [1, 2]
    waiting.set()
    kept.wait()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_that_fails_leaves_the_others_whole(log, name, stage):
    runner = in_order(torch.device("cpu"))
    jobs = {each: log.job(each, failing=stage if each == name else None) for each in "abc"}
    results = {each: runner.submit(job) for each, job in jobs.items()}
    log.go.set()
    for each, result in results.items():
        if each == name:
            with pytest.raises(RuntimeError, match=f"{name} failed"):
                result.wait()
        else:
            result.wait()
            assert f"{each}2" in log.lines


def test_no_thread_stays(log):
    runner = in_order(torch.device("cpu"))
    log.go.set()
    for _ in range(3):
        runner.submit(log.job("a")).wait()
    for thread in threading.enumerate():
        if thread.name == "distamp-comm-hook":
            thread.join(60)
            assert not thread.is_alive()


def test_through_returns_what_comes_of_a_job(log):
    log.go.set()
    assert int(through(log.job("a")())) == 3
