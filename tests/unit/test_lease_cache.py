"""The cache makes each shared value once, keeps a limited number of unused values, and discards each value once."""

import threading
from collections.abc import Callable

import pytest

from proxyccl import ClosedError
from proxyccl.device.memory.lease_cache import LeaseCache
from support.running import TIMEOUT


class Made:
    def __init__(self) -> None:
        self.made: list[str] = []
        self.discarded: list[str] = []

    def make(self, value: str) -> Callable[[], str]:
        def make() -> str:
            self.made.append(value)
            return value

        return make

    def cache(self, **limits: int) -> LeaseCache[str, str]:
        return LeaseCache(self.discarded.append, weigh=len, **limits)


def use(cache: LeaseCache[str, str], made: Made, *values: str) -> None:
    for value in values:
        cache.acquire(value, made.make(value))
        cache.release(value)


def test_users_share_a_value_that_is_discarded_after_the_last() -> None:
    made = Made()
    cache = made.cache()
    assert cache.acquire("a", made.make("a")) is cache.acquire("a", made.make("other"))
    cache.release("a")
    assert not made.discarded
    cache.release("a")
    assert (made.made, made.discarded) == (["a"], ["a"])


def test_least_recently_used_go_beyond_the_number_kept() -> None:
    made = Made()
    cache = made.cache(keep=2)
    use(cache, made, "a", "b", "a", "c")
    assert (made.made, made.discarded) == (["a", "b", "c"], ["b"])


def test_least_recently_used_go_beyond_the_weight_kept() -> None:
    made = Made()
    cache = made.cache(keep=10, keep_weight=6)
    use(cache, made, "aaa", "bb", "c", "dd")
    assert made.discarded == ["aaa"]
    use(cache, made, "seven..")
    assert made.discarded == ["aaa", "seven.."]


def test_a_value_need_not_be_kept() -> None:
    made = Made()
    cache = made.cache(keep=10)
    cache.acquire("a", made.make("a"))
    cache.release("a", keep=False)
    assert made.discarded == ["a"]


def test_idle_values_are_discarded_and_used_ones_stay() -> None:
    made = Made()
    cache = made.cache(keep=10)
    cache.acquire("used", made.make("used"))
    assert not cache.discard_idle()
    use(cache, made, "a", "b")
    assert cache.discard_idle()
    assert sorted(made.discarded) == ["a", "b"]


def test_what_make_raises_leaves_nothing_to_release() -> None:
    made = Made()
    cache = made.cache(keep=10)

    def fail() -> str:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        cache.acquire("a", fail)
    with pytest.raises(KeyError):
        cache.release("a")
    use(cache, made, "a")
    assert made.made == ["a"]


def test_a_value_is_released_only_as_often_as_it_was_acquired() -> None:
    made = Made()
    cache = made.cache(keep=10)
    use(cache, made, "a")
    with pytest.raises(KeyError):
        cache.release("a")


def test_threads_make_a_value_once_and_hold_up_no_other() -> None:
    made = Made()
    cache = made.cache(keep=10)
    begun, go_on = threading.Event(), threading.Event()

    def make_slowly() -> str:
        begun.set()
        assert go_on.wait(TIMEOUT)
        return made.make("slow")()

    threads = [threading.Thread(target=cache.acquire, args=("slow", make_slowly)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(TIMEOUT)
    use(cache, made, "other")
    go_on.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert made.made == ["other", "slow"]
    for _ in threads:
        cache.release("slow")
    assert not made.discarded


def test_a_value_that_is_being_discarded_is_made_anew_afterwards() -> None:
    events: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def discard(value: str) -> None:
        begun.set()
        assert go_on.wait(TIMEOUT)
        events.append(f"discard {value}")

    def make() -> str:
        events.append("make")
        return "a"

    cache: LeaseCache[str, str] = LeaseCache(discard)
    cache.acquire("a", make)
    ending = threading.Thread(target=cache.release, args=("a",))
    ending.start()
    assert begun.wait(TIMEOUT)
    again = threading.Thread(target=cache.acquire, args=("a", make))
    again.start()
    go_on.set()
    ending.join(TIMEOUT)
    again.join(TIMEOUT)
    assert events == ["make", "discard a", "make"]


class Failing:
    """A cache whose discarding of "b" fails, and a list of the values that the cache has discarded."""

    def __init__(self) -> None:
        self.discarded: list[str] = []
        self.cache: LeaseCache[str, str] = LeaseCache(self._discard, keep=10)

    def _discard(self, value: str) -> None:
        self.discarded.append(value)
        if value == "b":
            raise OSError("busy")


def test_idle_values_are_discarded_even_if_one_fails() -> None:
    failing, made = Failing(), Made()
    use(failing.cache, made, "a", "b", "c")
    with pytest.raises(OSError, match="busy"):
        failing.cache.discard_idle()
    assert sorted(failing.discarded) == ["a", "b", "c"]
    use(failing.cache, made, "b")
    assert made.made == ["a", "b", "c", "b"]


def test_closing_discards_everything_even_if_one_fails() -> None:
    failing = Failing()
    cache, discarded = failing.cache, failing.discarded
    for value in "abc":
        cache.acquire(value, lambda value=value: value)
    cache.release("c")
    with pytest.raises(OSError, match="busy"):
        cache.close()
    assert sorted(discarded) == ["a", "b", "c"]
    cache.release("a")  # releasing after close() does nothing
    with pytest.raises(ClosedError):
        cache.acquire("a", lambda: "a")
