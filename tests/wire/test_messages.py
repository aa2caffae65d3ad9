"""The wire format: everything survives a round trip, strangers and later versions do no harm."""

from __future__ import annotations

import typing

import msgspec
import pytest

from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.assets import AssetBundle, decode_bundle, encode_bundle
from kvferry_engine.wire.packing import pack_ids, unpack_ids


def submit() -> wire.Submit:
    return wire.Submit(
        rid="r1",
        attempt=2,
        engine_boot="b",
        prompt_ids=pack_ids([1, 2, 3]),
        sequences=[wire.SubmitSequence(index=0, seed=-5, emitted_ids=pack_ids([9]))],
        sampling=wire.Sampling(max_tokens=5, logit_bias={3: -1.5}, bad_words=[[1, 2]]),
        prefill_hints=[wire.PrefillHint(address="h:1", boot="p", cached_tokens=32)],
    )


def test_a_request_survives_the_wire() -> None:
    envelope = wire.Envelope("a", "b", 7, submit())

    assert wire.decode(wire.encode(envelope)) == envelope


def test_every_message_has_a_tag_of_its_own() -> None:
    classes = typing.get_args(wire.Body)
    tags = {cls.__struct_config__.tag for cls in classes}

    assert len(tags) == len(classes)


def test_fields_of_a_later_version_are_ignored() -> None:
    raw = msgspec.msgpack.decode(wire.encode(wire.Envelope("a", "b", 7, submit())))
    raw[3]["invented_later"] = {"x": 1}

    assert wire.decode(msgspec.msgpack.encode(raw)).body == submit()


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"GET / HTTP/1.1\r\n", msgspec.msgpack.encode(["a", "b", 1, {"t": "no_such_message"}])]
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode(data)


def test_packed_columns_keep_ids_and_refuse_torn_ones() -> None:
    assert unpack_ids(pack_ids([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    with pytest.raises(ValueError, match="multiple of 4"):
        unpack_ids(b"abc")
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_an_asset_bundle_is_verified_by_its_digest() -> None:
    bundle = AssetBundle(tokenizer_json=b"{}", chat_templates={"default": "x"}, eos_token_id=2)
    digest, data = encode_bundle(bundle)

    assert decode_bundle(digest, data) == bundle
    with pytest.raises(ValueError, match="digest"):
        decode_bundle(digest, data + b" ")
