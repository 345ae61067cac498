"""Files of recipes and families: what YAML may hold is read, all else is one short error with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn_hf import RecipeError, list_methods, load_recipe
from qattn_hf.recipes import families
from qattn_hf.recipes.recipe import Recipe, find_recipe

LONGEST = 2000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes") / "mine.yaml"


def said(path: Path, content: str | bytes) -> str:
    """The one error of a file."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    message = str(raised.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) <= LONGEST
    return message.removeprefix(str(path))


def laughs(link: str) -> str:
    """Each of eleven anchors holds the one before it ten times."""
    lines = ["method: turbo", "a0: &a0 {x: 1}"]
    return "\n".join(lines + [f"a{i}: &a{i} {link.format(','.join([f'*a{i - 1}'] * 10))}" for i in range(1, 12)])


TWICE = {
    "method: turbo\nbits: 2\nbits: 4": ", line 3: bits is given twice, first in line 2",
    "method: turbo\nmethod: kivi": ", line 2: method is given twice, first in line 1",
    "method: turbo\nlayers:\n  0: {bits: 2,\n      'bits': 4}": ", line 4: bits is given twice, first in line 3",
    "method: turbo\nlayers:\n  0-1: {bits: 2}\n  0-1: {bits: 4}": ", line 4: 0-1 is given twice, first in line 3",
    "method: turbo\nlayers: {}\nbits: 2\nlayers: {0: {bits: 4}}": ", line 4: layers is given twice, first in line 2",
    "method: turbo\nlayers:\n  0: &a {bits: 2}\n  1: {<<: *a, <<: *a}": ", line 4: << is given twice, first in line 4",
}


@pytest.mark.parametrize(("text", "message"), TWICE.items())
def test_a_key_given_twice_is_refused_at_every_depth(path: Path, text: str, message: str):
    assert said(path, text).startswith(message)


def read_families(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> tuple[families.Family, ...]:
    """The families of a folder with one file."""
    monkeypatch.setattr(families, "configs_dir", lambda: path.parent)
    (path.parent / "families").mkdir(exist_ok=True)
    (path.parent / "families" / "mine.yaml").write_text(text, encoding="utf-8")
    return families.list_families.__wrapped__()


FAMILY = "family: A\nmodel_types: [a]\nmethods:\n  turbo: {why: b, source: c}\n"


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ("  turbo: {why: d, source: e}\n", ("line 5: turbo is given twice, first in line 4",)),
        ("  kivi: {why: d, source: e, settings: {bits: 2, bits: 4}}\n", ("line 5: bits is given twice",)),
        ("  kivi: {why: d, sauce: e}\n", ("methods.kivi.source", "methods.kivi.sauce")),
    ],
)
def test_files_of_families_are_read_alike(monkeypatch, path, more: str, parts: tuple[str, ...]):
    assert len(read_families(monkeypatch, path, FAMILY)) == 1
    with pytest.raises(RecipeError) as raised:
        read_families(monkeypatch, path, FAMILY + more)
    assert [part for part in ("mine.yaml", *parts) if part not in str(raised.value)] == []


