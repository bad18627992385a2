"""Layout descriptors: the sizes that the engines have, and a one-line refusal of everything else."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv_ref import layouts
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR


def test_loading_needs_no_torch() -> None:
    code = "import sys, hybridkv_ref.layouts as l; [l.load(n) for n in l.names()]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("name", "entries", "dim", "nbytes", "stride"),
    [
        ("fp8_ds_mla_584", 1, None, 584, 1_152),
        ("fp8_ds_mla_584", 64, None, 37_376, 37_440),  # CSA page of 256 tokens, window block of 64
        ("fp8_ds_mla_584", 2, None, 1_168, 1_728),  # HCA page of 256 tokens
        ("index_fp8_132", 64, None, 8_448, 8_640),
        ("index_fp4_68", 1, None, 68, 576),
        ("dsv32_656", 1, None, 656, 656),
        ("uniform_fp8_512", 1, None, 512, 512),
        ("bf16", 1, 512, 1_024, 1_024),  # V4
        ("bf16", 1, 576, 1_152, 1_152),  # V3.2
        ("bf16", 1, 128, 256, 256),  # index key
        ("state_fp32", 1, 1_024, 8_192, 8_192),  # CSA, two branches of 512
        ("state_fp32", 1, 256, 2_048, 2_048),  # its indexer
        ("state_fp32", 1, 512, 4_096, 4_096),  # HCA
    ],
)
def test_sizes(name: str, entries: int, dim: int | None, nbytes: int, stride: int) -> None:
    page = layouts.load(name).page(entries, dim=dim)
    assert (page.nbytes, page.stride) == (nbytes, stride)


def test_strides_that_meet_more_than_the_layout_asks() -> None:
    page = layouts.load("fp8_ds_mla_584").page(64)
    assert page.aligned_stride(128) == 38_016
    assert page.aligned_stride(256) == 39_168
    assert page.file_stride() == 40_960


@given(
    name=st.sampled_from(layouts.names()), entries=st.integers(1, 70), heads=st.integers(1, 3), dim=st.integers(1, 5)
)
def test_fields_tile_the_page(name: str, entries: int, heads: int, dim: int) -> None:
    """Every byte of a page belongs to exactly one field of one entry and head."""
    layout = layouts.load(name)
    page = layout.page(
        entries, heads=heads if layout.heads == "model" else None, dim=dim if layout.dim == "model" else None
    )
    for places in (tuple(page.places.values()), page.regions()):
        owners = bytearray(page.nbytes)
        for place in places:
            for entry in range(entries):
                for head in range(page.heads):
                    start = place.base + entry * place.entry_step + head * place.head_step
                    for byte in range(start, start + place.nbytes):
                        owners[byte] += 1
        assert set(owners) == {1}


def test_orders_of_heads_differ() -> None:
    nhd, hnd = (layouts.load(f"bf16_{order}").page(16, heads=8, dim=128).places["v"] for order in ("nhd", "hnd"))
    assert (nhd.entry_step, nhd.head_step) == (8 * 256, 256)
    assert (hnd.entry_step, hnd.head_step) == (256, 16 * 256)
    assert nhd.base == hnd.base == 16 * 8 * 256


@pytest.mark.parametrize(
    ("old", "new", "place", "reason"),
    [
        ('id = "fp8_ds_mla_584"', 'id = "other"', "id", "is not the file's name"),
        ("count = 448", "count = 384", "fields.kv", "do not add up to dim"),
        ("count = 7", "count = 6", "fields.kv", "are not 6 tiles"),
        ("entry_bytes = 584", "entry_bytes = 588", "entry_bytes", "is not what the fields add up to"),
        ('dtype = "e4m3"', 'dtype = "fp32"', "fields.nope", "a quantised field cannot be fp32"),
        ('scale_rule = "pow2_ceil"', 'scale_rule = "none"', "scale_rule", "does not fit the fields' roles"),
        ('scale_rule = "pow2_ceil"', 'scale_rule = "fixed"', "fields.kv", "does not fit the presence of a scale"),
        ('scale_rule = "pow2_ceil"', 'scale_rule = "amax_div"', "fields.kv", "needs an fp32 scale"),
        ("min_exponent = -22", "min_exponent = -135", "min_exponent", "is outside"),
        ("base_align = 16", "base_align = 24", "base_align", "is not a power of two"),
        ("stride_multiple = 576", "stride_multiple = 0", "stride_multiple", "must be positive"),
        ("region = 1", "region = 2", "fields.region", "without a gap"),
        ('name = "rope"', 'name = "nope"', "fields.name", "same name"),
        ("tile = 64", "tiles = 64", "", "unknown field"),
        ("heads = 1", 'heads = "many"', "", "Invalid"),
        ("heads = 1", "heads = 1 1", "", ""),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, place: str, reason: str) -> None:
    text = (SPEC_DIR / "layouts" / "fp8_ds_mla_584.toml").read_text()
    assert old in text
    path = tmp_path / "fp8_ds_mla_584.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as error:
        layouts.load_file(path)
    message = str(error.value)
    assert message.startswith(f"fp8_ds_mla_584.toml:{place}")
    assert reason in message
    assert "\n" not in message


def test_a_missing_file_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^nowhere\.toml: cannot be read"):
        layouts.load("nowhere")


@pytest.mark.parametrize(
    ("sizes", "place"),
    [
        ({"entries": 0}, "entries"),
        ({"entries": 4, "heads": 2}, "heads"),
        ({"entries": 4, "dim": 128}, "dim"),
        ({"entries": 64, "stride": 37_376}, "stride"),
        ({"entries": 64, "stride": 36_864}, "stride"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(sizes: dict[str, int], place: str) -> None:
    with pytest.raises(InputError, match=rf"^fp8_ds_mla_584\.toml:page\.{place}: "):
        layouts.load("fp8_ds_mla_584").page(**sizes)


def test_the_model_must_give_what_the_layout_leaves_open() -> None:
    with pytest.raises(InputError, match=r"^bf16\.toml:page\.dim: "):
        layouts.load("bf16").page(4)


def test_an_unknown_vector_is_refused() -> None:
    with pytest.raises(InputError, match=r"^bf16\.toml:fields: no vector 'score'"):
        layouts.load("bf16").page(4, dim=8).vector("score")
