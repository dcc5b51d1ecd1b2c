"""Records: round trips, exact sizes, and where the bytes are, told one by one from the PTX layouts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codecs import fragments
from kvfold.codecs.fragments import Coded, RecordFormat, pack, pack_tile, unpack, unpack_tile
from kvfold.codecs.packing import pack as pack_plain
from kvfold.codecs.packing import unpack as unpack_plain

WIDTHS = fragments.WIDTHS


def random_coded(layout, tokens, generator, leading=()):
    def codes(widths):
        most = torch.tensor(widths).repeat_interleave(16)
        return (torch.rand(*leading, tokens, len(most), generator=generator) * 2**most).to(torch.uint8)

    def numbers(*shape):
        if layout.logarithms:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return torch.rand(shape, generator=generator).half()

    return Coded(
        codes(layout.key_widths),
        codes((layout.value_width,) * len(layout.key_widths)),
        numbers(*leading, tokens, layout.key_norms) if layout.key_norms else None,
        numbers(*leading, tokens) if layout.magnitudes else None,
    )


formats = st.builds(
    RecordFormat,
    st.lists(st.sampled_from((0, *WIDTHS)), min_size=1, max_size=16).map(tuple),
    st.sampled_from(WIDTHS),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(formats, st.integers(0, 200), st.sampled_from([(), (2,), (2, 1, 3)]), st.integers(0, 2**31))
def test_round_trip(layout, tokens, leading, seed):
    coded = random_coded(layout, tokens, torch.Generator().manual_seed(seed), leading)
    records = pack(coded, layout)
    assert records.shape == (*leading, -(-tokens // 64), layout.nbytes) and layout.nbytes % 64 == 0
    found = unpack(records, layout, tokens)
    for name in ("keys", "values", "key_norms", "magnitudes"):
        one, other = getattr(coded, name), getattr(found, name)
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("width", WIDTHS)
def test_as_the_plain_packing(width):
    """The same codes and the same number of bytes as codecs/packing.py, in another order."""
    codes = torch.randint(0, 2**width, (128, 16), dtype=torch.uint8)
    plain = pack_plain(codes.flatten(), width)
    for kind in ("keys", "values"):
        packed = pack_tile(codes, width, kind)
        assert packed.numel() == plain.numel()
        assert torch.equal(
            unpack_tile(packed, width, kind).flatten(), unpack_plain(plain, width, codes.numel())
        )


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("width", WIDTHS)
def test_where_each_code_is(width, kind):
    """Every code alone: its bits are where a thread reads them, by the loops of the PTX ISA's figures."""
    for token in range(0, 64, 5):
        for channel in range(16):
            codes = torch.zeros(64, 16, dtype=torch.uint8)
            codes[token, channel] = code = 2**width - 1
            words = pack_tile(codes, width, kind)[0].view(torch.int32).tolist()
            if (
                kind == "keys"
            ):  # m16n8k16, A: row (token) lane / 4 and 8 more, column (channel) 4 (lane % 4) + byte
                lane, byte = 4 * (token % 8) + channel // 4, channel % 4
                register = 2 * (token // 16) + (token % 16) // 8
            else:  # m16n8k32, A: row (channel) likewise; the column is where movmatrix leaves the token's weight
                inside = token % 16
                lane, byte = 4 * (channel % 8) + (inside % 8) // 2, 2 * (inside % 2) + inside // 8
                register = 4 * (token // 32) + 2 * (token % 32 // 16) + channel // 8
            group, place = register // 2, 4 * (register % 2) + byte
            expected = [0] * (32 * width)
            if width == 8:
                expected[register // 4 * 128 + lane * 4 + register % 4] = code << 8 * byte
            elif width == 4:
                expected[lane * 4 + group] = code << 4 * place
            elif width == 3:
                at = [lane * 2, lane * 2 + 1, 64 + lane]
                if group < 3:
                    expected[at[group]] = code << 4 * place
                else:
                    for word in at:
                        expected[word] = 1 << (4 * place + 3)
            elif width == 2:
                expected[lane * 2 + group // 2] = code << (4 * place + 2 * (group % 2))
            else:
                expected[lane] = 1 << (4 * place + group)
            assert words == [x - 2**32 if x >= 2**31 else x for x in expected]


def test_numbers():
    layout = RecordFormat((4, 0, 8, 3), 2, 2, True)
    coded = random_coded(layout, 70, torch.Generator().manual_seed(0))
    records = pack(coded, layout)
    stored = records[0, :384].view(torch.float16).view(3, 8, 4, 2)
    for token in (0, 7, 9, 31, 63):
        row, i, j = token % 8, token // 16, token % 16 // 8
        assert stored[1, row, i, j] == coded.key_norms[token, 1]
        assert stored[2, row, i, j] == coded.magnitudes[token]
    assert layout.nbytes == 3 * 128 + 128 * (4 + 8 + 3) + 4 * 128 * 2
    short = replace(layout, logarithms=True)
    assert short.nbytes == layout.nbytes - 3 * 64


def test_logarithms_are_sixteenths_of_an_octave():
    found = fragments.numbers(torch.tensor([128, 144, 112, 136], dtype=torch.uint8))
    assert found.tolist() == pytest.approx([1, 2, 0.5, 2**0.5])


def test_bad_input():
    for keys, value in (((5, 4), 4), ((4,), 0), ((4,) * 17, 4), ((), 4)):
        with pytest.raises(ValueError, match="records have"):
            RecordFormat(keys, value)
    layout = RecordFormat((4, 4), 4)
    good = random_coded(layout, 64, torch.Generator().manual_seed(0))
    for wrong, message in (
        (replace(good, keys=good.keys[:, :16]), "must be"),
        (replace(good, key_norms=None), "norms"),
        (replace(good, magnitudes=good.magnitudes.float()), "float16"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(wrong, layout)
    with pytest.raises(ValueError, match="2 records"):
        unpack(pack(good, layout), layout, 65)


@pytest.mark.parametrize("logarithms", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_formats_are_each_packed_alone(seed, logarithms):
    generator = torch.Generator().manual_seed(seed)
    formats = [((8, 4, 0), 2, 0), ((0, 0, 0), 1, 1), ((3, 1, 2), 8, 3), ((8, 4, 0), 3, 2)]
    layouts = [RecordFormat(keys, value, norms, True, logarithms) for keys, value, norms in formats]
    records = torch.randint(0, 4, (len(layouts),), generator=generator).tolist()
    parts = [random_coded(layout, 64 * count, generator) for layout, count in zip(layouts, records)]
    numbers = [
        torch.cat([*([] if part.key_norms is None else [part.key_norms]), part.magnitudes[:, None]], 1)
        for part in parts
    ]
    numbers = torch.cat([torch.nn.functional.pad(x, (0, 4 - x.shape[1]), value=7) for x in numbers])
    keys, values = (torch.cat([getattr(part, name) for part in parts]) for name in ("keys", "values"))
    expected = torch.cat([pack(part, layout).flatten() for part, layout in zip(parts, layouts)])
    assert torch.equal(fragments.pack_mixed(keys, values, numbers, layouts, records), expected)
    with pytest.raises(ValueError, match="records hold"):
        fragments.pack_mixed(keys, values, numbers, layouts, [*records[:-1], records[-1] + 1])
