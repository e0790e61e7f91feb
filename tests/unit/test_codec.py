"""Decoding returns the encoded value; other bytes raise a ProtocolError that gives the reason."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from proxyccl.proxy.codec import Codec, Message, ProtocolError, Uint32, Uint64

LIMIT = 4096


class Inner(Message, frozen=True):
    rkey: Uint32
    handle: Annotated[bytes, Meta(max_length=8)] = b""

    def __post_init__(self) -> None:
        if self.rkey % 2:
            raise ValueError("rkey must be even")


class Offer(Message, frozen=True):
    rank: Annotated[int, Meta(ge=0, le=63)]
    address: Uint64
    name: str
    transport: Literal["copy", "verbs"] = "copy"
    ends: dict[str, Inner] = msgspec.field(default_factory=dict)
    pairs: list[tuple[int, float]] = msgspec.field(default_factory=list)
    peer: int | None = None


class Open(Message, frozen=True, tag="open", tag_field="do"):
    offer: Offer


class Close(Message, frozen=True, tag="close", tag_field="do"):
    seconds: float


OFFERS = Codec(Offer, LIMIT)
REQUESTS = Codec[Open | Close](Open | Close, LIMIT, name="request")

inners = st.builds(Inner, st.integers(0, 2**31 - 1).map(lambda n: 2 * n), st.binary(max_size=8))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
offers = st.builds(
    Offer,
    st.integers(0, 63),
    st.integers(0, 2**64 - 1),
    texts,
    st.sampled_from(["copy", "verbs"]),
    st.dictionaries(texts, inners, max_size=3),
    st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False)), max_size=3),
    st.none() | st.integers(-(2**63), 2**64 - 1),
)


def failure(data: bytes, codec: Codec[Offer] | Codec[Open | Close] = OFFERS) -> str:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(data, "rank 3")
    return str(caught.value)


@given(offers)
def test_what_is_encoded_comes_back(offer: Offer) -> None:
    assert OFFERS.decode(OFFERS.encode(offer), "rank 3") == offer
    request = Open(offer)
    assert REQUESTS.decode(REQUESTS.encode(request), "rank 3") == request


def decodes_or_names_the_sender(data: bytes) -> None:
    for codec, kind in ((OFFERS, Offer), (REQUESTS, Open | Close)):
        try:
            value = codec.decode(data, "rank 3")
        except ProtocolError as error:
            text = str(error)
        else:
            assert isinstance(value, kind)
            continue
        assert " from rank 3" in text
        assert len(text) < 500


@given(st.binary(max_size=LIMIT + 1))
def test_arbitrary_bytes_are_a_value_or_a_protocol_error(data: bytes) -> None:
    decodes_or_names_the_sender(data)


@given(offers, st.data())
def test_changed_bytes_are_a_value_or_a_protocol_error(offer: Offer, data: st.DataObject) -> None:
    whole = bytearray(REQUESTS.encode(Open(offer)) if data.draw(st.booleans()) else OFFERS.encode(offer))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(whole)))
        whole[start : start + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    decodes_or_names_the_sender(bytes(whole))


names = st.sampled_from(
    [
        "rank",
        "address",
        "name",
        "transport",
        "ends",
        "pairs",
        "peer",
        "rkey",
        "handle",
        "do",
        "offer",
        "seconds",
        "other",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
nested = st.lists(scalars, max_size=3) | st.dictionaries(names, scalars, max_size=4)


@given(st.dictionaries(names, scalars | nested | st.dictionaries(names, nested, max_size=4), max_size=8))
def test_arbitrary_fields_are_a_value_or_a_protocol_error(values: dict[str, object]) -> None:
    try:
        data = msgspec.json.encode(values)
    except OverflowError:
        return
    decodes_or_names_the_sender(data)


def test_nested_lists_end_in_a_protocol_error_at_any_depth() -> None:
    for depth in (*range(1, 1000, 7), 2000):
        nested = b'{"rank":%s%s}' % (b"[" * depth, b"]" * depth)
        assert re.match("invalid Offer from rank 3: (rank: expected int, got|expected JSON)", failure(nested))


OFFER = b'{"rank":1,"address":8,"name":"a"%s}'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", r"expected JSON, got b'\xff\xfe'"),
        (b"", "expected JSON, got b''"),
        (b'"' + b"a" * 200, "expected JSON, got b'\"" + "a" * 97 + "…"),
        (b'{"rank":1,"name":"\xff"}', "expected JSON, got "),
        (b"[" * 4000, "expected JSON, got b'[[["),
        (b"[]", "expected object, got []"),
        (b'{"rank":-1}', "rank: expected int >= 0, got -1"),
        (b'{"rank":64}', "rank: expected int <= 63, got 64"),
        (b'{"rank":1.0}', "rank: expected int, got 1.0"),
        (b'{"rank":true}', "rank: expected int, got True"),
        (b'{"rank":"x"}', "rank: expected int, got 'x'"),
        (b'{"rank":1,"address":8}', "field 'name' is missing"),
        (OFFER % b',"nmae":1', "unknown field 'nmae'; expected rank, address, name, transport, ends, pairs, peer"),
        (OFFER % b',"transport":"tcp"', "transport: unknown value 'tcp'; expected one of copy, verbs"),
        (OFFER % b',"pairs":[[1,2],[1,"x"]]', "pairs[1][1]: expected float, got 'x'"),
        (OFFER % b',"pairs":[[1]]', "pairs[0]: expected array of length 2, got [1]"),
        (OFFER % b',"ends":{"a":{"rkey":3}}', "ends[...]: rkey must be even, got {'a': {'rkey': 3}}"),
        (OFFER % b',"ends":{"a":{"rkey":2,"handle":"@"}}', "ends[...].handle: Invalid base64 encoded string"),
        (b'{"rank":1,"name":"a","address":18446744073709551616}', "address: expected an integer of at most 64 bits"),
        (OFFER % b',"pairs":[[-9223372036854775809,1]]', "pairs[0][0]: expected an integer of at most 64 bits"),
        (
            OFFER % b',"pairs":[[1,2],[\n -9223372036854775809,1]]',
            "pairs[1][0]: expected an integer of at most 64 bits",
        ),
        (OFFER % b',"peer" : \r18446744073709551616', "peer: expected an integer of at most 64 bits"),
    ],
)
def test_an_error_names_field_value_and_expectation(data: bytes, message: str) -> None:
    assert failure(data).startswith("invalid Offer from rank 3: " + message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"do":"opne"}', "do: unknown value 'opne'; expected one of open, close"),
        (b'{"offer":1}', "field 'do' is missing"),
        (b'{"do":"close","seconds":null}', "seconds: expected float, got None"),
        (b'{"do":"close","second":1}', "unknown field 'second'; expected seconds"),
        (b'{"do":"open","offer":{"rank":"x"}}', "offer.rank: expected int, got 'x'"),
        (b'{"do":"open","offer":{"x":1}}', "offer: unknown field 'x'; expected rank, address, name, "),
    ],
)
def test_an_error_about_one_of_a_union_names_its_tag_or_field(data: bytes, message: str) -> None:
    assert failure(data, REQUESTS).startswith("invalid request from rank 3: " + message)


def test_a_long_number_within_a_text_is_text() -> None:
    digits = "9" * 30
    offer = Offer(1, 8, f"[{digits}, -{digits}", ends={digits: Inner(2), f":{digits}": Inner(4)})
    for kind in (bytes, bytearray, memoryview, msgspec.Raw):
        assert OFFERS.decode(kind(OFFERS.encode(offer)), "rank 3") == offer


@pytest.mark.parametrize("data", [b"18446744073709551616", b" -9223372036854775809", b" [18446744073709551616]"])
def test_a_number_that_is_not_in_an_object_has_64_bits(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected an integer of at most 64 bits"):
        Codec[int | list[int]](int | list[int], LIMIT).decode(data, "rank 3")


def test_both_directions_are_bounded() -> None:
    long = Offer(1, 8, "n" * LIMIT)
    with pytest.raises(ProtocolError, match=rf"Offer of \d+ bytes; expected at most {LIMIT}"):
        OFFERS.encode(long)
    assert "expected at most 4096" in failure(msgspec.json.encode(long))


def test_text_that_is_no_unicode_travels_escaped() -> None:
    assert OFFERS.decode(OFFERS.encode(Offer(1, 8, "file-\udcff", ends={"\udc80": Inner(2)})), "rank 3") == Offer(
        1, 8, r"file-\udcff", ends={r"\udc80": Inner(2)}
    )


def test_a_type_that_would_ignore_unknown_fields_is_refused() -> None:
    @dataclasses.dataclass
    class Loose:
        rank: int

    class LooseStruct(msgspec.Struct):
        rank: int

    for kind in (Loose, LooseStruct, list[Loose], dict[str, tuple[LooseStruct, int]], Loose | None):
        with pytest.raises(TypeError, match=r"Loose\w* is not a Message"):
            Codec(kind, LIMIT).decode(b"{}", "rank 3")
