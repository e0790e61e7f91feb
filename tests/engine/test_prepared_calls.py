"""Prepared calls are found by their arrays and options alone, and issued with the lock held."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl.channels._prepared_calls import MOST_KEPT, PreparedCalls
from proxyccl.device._native import lib
from proxyccl.proxy._engine import ffi

pytestmark = pytest.mark.host_only(reason="numpy arrays, and its own driver")

STREAM, CALLERS, CALL, LAUNCH = 0x10, 0x20, 0x30, 0x40
GUARD = 0x50
OPTIONS = ("all_reduce", "sum", None)
TENSOR_TYPES: set[type] = set()


class Identified:
    """An array without a buffer."""

    def __init__(self, identity: object) -> None:
        self.identity = identity


class RefusedError(Exception):
    pass


class Engine:
    """Issues calls: it notes them and returns a status.

    Attributes:
        calls: the prepared calls.
        issued: the arguments of each call, as addresses.
        status: the result of the next calls.
        meanwhile: called during a call.
        refused: the arguments of `refuse`.
        turned: the streams that calls were turned to.
        can_turn: whether calls may be on another stream than the last.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.issued: list[tuple[int, ...]] = []
        self.status = 0
        self.meanwhile: Callable[[], object] = lambda: None
        self.refused: list[tuple[int, Any]] = []
        self.turned: list[int] = []
        self.can_turn = True
        self._function = ffi.callback("int(void *, void *, void *, uintptr_t)", self._issue)
        self.calls = PreparedCalls(Identified, "identity", self.lock, self._refuse, self._turn, TENSOR_TYPES)
        self.calls.set_stream(STREAM)

    def _issue(self, *arguments: Any) -> int:
        self.issued.append(tuple(int(ffi.cast("uintptr_t", each)) for each in arguments))
        self.meanwhile()
        return self.status

    def _turn(self, stream: int) -> None:
        self.turned.append(stream)
        self.calls.set_stream(stream if self.can_turn else None)

    def _refuse(self, status: int, kept: Any) -> None:
        self.refused.append((status, kept))
        raise RefusedError(status)

    def keep(
        self, x: Any, out: Any, options: tuple[Any, ...] = OPTIONS, kept: object = None, *, holds: Any = None
    ) -> None:
        """`holds` is a C function that is given GUARD."""
        function, guard = (int(ffi.cast("uintptr_t", each)) for each in (self._function, holds or ffi.NULL))
        self.calls.keep(x, out, options, function, CALLERS, CALL, LAUNCH, kept, guard, GUARD)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_kept_call_is_issued_with_what_it_was_kept_with(engine: Engine) -> None:
    x, out = np.ones(4), np.ones(4)
    engine.keep(x, out)
    assert engine.calls.repeat(x, out, OPTIONS)
    assert engine.issued == [(CALLERS, CALL, LAUNCH, STREAM)]


def read_only(x: Any) -> Any:
    view = x[:]
    view.flags.writeable = False
    return view


class Derived(np.ndarray):
    pass


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x: x.copy(), id="address"),
        pytest.param(lambda x: x[:2], id="size"),
        pytest.param(lambda x: x.reshape(2, 4), id="shape"),
        pytest.param(lambda x: x.reshape(4, 2, 1), id="dimensions"),
        pytest.param(lambda x: x.view(np.int64), id="type"),
        pytest.param(lambda x: x.view(">f8"), id="order of bytes"),
        pytest.param(read_only, id="read-only"),
        pytest.param(lambda x: x.T, id="not contiguous"),
        pytest.param(lambda x: x.reshape(1, 1, 1, 1, 1, 1, 8), id="too many dimensions"),
        pytest.param(lambda x: x.view([("first", "f8")]), id="fields"),
        pytest.param(lambda x: x.view("M8[s]"), id="no buffer of its type"),
        pytest.param(lambda x: x.view(Derived), id="type of array"),
        pytest.param(lambda _: None, id="none"),
    ],
)
@pytest.mark.parametrize("place", ["x", "out"])
def test_a_call_with_another_array_is_not_found(engine: Engine, other: Callable[[Any], Any], place: str) -> None:
    given = {"x": np.ones((4, 2)), "out": np.ones((4, 2))}
    engine.keep(**given)
    changed = {**given, place: other(given[place])}
    assert not engine.calls.repeat(changed["x"], changed["out"], OPTIONS)
    assert engine.calls.repeat(given["x"], given["out"], OPTIONS)