HOSTILE: dict[str, tuple[str, tuple[str, ...]]] = {
    "range": ("method: turbo\nlayers: {0-99999999: {bits: 2}}", ("layer 99999999", "0 to 4095 at most")),
    "ranges": (f"method: turbo\nlayers:\n  ? {','.join(['0-4095'] * 9000)}\n  : {{bits: 2}}", ("give it once",)),
    "number of 5000 digits": (f"method: turbo\nlayers: {{? 0-{'9' * 5000} : {{}}}}", ("such as 0-3,7",)),
    "aliases of aliases": (laughs("[{}]"), ("with its aliases", "50000")),
    "merges of merges": (laughs("{{<<: [{}]}}"), ("with its aliases", "50000")),
    "anchor in itself": ("method: turbo\nlayers: &a {0: *a}", ("line 2", "holds itself")),
    "chain of aliases": (
        "method: turbo\na0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 900)),
        ("nest more than 32 deep",),
    ),
    "nested lists": (f"method: turbo\nbits: {'[' * 3000}{']' * 3000}", ("line 2", "nested more than 32 deep")),
    "nested mappings": ("".join(f"{' ' * i}a:\n" for i in range(600)), ("line 32", "nested more than 32 deep")),
    "values": (f"method: turbo\nk_low_heads: [{'[0],' * 30000}]", ("more than 50000",)),
    "tag of a number": ("method: turbo\nbits: !!int four", ("line 2", "the tag !!int")),
    "tag of bytes": ("method: turbo\nbits: !!binary four", ("line 2", "the tag !!binary")),
    "tag of Python": ("method: turbo\nbits: !!python/object/apply:os.getcwd []", ("the tag !!python/object/apply",)),
    "date": ("method: turbo\nbits: 2024-13-45", ("line 2", "2024-13-45 as timestamp", "quotes")),
    "base 60": ("method: turbo\nlayers: {1:30: {bits: 2}}", ("line 2", "1:30", "plain decimals")),
    "octal": ("method: kivi\nbits: 04", ("line 2: 04", "plain decimals")),
    "hexadecimal without digits": ("method: turbo\nbits: 0x_", ("0x_", "plain decimals")),
    "long number": (f"method: turbo\nbits: {'1' * 9000}", ("1...1", "plain decimals")),
    "long name": (f"method: {'x' * 5000}", ("unknown method 'xxx", "...", "turbo")),
    "long key": (f"method: turbo\n? {'x' * 5000}\n: 1", ("unknown key 'xxx", "...", "buffer_size")),
    "long key of a layer": (f"method: turbo\nlayers: {{? {'x' * 5000} : {{}}}}", ("layers 'xxx", "...", "0-3,7")),
    "long value": (f"method: turbo\nbits: {'x' * 5000}", ("bits = 'xxx", "...", "4, 2 or 'mixed'")),
    "unknown keys": (
        "method: turbo\nbitz: 2\n" + "".join(f"key{i}: 1\n" for i in range(3000)),
        ("unknown key 'bitz', did you mean 'bits'?", "unknown key 'key3'; 2996 more; allowed: bits"),
    ),
    "a number as a layer's key": ("method: turbo\nlayers: {0: {1: 2}}", ("layers 0", "keys are names, not 1")),
    "a truth value as a key": ("method: turbo\nlayers: {0: {on: 2}}", ("the key on as bool",)),
    "a list as a key": ("method: turbo\n[1]: 2", ("keys are names",)),
    "merge of a number": ("method: turbo\n<<: 3", ("is not YAML: line 2", "merging")),
    "several documents": ("method: turbo\n---\nmethod: kivi", ("is not YAML: line 2", "single document")),
    "unknown alias": (f"method: *{'x' * 5000}", ("is not YAML: line 1", "undefined alias")),
    "no such character": ('method: "\\UFFFFFFFF"', ("is not YAML",)),
    "no such version": (f"%YAML 1.{'9' * 5000}\n---\nmethod: turbo", ("is not YAML",)),
    "lone surrogate": ('method: turbo\nlayers: {"\\ud800": {}}', ("layers '\\ud800'",)),
}


