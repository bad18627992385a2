"""Model geometry: the figures that sources give, the shipped files, and what the loader refuses."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.models import Dtypes, Footprint, Model, footprint, load_model, load_model_file, model_names

MI_TOKENS = 1 << 20
MIB, GIB = 1 << 20, 1 << 30
FP8 = Dtypes("fp8", "fp8")


def share(result: Footprint, name: str) -> int:
    return next(group.bytes for group in result.groups if group.name == name)


@pytest.mark.parametrize("name", model_names())
def test_shipped_model_is_sound(name: str) -> None:
    model = load_model(name)
    assert model.source
    assert model.confidence
    kinds = {"entries": {"compressed_kv", "indexer_state"}, "window": {"swa_window"}}
    kinds |= {"ring": {"uncompressed_tail"}, "state": {"recurrent_state"}}
    for group in model.groups:
        assert group.kind in kinds[group.shape]
        assert (group.kind == "indexer_state") <= (group.dtype_of == "index")
    if not name.startswith("deepseek-v4-"):
        blocks = [group.block_tokens for group in model.groups if group.block_tokens]
        assert model.alignment == math.lcm(*blocks)


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("tokens", [1, 3, 127, 128, 129, 1000, 40_000])
def test_whole_blocks_hold_what_is_stored(name: str, tokens: int) -> None:
    result = footprint(load_model(name), tokens)
    assert sum(group.bytes for group in result.groups) == result.total_bytes + result.state_bytes
    assert result.padded_bytes >= result.total_bytes + result.state_bytes


def test_a_model_without_state_has_none() -> None:
    assert footprint(load_model("minimax-m2"), 4096).state_bytes == 0


def test_recall_marks_are_kept() -> None:
    for name in ("gemma-2-9b", "gemma-2-27b", "gemma-3-27b", "ministral-8b-2410", "phi-4-mini-flash"):
        assert load_model(name).confidence.startswith("recall")


@pytest.mark.parametrize(
    ("name", "layers", "csa", "hca"),
    [
        ("deepseek-v4-flash", 43, range(2, 43, 2), range(3, 43, 2)),
        ("deepseek-v4-pro", 61, range(2, 61, 2), [0, 1, *range(3, 61, 2)]),
    ],
)
def test_v4_layers(name: str, layers: int, csa: range, hca: list[int]) -> None:
    model = load_model(name)
    assert model.alignment == 128
    assert model.group("window").layer_ids == tuple(range(layers))
    for group in ("csa", "csa_index", "csa_tail", "csa_index_tail"):
        assert model.group(group).layer_ids == tuple(csa)
    for group in ("hca", "hca_tail"):
        assert model.group(group).layer_ids == tuple(hca)
    assert [model.group(group).halo for group in ("csa_tail", "csa_index_tail", "hca_tail")] == [4, 4, 0]


def test_v4_flash_pages() -> None:
    model = load_model("deepseek-v4-flash")
    # Pages per layer as public sources give them, all multiples of 576 bytes; tails use the page of their pool.
    pages = {"window": 37_440, "csa": 37_440, "csa_index": 8_640, "hca": 1_728}
    pages |= {"csa_tail": 37_440, "csa_index_tail": 8_640, "hca_tail": 37_440}
    for name, page in pages.items():
        group = model.group(name)
        assert page % 576 == 0
        assert group.block_bytes(FP8) == group.layers * page
    # The rows that a 37,440-byte page holds: 64 entries of 584 bytes; raw and padded differ by less than one row.
    assert 37_440 - 64 * 584 == 64
    # Where no source gives a page, a block is its rows: 64 entries of 1,024 bytes.
    assert model.group("csa").block_bytes(Dtypes("bf16", "bf16")) == 21 * 64 * 1024


def test_v4_pro_bf16_at_1mi_tokens() -> None:
    result = footprint(load_model("deepseek-v4-pro"), MI_TOKENS, "bf16", "bf16")
    assert f"{result.total_bytes / GIB:.3f}" == "9.625"


def test_v4_pro_against_v32() -> None:
    # 10.48 %: total_bytes, window rows included and compressor state not, with fp8 KV and fp4 index keys, against V3.2
    # with fp8 KV and fp8 index keys, at 1 Mi tokens. Without the window rows it would be 10.47, with the state 10.51.
    pro = footprint(load_model("deepseek-v4-pro"), MI_TOKENS, "fp8", "fp4")
    v32 = footprint(load_model("deepseek-v3.2"), MI_TOKENS, "fp8", "fp8")
    assert f"{100 * pro.total_bytes / v32.total_bytes:.2f}" == "10.48"
    assert f"{100 * (pro.total_bytes - share(pro, 'window')) / v32.total_bytes:.2f}" == "10.47"
    assert f"{100 * (pro.total_bytes + pro.state_bytes) / v32.total_bytes:.2f}" == "10.51"


@pytest.mark.parametrize(
    ("name", "ratio", "state_mib", "window_mib", "reach"),
    [("deepseek-v4-flash", "7.95", "11.6", "3.07", 5461), ("deepseek-v4-pro", "7.88", "17.8", "4.35", 7747)],
)
def test_v4_windows_and_state(name: str, ratio: str, state_mib: str, window_mib: str, reach: int) -> None:
    model = load_model(name)
    result = footprint(model, 32_768, "fp8", "fp8")
    assert f"{result.state_bytes / MIB:.1f}" == state_mib
    # The published 3.1 and 4.4 MiB are these figures, rounded again.
    assert f"{share(result, 'window') / MIB:.2f}" == window_mib
    # Keeping the window rows of every token, against the compressed entries without the index.
    window, csa, hca = (model.group(group) for group in ("window", "csa", "hca"))
    compressed = sum(group.layers * group.bytes_per_token(FP8) for group in (csa, hca))
    assert f"{window.layers * window.bytes_per_token(FP8) / compressed:.2f}" == ratio
    assert window.window is not None
    assert window.layers * (window.window - 1) == reach


def test_only_whole_entries_count() -> None:
    model = load_model("deepseek-v4-flash")
    assert [share(footprint(model, tokens), "hca") for tokens in (127, 128, 255)] == [0, 20 * 584, 20 * 584]
    assert [share(footprint(model, tokens), "window") for tokens in (1, 128, 500)] == [43 * 584, *[43 * 128 * 584] * 2]


def test_chunks_are_bounded_by_the_chunk() -> None:
    chunk = load_model("llama-4-scout").group("chunk")
    assert [chunk.rows(tokens) for tokens in (5, 8192, 100_000)] == [5, 8192, 8192]
    assert chunk.blocks(100_000) == 512


def test_footprint_json() -> None:
    result = json.loads(msgspec.json.encode(footprint(load_model("gpt-oss-20b"), 1000)))
    assert set(result) == {"name", "tokens", "total_bytes", "state_bytes", "padded_bytes", "groups"}
    assert result["groups"][0] == {
        "name": "full",
        "kind": "compressed_kv",
        "layers": 12,
        "bytes_per_token": 2048.0,
        "bytes": 12 * 1000 * 2048,
    }


def test_every_model_of_the_list(shared_data: Path) -> None:
    listed = json.loads((shared_data / "models.json").read_text())
    assert set(listed) == set(model_names())
    for name, expected in listed.items():
        model = load_model(name)
        assert (model.source, model.confidence) == (expected["source"], expected["confidence"])
        result = footprint(model, 32_768)
        assert result.total_bytes + result.state_bytes == expected["bytes_at_32k"], name
        dtypes = model.dtypes()
        stored = [group for group in expected["groups"] if group["kind"] != "none"]
        for group, row in zip(model.groups, stored, strict=True):
            assert group.layers == row["layers"]
            size = row["state_bytes"] if "state_bytes" in row else row["bytes_per_token"]
            one_layer = group.stored_bytes(32_768, dtypes) // group.layers
            assert size == (one_layer if group.is_state else group.bytes_per_token(dtypes)), (name, group.name)
            assert group.span == row.get("window", row.get("chunk")) or group.is_state
            assert group.block_bytes(dtypes) // group.layers == row.get(
                "page", group.block_bytes(dtypes) // group.layers
            )
            if "bf16" in row:
                assert group.entry_bytes["bf16"] == row["bf16"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v4-flsh", "did you mean deepseek-v4-flash"),
        ("GEMMA-3N-E4B", "did you mean gemma-3n-E4B"),
        ("../models/gpt-oss-20b", "did you mean gpt-oss-20b"),
        ("zzz", "known: command-a-03-2025"),
    ],
)
def test_unknown_model(name: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_unknown_group() -> None:
    with pytest.raises(InputError, match=r"^deepseek-v4-pro:groups: no group named 'hca_tale' \(did you mean hca_tail"):
        load_model("deepseek-v4-pro").group("hca_tale")


@pytest.mark.parametrize(
    ("name", "kv", "index", "expected"),
    [
        ("gpt-oss-20b", "fp8", None, r"gpt-oss-20b:kv_dtype: .* group full in fp8 \(known: bf16\)"),
        ("deepseek-v3.2", "fp8", "fp4", r"deepseek-v3.2:index_dtype: .* group index in fp4 \(known: bf16, fp8\)"),
    ],
)
def test_unknown_size_is_refused(name: str, kv: str, index: str | None, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        footprint(load_model(name), 1024, kv, index)


def test_an_index_dtype_means_nothing_without_an_index() -> None:
    model = load_model("gpt-oss-20b")
    assert footprint(model, 64, index_dtype="fp4") == footprint(model, 64)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="expected at least 1, got 0"):
        footprint(load_model("minimax-m2"), 0)


GOOD = """\
name = "tiny"
source = "made up"
confidence = "made up"
note = ""
alignment = 8