def test_arrays_that_changed_in_place_are_not_found(engine: Engine) -> None:
    x = np.ones((4, 2))
    engine.keep(x, x)
    x.shape = (2, 4)
    assert not engine.calls.repeat(x, x, OPTIONS)


@pytest.mark.parametrize("options", [("all_reduce", "sum"), (*OPTIONS, None), ("all_reduce", "max", None), ([], 1, 2)])
def test_a_call_with_other_options_is_not_found(engine: Engine, options: tuple[Any, ...]) -> None:
    x = np.ones(4)
    engine.keep(x, x)
    assert not engine.calls.repeat(x, x, options)


def test_options_are_known_by_identity(engine: Engine) -> None:
    x = np.ones(4)
    engine.keep(x, x, ("broadcast", False))
    assert not engine.calls.repeat(x, x, ("broadcast", 0))


def test_arrays_without_buffers_are_known_by_their_identity(engine: Engine) -> None:
    token = object()
    engine.keep(Identified(token), Identified(token))
    assert engine.calls.repeat(Identified(token), Identified(token), OPTIONS)
    assert not engine.calls.repeat(Identified(object()), Identified(token), OPTIONS)


def test_an_array_that_has_lost_its_identity_is_not_found(engine: Engine) -> None:
    engine.keep(Identified(None), Identified(None))
    assert not engine.calls.repeat(Identified(None), Identified(None), OPTIONS)


def test_a_status_that_is_not_success_is_refused(engine: Engine) -> None:
    x, kept = np.ones(4), object()
    engine.keep(x, x, kept=kept)
    engine.status = 5
    with pytest.raises(RefusedError):
        engine.calls.repeat(x, x, OPTIONS)
    assert engine.refused == [(5, kept)]
    free = threading.Thread(target=lambda: engine.issued.append((engine.lock.acquire(blocking=False),)))
    free.start()
    free.join()
    assert engine.issued[-1] == (True,)


def test_without_a_stream_nothing_is_issued(engine: Engine) -> None:
    x = np.ones(4)
    engine.keep(x, x)
    engine.calls.set_stream(None)
    assert not engine.calls.repeat(x, x, OPTIONS)
    engine.calls.set_stream(STREAM + 1)
    assert engine.calls.repeat(x, x, OPTIONS)
    assert engine.issued == [(CALLERS, CALL, LAUNCH, STREAM + 1)]


def test_a_call_on_another_stream_is_turned_to_it_once(engine: Engine) -> None:
    x = np.ones(4)
    engine.keep(x, x)
    for stream in (STREAM, STREAM + 1, STREAM + 1, 0):
        assert engine.calls.repeat(x, x, OPTIONS, stream)
    assert engine.turned == [STREAM + 1, 0]
    assert [call[3] for call in engine.issued] == [STREAM, STREAM + 1, STREAM + 1, 0]


def test_a_call_that_can_not_be_on_a_stream_is_not_issued(engine: Engine) -> None:
    x = np.ones(4)
    engine.keep(x, x)
    engine.can_turn = False
    assert not engine.calls.repeat(x, x, OPTIONS, STREAM + 1)
    assert not engine.calls.repeat(x.copy(), x, OPTIONS, STREAM + 2)  # it is not kept, and turns nothing
    assert engine.turned == [STREAM + 1]
    assert not engine.issued


def test_a_call_in_another_context_is_left_to_the_caller(engine: Engine) -> None:
    x = np.ones(4)
    engine.keep(x, x)
    engine.status = lib.PROXYCCL_OTHER_CONTEXT
    assert not engine.calls.repeat(x, x, OPTIONS)
    assert not engine.refused


