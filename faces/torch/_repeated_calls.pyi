"""The extension that repeated_calls.c makes."""

from collections.abc import Callable, Iterator
from typing import Any

class RepeatedCalls:
    """Issues one group's calls on one GPU that were made before.

    Args:
        repeat: `PreparedCalls.repeat`.
        process: of the group (`forks.Process`): a fork's child repeats nothing.
        current: called as current(device) for the handle of torch's current stream.
        device: the GPU's number.
        own: the handle of the group's own stream.
        order: address of the ProxycclStreamOrder of the GPU's streams.
        idle: events that nothing uses.
        more: makes one more of them.
        numbers: numbers the calls.
        log: called as log((number, name, None)) for a call on the current stream that no graph captures.
        queued: called as queued(number, name, x, out, event, captured) for a call on the group's own stream, whose end
            the event marks (0 if it could not be marked). It returns the call's Work.

    Attributes:
        count: how many calls were repeated.
        number: of the latest of them.
    """

    count: int
    number: int

    def __new__(
        cls,
        repeat: Callable[..., bool],
        process: object,
        current: Callable[[int], int],
        device: int,
        own: int,
        order: int,
        idle: list[int],
        more: Callable[[], int],
        numbers: Iterator[int],
        log: Callable[[tuple[int, str, None]], object],
        queued: Callable[[int, str, Any, Any, int, bool], Any],
    ) -> RepeatedCalls: ...
    def repeat(self, x: Any, out: Any, opts: Any, attribute: str | None, kept: Any, /) -> Any:
        """Issues a call, or one for each of a list's tensors: on the current stream if torch's options say that it is
        synchronous, else on the group's own, which first follows the current one.

        Args:
            x, out: input and output: tensors, or lists of as many.
            opts: torch's options, or None.
            attribute: of the options, that tells calls apart: an operator or a number; None if nothing does.
            kept: the tuple under which the call is kept, the call's name first; with `attribute` a dict of them, by the
                number of the operator's kind, or by the number.

        Returns:
            The Work, which is None for a synchronous call. If only the first calls of a list could be repeated, their
            number and their Work. NotImplemented if none was.
        """