[[groups]]
name = "main"
kind = "compressed_kv"
layers = 2
layer_ids = [0, 1]
ratio = 4
entry_bytes = { bf16 = 64 }
block_tokens = 8
page_bytes = { bf16 = 192 }

[[groups]]
name = "tail"
kind = "uncompressed_tail"
layers = 2
layer_ids = [0, 1]
feeds = "main"
ratio = 4
halo = 4
row_bytes = 16
ring_rows = 8
block_tokens = 4

[[groups]]
name = "local"
kind = "swa_window"
layers = 2
window = 16
entry_bytes = { bf16 = 64 }
block_tokens = 8

[[groups]]
name = "state"
kind = "recurrent_state"
layers = 1
state_bytes = 100
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    for folder in ("models", "kinds"):
        (tmp_path / folder).mkdir()
    kinds = ("compressed_kv", "uncompressed_tail", "swa_window", "indexer_state", "recurrent_state", "on_disk_prefix")
    for kind in kinds:
        (tmp_path / "kinds" / f"{kind}.toml").touch()
    return tmp_path


def load_text(spec: Path, text: str | bytes) -> Model:
    path = spec / "models" / "tiny.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_model_file(path, spec)


def test_made_up_model(spec: Path) -> None:
    result = footprint(load_text(spec, GOOD), 13)
    assert result.total_bytes == 2 * 3 * 64 + 2 * 13 * 64
    assert result.state_bytes == 2 * 8 * 16 + 100
    assert result.padded_bytes == 2 * 2 * 192 + 2 * (2 * 4 * 16) + 2 * 2 * 8 * 64 + 100


