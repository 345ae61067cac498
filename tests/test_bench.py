"""`qattn bench` measures what it claims, and no failure is hidden in a figure."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import Case, attention_fp64, case_id, cases, feed, make_layer, random_ids, random_qkv, tiny_llama
from torch.nn.attention import SDPBackend

from qattn_hf import patch
from qattn_hf.bench import decode, generate, layers, sdpa, tables, throughput
from qattn_hf.bench.layers import Heads
from qattn_hf.bench.timing import Times, measure
from qattn_hf.bench.ways import all_ways, captured_step, default_ways
from qattn_hf.cli.bench import chosen_methods
from qattn_hf.layer.filled import BOOKKEEPING, fill
from qattn_hf.messages.origin import device_name
from qattn_hf.model._compat import CACHE
from qattn_hf.recipes.recipe import find_recipes

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 32, torch.float32)


@pytest.fixture
def bench(qattn):
    """Run `qattn bench` on the CPU in this process: `(exit code, stdout, stderr)`."""
    return lambda *arguments: qattn("bench", *arguments, "--device", "cpu")


@pytest.mark.parametrize("case", cases(), ids=case_id)
@pytest.mark.parametrize("length", [0, 64, 190])
def test_a_filled_layer_stands_where_a_fed_one_does(case: Case, length: int):
    """The same lengths and blocks as after real tokens; the next tokens are taken, and close a block when full."""
    fed, filled = make_layer(case), make_layer(case)
    q, k, v = random_qkv(2, length + 70)
    fed.lazy_initialization(k, v)
    filled.lazy_initialization(k, v)
    if length:
        feed(fed, q[:, :, :length], k[:, :, :length], v[:, :, :length], [length])
    fill(filled, length)
    for name in ("length", "longest", "columns_seen", "closed", "open_start", "block_len", "block_pos"):
        assert torch.equal(fed.state[name], filled.state[name]), name
    for layer in (fed, filled):
        out = feed(layer, *(x[:, :, length:] for x in (q, k, v)), [1, 30, 60, 70])
        assert out.isfinite().all()
    assert torch.equal(fed.state["closed"], filled.state["closed"])


def test_a_fill_beyond_the_capacity_is_refused():
    layer = layers.make_layer(chosen_methods(["turbo"])["turbo"], SMALL, 1, 64, CPU)
    with pytest.raises(ValueError, match="65 tokens"):
        fill(layer, 65)


def test_a_step_runs_again_from_the_same_lengths():
    layer = layers.make_layer(chosen_methods(["turbo"])["turbo"], SMALL, 2, 256, CPU)
    fill(layer, 100)
    before = {name: t.clone() for name, t in layer.state.items() if t.dtype in BOOKKEEPING}
    restore = layers.bookkeeping([layer])
    feed(layer, *random_qkv(2, 70), [1, 30, 60, 70])
    assert int(layer.state["length"][0]) == 170
    restore()
    assert [name for name, t in before.items() if not torch.equal(t, layer.state[name])] == []


@pytest.mark.parametrize("sets", [1, 3, 64, 70])
def test_every_replay_pays_for_the_blocks_that_decoding_closes(sets, monkeypatch):
    """However many buffers there are: one closed block for 64 tokens, and `context` tokens in the mean."""
    made, seen = [], []
    make = decode.make_layer

    def watched(*arguments):
        made.append(make(*arguments))
        return made[-1]

    def once(run, device, prepare):
        prepare()
        before = [(int(x.state["length"]), int(x.state["closed"])) for x in made[1:]]
        run()
        after = [(int(x.state["length"]), int(x.state["closed"])) for x in made[1:]]
        seen.append((before, after))
        return Times(1.0, 1.0, 1.0, 1)

    monkeypatch.setattr(decode, "make_layer", watched)
    monkeypatch.setattr(decode, "measure", once)
    monkeypatch.setattr(decode, "working_sets", lambda n_bytes, device: sets)
    row = decode._packed(decode.Point(1, 128), chosen_methods(["none"])["none"], Heads(2, 1, 8, torch.float32), CPU)
    ((before, after),) = seen
    tokens = sum(a[0] - b[0] for b, a in zip(before, after, strict=True))
    closed = sum(a[1] - b[1] for b, a in zip(before, after, strict=True))
    assert len(before) == row["buffers"] >= sets and tokens == row["steps"] and tokens == 64 * closed
    lengths = [n for b, a in zip(before, after, strict=True) for n in range(b[0] + 1, a[0] + 1)]
    assert abs(sum(lengths) / len(lengths) - 128) <= 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_the_opponent_attends_to_all_it_holds(kernel, packed):
    cache = sdpa.Cache(SMALL, 2, 50, CPU)
    q, k, v = (torch.randn(2, heads, 1, 32) for heads in (4, 2, 2))
    out = cache.step(sdpa.Backend(kernel, packed), q, k, v)()
    assert torch.equal(cache.k[:, :, -1:], k) and torch.equal(cache.v[:, :, -1:], v)
    assert torch.allclose(out.double(), attention_fp64(q, cache.k, cache.v), atol=1e-5)


def test_measure_prepares_before_every_run():
    told = []
    times = measure(lambda: told.append("run"), CPU, prepare=lambda: told.append("prepare"), seconds=0, most=3)
    assert told == ["prepare", "run"] * (times.runs + 1)
    assert 0 <= times.low <= times.median <= times.high


def test_decode_prints_one_json_row_a_measurement(bench):
    code, out, err = bench("decode", "--json", "--context", "100", "--batch", "1", "--method", "turbo:bits=2")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["way"] for row in rows] == ["sdpa flash", "sdpa math", "turbo:bits=2"]
    assert all(row["context"] == 100 and row["ms"] > 0 and row["device"] == "cpu" for row in rows)
    assert rows[-1]["impl"] == "reference" and rows[-1]["kv_bytes"] < rows[0]["kv_bytes"] / 4
    assert "say nothing about a GPU" in err, "a CPU's figures are marked as such"


def test_room_is_capacity_that_is_not_filled(bench):
    code, out, _ = bench("decode", "--json", "--method", "none")
    tight, wide = (
        [row for row in map(json.loads, out.splitlines()) if row["room"] == room] for room in (1, decode.ROOM)
    )
    assert code == 0 and tight and wide and all(row["packed"] for row in wide)
    assert min(row["capacity"] / row["context"] for row in wide) >= decode.ROOM


def test_prefill_counts_causal_pairs(bench, tmp_path):
    target = tmp_path / "rows.json"
    code, out, _ = bench("prefill", "--tokens", "80", "--batch", "2", "--method", "int8", "--output", str(target))
    written = json.loads(target.read_text())
    assert code == 0 and "2 x 80" in out and "reference" in out
    assert written["versions"]["torch"] == torch.__version__ and written["device"].startswith("CPU")
    for row in written["rows"]:
        assert row["tops"] == pytest.approx(4 * 2 * 4 * 80**2 / 2 * 32 / row["ms"] / 1e9, abs=1e-3)


def test_a_way_that_fails_costs_no_other_and_the_command_fails(bench, monkeypatch):
    honest = decode._packed

    def broken(point, settings, *rest):
        if settings.name() == "turbo":
            raise RuntimeError("no such kernel")
        return honest(point, settings, *rest)

    monkeypatch.setattr(decode, "_packed", broken)
    code, out, err = bench(
        "decode", "--json", "--batch", "1", "--context", "80", "--method", "turbo", "--method", "int8"
    )
    rows = {row["way"]: row for row in map(json.loads, out.splitlines())}
    assert code == 1 and "1 of 4 measurements failed" in err
    assert "no such kernel" in rows["turbo"]["error"] and "ms" not in rows["turbo"] and rows["int8"]["ms"] > 0


def test_an_output_of_nonsense_is_no_figure(monkeypatch):
    monkeypatch.setattr(
        "qattn_hf.layer.filled._fill_numbers",
        lambda state, name: state[name].fill_(torch.nan if name.endswith(".x") else 0),
    )
    methods = chosen_methods(["none"])
    row = next(r for r in decode.rows([decode.Point(1, 80)], methods, SMALL, CPU) if r["packed"])
    assert "not finite" in row["error"] and "ms" not in row


def test_generate_takes_the_shape_of_any_config(bench, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 101, "head_dim": 16, "sliding_window": 20}
    file = tmp_path / "shape.json"
    file.write_text(json.dumps({**shape, **sizes, "num_hidden_layers": 2}))
    way = ("--way", "DynamicCache", "--batch", "1", "--context", "30", "--new-tokens", "4", "--json")
    code, out, _ = bench("generate", str(file), "--random-weights", *way)
    assert code == 0 and json.loads(out)["num_hidden_layers"] == 2 and json.loads(out)["dtype"] == "bfloat16"
    code, _, err = bench("generate", "--random-weights", *way)
    assert code == 2 and "give MODEL" in err


def test_generate_times_every_way(bench):
    code, out, _ = bench("generate", "--json", "--new-tokens", "6", "--batch", "2", "--context", "70")
    rows = {row["way"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0
    assert list(rows) == ["floor", "turbo eager", "int8 eager", "DynamicCache", "DynamicCache, flash"]
    assert all(row["decode"] == "eager" and row["ms_per_token"] > 0 and row["step_ms"] > 0 for row in rows.values())
    assert rows["DynamicCache"]["kv_bytes"] == 2 * 2 * 2 * 75 * 2 * 16 * 4  # K and V, layers, rows, tokens, heads, dims
    assert rows["floor"]["kv_bytes"] == 0 and rows["turbo eager"]["impl"] == "reference"


def test_throughput_gives_each_cache_the_rows_that_fit_the_same_memory(bench):
    code, out, err = bench("throughput", "--json", "--method", "int8", "--method", "turbo")
    rows = {row["way"]: row for row in map(json.loads, out.splitlines())}
    stock, packed = rows["DynamicCache, flash"], rows["int8 eager"]
    assert code == 0 and list(rows) == ["DynamicCache, flash", "int8 eager", "turbo eager"]
    assert packed["batch"] > stock["batch"] and "tokens a second" in err
    for row in rows.values():
        assert row["kv_mib"] * 2**20 * (1 - 2 / row["batch"]) < row["kv_bytes"] <= row["kv_mib"] * 2**20 * 1.2
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["ms_per_token"] * 1e3, rel=1e-3)


def test_the_best_of_sdpa_is_a_step_over_the_whole_context():
    """Run on a CPU what a GPU captures: each layer attends to all tokens of the context."""
    model = tiny_llama()
    shapes, before = throughput.heads_of(model), model.config._attn_implementation
    with throughput.with_sdpa(model, shapes, 3, 70, sdpa.BACKENDS["flash"]) as caches:
        untouched = [cache.k.clone() for cache in caches]
        assert captured_step(model, 3, replays=1) > 0
    assert model.config._attn_implementation == before and len(caches) == model.config.num_hidden_layers
    for cache, k in zip(caches, untouched, strict=True):
        assert cache.k.shape == (3, shapes[0].kv, 70, shapes[0].dim)
        assert torch.equal(cache.k[:, :, :-1], k[:, :, :-1]) and not torch.equal(cache.k, k)


def test_a_way_under_a_wrong_name_is_refused():
    """A step that was to be captured and ran eagerly must not give its figures to the captured one."""
    model = tiny_llama()
    way = all_ways(find_recipes(["turbo"]), CPU)["turbo eager"]
    asked = generate.Way("turbo graph", "graph", True, way.prepared)
    (row,) = generate.rows([generate.Point(1, 70)], [asked], model, CPU, 4)
    assert "'eager' ran" in row["error"] and "step_ms" not in row


def test_watching_leaves_the_model_as_it_was():
    model = patch(tiny_llama(), "turbo", decode="eager")
    before = dict(model.__dict__)
    watched = generate.generate(model, random_ids(1, 70), 5, {}, watch=True)
    assert len(watched.gaps) == 5 and len(watched.steps) == 4
    assert all(gap >= step for gap, step in zip(watched.gaps[1:], watched.steps, strict=True))
    assert model.__dict__.keys() == before.keys() and model.get_compiled_call is before["get_compiled_call"]
    alone = generate.generate(model, random_ids(1, 70), 5, {}, watch=False)
    assert alone.steps == [] and len(alone.gaps) == 5


def test_what_is_compiled_is_the_bare_call(monkeypatch):
    """A compiled step must not contain the clock, which wraps the call from outside."""
    model, compiled = tiny_llama(), []
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_: True)
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call) or call)
    run = generate.generate(model, random_ids(1, 70), 5, {}, watch=True)
    assert compiled == [model.__call__] and run.compiled and len(run.steps) == 4


def test_ways_of_a_gpu_leave_no_trace(monkeypatch):
    """With graphs and compiling replaced by plain calls: each way runs what it says and the model is as before."""
    model = tiny_llama()
    before, attention = set(model.__dict__), model.config._attn_implementation
    monkeypatch.setattr(
        type(model),
        "_valid_auto_compile_criteria",
        lambda self, kwargs, _: type(kwargs[CACHE]).__name__ in ("StaticCache", "QAttnCache"),
    )
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    ways = all_ways(find_recipes(["turbo"]), torch.device("cuda"))
    names = ("floor", "floor, captured", "floor, compiled and captured", "turbo compile", "StaticCache")
    chosen = [ways[name] for name in names]
    rows = {row["way"]: row for row in generate.rows([generate.Point(1, 70)], chosen, model, CPU, 5)}
    assert [row["decode"] for row in rows.values()] == ["eager", "captured", "captured", "compile", "compile"]
    assert rows["floor, captured"]["step_ms"] > 0
    assert set(model.__dict__) == before and model.config._attn_implementation == attention


def test_by_default_only_a_stock_cache_compiles():
    ways = all_ways(find_recipes(["turbo", "int8"]), torch.device("cuda"))
    chosen = [way.name for way in default_ways(ways)]
    assert {"turbo graph", "int8 graph", "DynamicCache", "DynamicCache, flash", "StaticCache"} <= set(chosen)
    assert {"turbo compile", "turbo fused"} <= {*ways} - {*chosen}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--method", "trubo"], "turbo"),
        (["decode", "--method", "turbo:bitz=2"], "bitz"),
        (["decode", "--heads", "3,2,64"], "--heads 3,2,64"),
        (["decode", "--context", "0"], "--context"),
        (["generate", "--way", "turbo grahp"], "turbo eager"),
    ],
)
def test_an_error_names_what_is_wrong(bench, arguments, said):
    code, out, err = bench(*arguments)
    assert code in (1, 2) and out == "" and said in err.splitlines()[-1]


def test_a_picture_without_matplotlib_is_refused_before_the_work(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(decode, "attempt", lambda *_, **__: pytest.fail("it measured first"))
    code, _, err = bench("decode", "--picture", str(tmp_path / "x.png"))
    assert code == 1 and "pip install" in err.splitlines()[-1]


def rows_of(name: str) -> list[dict]:
    """Rows as the benches make them, with round figures."""
    point = {"bench": name, "batch": 1}
    if name == "decode":
        shape = {**point, "context": 4096, "room": 1}
        return [
            {**shape, "way": "sdpa flash", "packed": False, "ms": 0.25},
            {**shape, "way": "sdpa cudnn", "packed": False, "ms": 0.125},
            {**shape, "way": "sdpa efficient", "packed": False, "error": "no kernel"},
            {**shape, "way": "turbo", "packed": True, "ms": 0.0625, "impl": "triton"},
            {**shape, "way": "int8", "packed": True, "error": "out of memory"},
            {**shape, "room": 4, "way": "turbo", "packed": True, "ms": 0.06875, "impl": "triton"},
        ]
    if name == "prefill":
        shape = {**point, "tokens": 1024}
        return [
            {**shape, "way": "sdpa cudnn", "packed": False, "tops": 430.4},
            {**shape, "way": "turbo", "packed": True, "tops": 512.0},
        ]
    figures = {"decode": "graph", "impl": "triton", "ms_per_token": 7.5, "step_ms": 7.0, "first_token_s": 0.2}
    figures |= {"first_token_extra_s": 1.0, "setup_s": 0.5, "setup_again_s": 0.01}
    figures |= {"kv_bytes": 2**29, "prefill_peak_bytes": 2**34, "peak_bytes": 3 * 2**33}
    shape = {**point, "context": 4096}
    return [
        {**shape, "way": "turbo graph", "packed": True, **figures},
        {**shape, "way": "floor, captured", "packed": False, "decode": "captured", "impl": None, "step_ms": 6.5},
        {**shape, "way": "StaticCache", "packed": False, "error": "no compiler"},
    ]


def test_the_decode_table_compares_with_the_best_that_ran():
    header, lines = tables.table(rows_of("decode"))
    assert header == ["B", "context", "best SDPA", "ms", "turbo, ms", "int8, ms"]
    assert lines == [
        ["1", "4096", "cudnn", "0.1250", "0.0625 (2.00x)", "failed"],
        ["1", "4096, room for 16384", "", "", "0.0688 (+10.0%)", ""],
    ]


def test_the_other_tables_show_their_figures():
    assert tables.table(rows_of("prefill"))[1] == [["1 x 1024", "430", "512"]]
    first, second, third = tables.table(rows_of("generate"))[1]
    assert first[2:] == [
        "turbo graph",
        "graph, triton",
        "7.50",
        "7.00",
        "0.200",
        "1.500",
        "0.010",
        "0.50",
        "16.00",
        "24.00",
    ]
    assert second[2:6] == ["floor, captured", "captured", "", "6.50"]
    assert third[3] == "no compiler" and set(third[4:]) == {"failed"}


@pytest.mark.parametrize("name", ["decode", "prefill", "generate"])
def test_a_picture_is_drawn(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.figure import Figure

    from qattn_hf.bench.picture import TITLES, draw

    titles, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (titles.append(self.get_suptitle()), save(self, *a, **k))
    )
    draw(rows_of(name), tmp_path / "x.png")
    assert titles[0].startswith(TITLES[name]) and device_name() in titles[0]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