@pytest.mark.parametrize(("text", "parts"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_recipe_is_one_short_error(path: Path, text: str, parts: tuple[str, ...]):
    message = said(path, text)
    assert [part for part in parts if part not in message] == [], message


def test_files_that_are_not_read(monkeypatch, path: Path, tmp_path: Path):
    assert said(path, bytes(range(256))).startswith(" is not YAML: byte 128 is not UTF-8")
    assert said(path, "#" * 300_000).startswith(" has more than 256 KiB")
    with pytest.raises(RecipeError, match=r"no recipe at .*qattn\.yaml"):
        load_recipe(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(RecipeError, match=r"folder\.yaml, which is a directory; .*turbo_sink"):
        load_recipe(tmp_path / "folder.yaml")
    for name in ("x" * 5000, "x" * 5000 + ".yaml", "a\0b.yaml", "\ud800.yaml"):
        with pytest.raises(RecipeError) as raised:
            load_recipe(name)
        assert len(str(raised.value)) <= LONGEST and str(raised.value).isprintable()

    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)  # root may read any file
    with pytest.raises(RecipeError, match=r"mine\.yaml cannot be read: Permission denied"):
        load_recipe(path)


def test_little_of_the_stack_is_left(path: Path):
    path.write_text("method: turbo\nlayers: {0: {k_low_heads: [[0]]}}", encoding="utf-8")

    def deep() -> None:
        try:
            deep()
        except RecursionError:
            load_recipe(path)  # a few calls from the end of the stack

    with pytest.raises(RecipeError, match=r"mine\.yaml: too little of Python's stack"):
        deep()


def test_anchors_merges_and_words_are_read(path: Path):
    path.write_text(
        "method: turbo\nsoftmax: 'sas'\nsmooth_k: no\nsparse_v_budget: .inf\nsas_threshold: -6\nn_h: ~\nlayers:\n"
        "  0-1: &wide {bits: 4, sparse_v_tau: 1.0e-3}\n  30-31: *wide\n  7: {<<: *wide, bits: 2}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(path)
    assert (recipe.settings.softmax, recipe.settings.smooth_k, recipe.settings.n_h) == ("sas", False, None)
    assert recipe.settings.sparse_v_budget == float("inf") and recipe.settings.sas_threshold == -6.0
    assert [recipe.settings_of(i).bits for i in (0, 1, 7, 30, 31)] == [4, 4, 2, 4, 4]
    assert [recipe.settings_of(i).sparse_v_tau for i in (1, 2, 7)] == [1e-3, 0.0, 1e-3]
    path.write_text(recipe.as_yaml(), encoding="utf-8")
    assert load_recipe(path).choices == recipe.choices


def test_lists_of_heads_of_a_large_model_are_read(path: Path):
    heads = [list(range(0, 64, 2))] * 126
    recipe = find_recipe("turbo", None, {"bits": "mixed", "k_low_heads": heads, "v_low_heads": heads})
    path.write_text(recipe.as_yaml(), encoding="utf-8")
    assert load_recipe(path).settings == recipe.settings


# Any text, any value

PIECES = [
    "method: turbo\n", "method: ", "kivi", "bits: ", "layers: ", "0-3: ", "family: true\n", "1", "99999999", "0x_",
    "1:30", "2024-13-45", ".nan", "~", "yes", "=", ": ", "- ", ", ", "\n", "  ", "\t", "[", "]", "{", "}", "'", '"',
    "&a ", "*a", "<<: ", "!!int ", "!!timestamp ", "? ", "| ", "# ", "%YAML 1.1\n", "---\n", "\\U", "\u2028", "\x85",
]  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.sampled_from(list_methods()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.sampled_from(["0", "bits"]), inner),
    max_leaves=20,
)
keys = st.sampled_from(["bits", "k_bits", "k_low_heads", "layers", "family", "sas_threshold", "n_h"]) | st.text()
texts = (
    st.text()
    | st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
    | st.lists(st.sampled_from(PIECES), max_size=30).map(lambda found: "method: turbo\n" + "".join(found))
    | st.dictionaries(keys, values).map(lambda found: yaml.safe_dump({"method": "turbo", **found}))
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(texts.map(str.encode) | st.binary())
def test_any_file_is_a_recipe_or_one_short_error(path: Path, content: bytes):
    path.write_bytes(content)
    try:
        assert isinstance(load_recipe(path), Recipe)
    except RecipeError as error:
        assert str(path) in str(error) and str(error).isprintable() and len(str(error)) <= LONGEST


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(keys, values | st.sampled_from([10**5000, "x" * 5000, {10**5000: {}}])))
def test_any_keywords_are_a_recipe_or_one_short_error(found: dict[str, Any]):
    try:
        recipe = find_recipe("turbo", None, found)
        assert len(recipe.origin) <= LONGEST / 2
    except RecipeError as error:
        assert str(error).startswith("defaults of turbo") and str(error).isprintable() and len(str(error)) <= LONGEST