def test_a_call_is_issued_only_while_its_guard_holds(engine: Engine) -> None:
    x, answers, asked = np.ones(4), [1, 0, 1], []

    @ffi.callback("int(void *)")
    def holds(guard: Any) -> int:
        asked.append(int(ffi.cast("uintptr_t", guard)))
        return answers[len(asked) - 1]

    engine.keep(x, x, holds=holds)
    assert [engine.calls.repeat(x, x, OPTIONS) for _ in answers] == [True, False, True]
    assert asked == [GUARD] * 3
    assert len(engine.issued) == 2


class Tensor:
    """As a tensor of torch's on a GPU answers."""

    def __init__(self, **changes: Any) -> None:
        self.is_cuda, self.dtype, self.shape = True, "float32", (4, 2)
        self.answers = {"is_contiguous": True, "is_neg": False, "is_conj": False, "data_ptr": 0x1000, **changes}
        for name in ("is_cuda", "dtype", "shape"):
            setattr(self, name, changes.get(name, getattr(self, name)))

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self.answers[name]


@pytest.fixture
def tensors() -> Iterator[None]:
    TENSOR_TYPES.add(Tensor)
    yield
    TENSOR_TYPES.clear()


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize(
    "changes",
    [
        {"is_cuda": False},
        {"dtype": "int32"},
        {"shape": (8,)},
        {"shape": (2, 4)},
        {"shape": (1,) * 7},
        {"shape": ("symbol", 2)},
        {"is_contiguous": False},
        {"is_neg": True},
        {"is_conj": True},
        {"data_ptr": 0x1010},
        {"data_ptr": 0},
        {"data_ptr": "no address"},
    ],
    ids=str,
)
def test_a_tensor_is_known_by_its_memory_shape_and_type(engine: Engine, changes: dict[str, Any]) -> None:
    engine.keep(Tensor(), Tensor())
    other = Tensor(**changes)
    assert engine.calls.repeat(Tensor(), Tensor(), OPTIONS)
    assert not engine.calls.repeat(other, Tensor(), OPTIONS)
    assert not engine.calls.repeat(Tensor(), other, OPTIONS)


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize(
    ("x", "out"),
    [
        ((0, 1), (2,)),
        ((1, 0), (2, 3)),
        ((0, 1, 2), (3,)),
        ((0, 1), (2, 4)),
        (0, (2, 3)),
        ((), (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_a_call_with_tuples_of_tensors_is_known_by_each_and_by_its_place(engine: Engine, x: Any, out: Any) -> None:
    def made(numbers: Any) -> Any:
        if isinstance(numbers, int):
            return Tensor(data_ptr=0x1000 + 0x100 * numbers)
        return tuple(Tensor(data_ptr=0x1000 + 0x100 * number) for number in numbers)

    engine.keep(made((0, 1)), made((2, 3)))
    assert not engine.calls.repeat(made(x), made(out), OPTIONS)
    assert engine.calls.repeat(made((0, 1)), made((2, 3)), OPTIONS)
    engine.keep(made(x), made(out))
    assert engine.calls.repeat(made(x), made(out), OPTIONS)


def test_arrays_with_buffers_are_not_known_in_tuples(engine: Engine) -> None:
    engine.keep((np.ones(4),), (np.ones(4),))
    assert not engine.calls.repeat((np.ones(4),), (np.ones(4),), OPTIONS)


def test_calls_that_order_streams_themselves_are_given_any_stream() -> None:
    engine = Engine()
    engine.calls = PreparedCalls(Identified, "identity", engine.lock, engine._refuse, None, TENSOR_TYPES)
    x = np.ones(4)
    engine.keep(x, x)
    assert not engine.calls.repeat(x, x, OPTIONS, 0x70)
    engine.calls.set_stream(0)
    for stream in (0x70, 0x80):
        assert engine.calls.repeat(x, x, OPTIONS, stream)
    assert [issued[-1] for issued in engine.issued] == [0x70, 0x80]
    engine.calls.set_stream(None)
    assert not engine.calls.repeat(x, x, OPTIONS, 0x70)


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]


class Interrupted(type):
    def __hash__(cls) -> int:
        raise KeyboardInterrupt


def test_an_array_whose_type_has_no_hash_is_not_known(engine: Engine) -> None:
    x = Unhashable("Array", (), {})()
    engine.keep(x, x)
    assert engine.calls.repeat(x, x, OPTIONS) is False
    assert engine.calls.repeat((x, x), (x,), OPTIONS) is False


def test_an_exception_of_the_program_s_own_is_passed_on(engine: Engine) -> None:
    x = Interrupted("Array", (), {})()
    for array in (x, (x,)):
        with pytest.raises(KeyboardInterrupt):
            engine.keep(array, array)
        with pytest.raises(KeyboardInterrupt):
            engine.calls.repeat(array, array, OPTIONS)
    assert not engine.issued


def test_a_tensor_of_an_unknown_type_is_not_asked(engine: Engine) -> None:
    engine.keep(Tensor(), Tensor())
    TENSOR_TYPES.add(Tensor)
    assert not engine.calls.repeat(Tensor(), Tensor(), OPTIONS)
    TENSOR_TYPES.clear()


def test_calls_may_be_forgotten_while_one_of_them_is_issued(engine: Engine) -> None:
    x, kept = np.ones(4), Identified(None)
    alive = weakref.ref(kept)
    engine.keep(x, x, kept=kept)
    del kept
    engine.meanwhile = engine.calls.clear
    assert engine.calls.repeat(x, x, OPTIONS)
    assert not engine.calls.repeat(x, x, OPTIONS)
    assert alive() is None


def test_threads_issue_one_call_after_the_other(engine: Engine) -> None:
    x, running, together = np.ones(4), [], []

    def meanwhile() -> None:
        running.append(None)
        together.append(len(running))
        threading.Event().wait(0.001)
        running.pop()

    engine.keep(x, x)
    engine.meanwhile = meanwhile
    threads = [threading.Thread(target=engine.calls.repeat, args=(x, x, OPTIONS)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 8


def test_arrays_are_not_kept_and_calls_go_with_their_object() -> None:
    x, kept, engine = np.ones(4), Identified(None), Engine()
    array, call, owner = weakref.ref(x), weakref.ref(kept), weakref.ref(engine)
    engine.keep(x, x, kept=kept)
    del x, kept
    assert array() is None
    assert call() is not None
    del engine
    gc.collect()  # the engine refers to the calls, and they to its method
    assert (call(), owner()) == (None, None)


def test_of_more_calls_than_are_kept_the_one_that_was_not_used_for_longest_goes(engine: Engine) -> None:
    arrays = [np.full(4, i) for i in range(MOST_KEPT)]
    for x in arrays:
        engine.keep(x, x)
    assert all(engine.calls.repeat(x, x, OPTIONS) for x in [*arrays, arrays[0]])
    more = np.ones(4)
    engine.keep(more, more)
    assert [engine.calls.repeat(x, x, OPTIONS) for x in (*arrays[:3], more)] == [True, False, True, True]


def test_a_call_that_is_kept_again_replaces_the_first(engine: Engine) -> None:
    x, kept = np.ones(4), [Identified(None), Identified(None)]
    first = weakref.ref(kept[0])
    for each in kept:
        engine.keep(x, x, kept=each)
    kept[0] = kept[1]
    assert first() is None
    engine.status = 7
    with pytest.raises(RefusedError):
        engine.calls.repeat(x, x, OPTIONS)
    assert engine.refused == [(7, kept[1])]


@pytest.mark.parametrize("options", [(), tuple(range(7))])
def test_a_wrong_number_of_options_is_refused(engine: Engine, options: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 6 options, not {len(options)}"):
        engine.keep(np.ones(4), np.ones(4), options)


@pytest.mark.parametrize("arguments", [(), (1, 2), (1, 2, []), (1, 2, ())])
def test_wrong_arguments_are_refused(engine: Engine, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="takes a tuple of options"):
        engine.calls.repeat(*arguments)