def test_a_new_kind_needs_no_code(spec: Path) -> None:
    text = GOOD.replace('"compressed_kv"', '"summary_vector"')
    with pytest.raises(InputError, match=r"groups\[0\].kind: expected one of compressed_kv, .*, got 'summary_vector'"):
        load_text(spec, text)
    (spec / "kinds" / "summary_vector.toml").touch()
    assert load_text(spec, text).groups[0].kind == "summary_vector"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('kind = "recurrent_state"', 'kind = "on_disk_prefix"', r"groups\[3\].kind: on_disk_prefix is a tier"),
        ('name = "tiny"', 'name = "huge"', r":name: expected 'tiny' .* got 'huge'"),
        ("alignment = 8", "alignment = 6", r":alignment: 6 is not a multiple of the ratio 4 of group main"),
        ("alignment = 8", 'alignment = "8"', r":alignment: Expected `int`, got `str`"),
        ("alignment = 8", "", r"Object missing required field `alignment`"),
        ("layers = 1", "layers = 0", r":groups\[3\].layers: Expected `int` >= 1"),
        ("layers = 1", "layer = 1", r":groups\[3\]: .*`layer`"),
        ("halo = 4\n", "", r":groups\[1\].halo: missing in a group that stores ring"),
        ("window = 16", "window = 16\nratio = 4", r":groups\[2\].ratio: has no meaning in a group that stores window"),
        ("window = 16", "window = 16\nchunk = 16", r":groups\[2\].chunk: .* not both"),
        ("window = 16", "", r":groups\[2\].ratio: missing in a group that stores entries"),
        ("state_bytes = 100", "state_bytes = 1\nblock_tokens = 4", r":groups\[3\].block_tokens: has no meaning"),
        ('feeds = "main"', 'feeds = "local"', r":groups\[1\].feeds: no group of entries is named 'local'"),
        ("ratio = 4\nhalo", "ratio = 2\nhalo", r":groups\[1\].feeds: ratio and layers differ from those of group main"),
        ("[0, 1]\nratio", "[0, 1, 2]\nratio", r":groups\[0\].layer_ids: lists 3 layers, but layers = 2"),
        ("[0, 1]\nratio", "[1, 0]\nratio", r":groups\[0\].layer_ids: expected increasing ids"),
        ("[0, 1]\nratio", "[-1, 0]\nratio", r":groups\[0\].layer_ids\[0\]: Expected `int` >= 0"),
        ("block_tokens = 8\npage", "block_tokens = 6\npage", r":groups\[0\].block_tokens: 6 is not a multiple of the"),
        ("{ bf16 = 192 }", "{ bf16 = 127 }", r":groups\[0\].page_bytes.bf16: 127 is less than the 2 x 64 bytes"),
        ("{ bf16 = 192 }", "{ fp8 = 192 }", r":groups\[0\].page_bytes.fp8: has no entry_bytes of this format"),
        ('name = "local"', 'name = "main"', r":groups: two groups have the same name"),
        ("note =", "note", r":file: not TOML: .*line 4"),
    ],
)
def test_loader_refuses(spec: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    with pytest.raises(InputError, match=expected) as caught:
        load_text(spec, GOOD.replace(old, new, 1))
    assert str(caught.value).startswith(str(spec / "models" / "tiny.toml") + ":")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"\x00\x01\xff", GOOD.partition("[[")[0].encode()])
def test_loader_refuses_a_file_that_is_no_model(spec: Path, text: bytes) -> None:
    with pytest.raises(InputError, match=r"tiny\.toml:file: "):
        load_text(spec, text)


def test_loader_refuses_a_missing_file(spec: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_model_file(spec / "models" / "absent.toml", spec)
