"""Data: what is learned, in which order, and that a position is all it takes to go on exactly."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from zinf import data
from zinf.data import IGNORE, DataConfig, Loader, Rows, Tokens, chat_document, epoch_order, find_files, tokenise
from zinf.errors import ConfigError


def tokens(n: int, learn: list[int] | None = None, ends: list[int] | None = None, bos: int | None = None, fingerprint: str = "f") -> Tokens:
    """n tokens 100, 101, ...; all of them learned unless said."""
    mask = np.ones(n, bool) if learn is None else np.isin(np.arange(n), learn)
    return Tokens(np.arange(100, 100 + n, dtype=np.int32), mask, np.array([n] if ends is None else ends, np.int64), bos, fingerprint)


# --------------------------------------------------------------------------------------------------------------- tokens


def test_text_is_tokenised_whole_and_ends_with_eos(tmp_path) -> None:
    tok = tiny_tokenizer()
    (tmp_path / "a.txt").write_text("the cat\n\nand the dog")
    (tmp_path / "b.md").write_text("hat")
    t = tokenise([str(tmp_path / "a.txt"), str(tmp_path / "b.md")], tok, tmp_path / "cache")
    assert tok.decode(t.ids) == "the cat\n\nand the dog</s>hat</s>"
    assert t.learn.all() and t.bos is None
    assert [tok.decode(t.ids[a:b]) for a, b in zip([0, *t.ends[:-1]], t.ends, strict=True)] == ["the cat\n\nand the dog</s>", "hat</s>"]


def test_long_text_in_pieces_is_the_same_text(tmp_path, monkeypatch) -> None:
    tok = tiny_tokenizer()
    text = "\n\n".join(f"the cat {i} sat é on\nthe mat" for i in range(50))
    (tmp_path / "a.txt").write_text(text)
    whole = tokenise([str(tmp_path / "a.txt")], tok, tmp_path / "c1")
    monkeypatch.setattr(data, "PIECE", 100)
    assert len(list(data._pieces(text))) > 5 and "".join(data._pieces(text)) == text
    pieces = tokenise([str(tmp_path / "a.txt")], tok, tmp_path / "c2")
    assert tok.decode(pieces.ids) == tok.decode(whole.ids) == text + "</s>"


def test_only_the_assistant_is_learned() -> None:
    tok = tiny_tokenizer()
    messages = [
        {"role": "system", "content": "be the cat"},
        {"role": "user", "content": "the hat?"},
        {"role": "assistant", "content": "on the mat"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "the dog"},
    ]
    ids, learn = chat_document(messages, "x", tok)
    assert tok.decode(ids) == tok.apply_chat_template(messages, tokenize=False)
    assert tok.decode(ids[learn]) == "on the mat<|im_end|>\nthe dog<|im_end|>\n"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    # Like the templates that drop the thinking of all turns but the last.
    template = "{% for m in messages %}{{ m['content'] if loop.last else m['content'] | upper }};{% endfor %}"
    tok = tiny_tokenizer(template=template)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    with pytest.raises(ConfigError, match=r"chats\.jsonl, line 3: the chat template renders message 2 differently"):
        chat_document(messages, "chats.jsonl, line 3", tok)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ('{"prompt": "a", "completion": "b"}', 'line 2: expected "text": "..." or "messages": [...], found prompt, completion'),
        ("[1]", 'line 2: expected "text": "..." or "messages": [...], found list'),
        ('{"messages": []}', 'line 2: every message needs a "role"'),
        ('{"messages": [{"content": "a"}]}', 'line 2: every message needs a "role"'),
    ],
)
def test_bad_lines_are_named(tmp_path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n' + line + "\n")
    with pytest.raises(ConfigError) as e:
        tokenise([str(tmp_path / "a.jsonl")], tiny_tokenizer(), tmp_path / "cache")
    assert said in str(e.value)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-made is left behind


def test_messages_without_a_chat_template(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(ConfigError, match="no chat template"):
        tokenise([str(tmp_path / "a.jsonl")], tiny_tokenizer(template=None), tmp_path / "cache")


def test_binary_files_and_missing_files_are_refused(tmp_path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.bin: not UTF-8 text \(byte 0\)"):
        tokenise([str(tmp_path / "a.bin")], tiny_tokenizer(), tmp_path / "cache")
    with pytest.raises(ConfigError, match="no such file"):
        find_files([str(tmp_path / "*.txt")])


def test_patterns_name_each_file_once_in_sorted_order(tmp_path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([str(tmp_path / "b.txt"), str(tmp_path / "**/*.txt")])
    assert [f.removeprefix(f"{tmp_path}/") for f in found] == ["b.txt", "a.txt", "sub/c.txt"]


def test_the_cache_is_used_and_noticed_when_stale(tmp_path, monkeypatch) -> None:
    file, cache, tok = tmp_path / "a.txt", tmp_path / "cache", tiny_tokenizer()
    file.write_text("the cat")
    first = tokenise([str(file)], tok, cache)
    with monkeypatch.context() as m:
        m.setattr(data, "_documents", lambda *a: pytest.fail("tokenised again"))
        assert tokenise([str(file)], tok, cache).fingerprint == first.fingerprint
    file.write_text("the dog")
    second = tokenise([str(file)], tok, cache)
    assert tok.decode(second.ids) == "the dog</s>" and second.fingerprint != first.fingerprint
    other = tokenise([str(file)], tiny_tokenizer(vocab_size=270), cache)
    assert other.fingerprint != second.fingerprint


# ----------------------------------------------------------------------------------------------------------------- rows


def test_packed_rows() -> None:
    rows = Rows(tokens(11, ends=[4, 11]), 4)
    assert [rows[i][0].tolist() for i in range(len(rows))] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert rows[1][1].tolist() == [104, 105, 106, 107]


def test_rows_begin_with_bos_where_the_tokenizer_wants_it(tmp_path) -> None:
    rows = Rows(tokens(8, bos=1), 4)
    assert [rows[i][0].tolist() for i in range(len(rows))] == [[1, 100, 101, 102], [1, 103, 104, 105]]
    assert rows[0][1].tolist() == [IGNORE, 100, 101, 102]
    (tmp_path / "a.txt").write_text("the cat")
    assert tokenise([str(tmp_path / "a.txt")], tiny_tokenizer(bos=True), tmp_path / "c").bos == 0
    assert tokenise([str(tmp_path / "a.txt")], tiny_tokenizer(bos=False), tmp_path / "c").bos is None


def test_rows_with_nothing_to_learn_are_left_out() -> None:
    # Row 0 has nothing, row 1 only its first token (nobody's target: labels are shifted), row 2 its last.
    rows = Rows(tokens(12, learn=[4, 11]), 4)
    assert len(rows) == 1 and rows[0][1].tolist() == [IGNORE, IGNORE, IGNORE, 111]
    with pytest.raises(ConfigError, match="12 tokens make no row of 4 with something to learn"):
        Rows(tokens(12, learn=[0, 4, 8]), 4)
    with pytest.raises(ConfigError, match="3 tokens make no row of 4"):
        Rows(tokens(3), 4)
    assert len(Rows(tokens(12, learn=[0, 4, 8], bos=1), 5)) == 3  # after BOS the first token is a target


def test_unpacked_rows_are_documents_padded_to_the_longest_of_a_batch() -> None:
    rows = Rows(tokens(20, ends=[3, 4, 20]), 12, packing=False)
    assert [rows[i][0].tolist() for i in range(len(rows))] == [[100, 101, 102], list(range(104, 116))]  # one token teaches nothing; 16 are cut at 12
    batch = rows.batch([0, 1], pad=7)
    assert batch["input_ids"].shape == (2, 12)
    assert batch["input_ids"][0].tolist() == [100, 101, 102] + [7] * 9
    assert batch["labels"][0].tolist() == [100, 101, 102] + [IGNORE] * 9
    assert batch["attention_mask"].sum(1).tolist() == [3, 12]
    assert "attention_mask" not in rows.batch([0])


def test_spread_is_even_and_each_row_once() -> None:
    rows = Rows(tokens(40), 4)
    got = [b["input_ids"][:, 0].tolist() for b in rows.spread(5, batch_size=2)]
    assert got == [[100, 108], [116, 124], [132]]
    assert sum(len(b["input_ids"]) for b in rows.spread(1000)) == 10


# ---------------------------------------------------------------------------------------------------------------- order


def test_the_order_of_an_epoch_is_pinned() -> None:
    """A literal: a new version of NumPy, or of zinf, must not change the order of a run that is resumed."""
    assert epoch_order(10, seed=1, epoch=0).tolist() == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    assert epoch_order(10, seed=1, epoch=1).tolist() != epoch_order(10, seed=1, epoch=0).tolist()
    assert epoch_order(10, seed=2, epoch=0).tolist() != epoch_order(10, seed=1, epoch=0).tolist()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 17), batch=st.integers(1, 40), seed=st.integers(0, 5), stop=st.integers(0, 12), shuffle=st.booleans())
def test_a_resumed_loader_goes_on_with_the_same_rows(n: int, batch: int, seed: int, stop: int, shuffle: bool) -> None:
    def loader() -> Loader:
        return Loader(Rows(tokens(2 * n), 2), batch, seed, shuffle)

    straight, first, second = loader(), loader(), loader()
    expected = [straight.next_batch()["input_ids"][:, 0].tolist() for _ in range(15)]
    got = [first.next_batch()["input_ids"][:, 0].tolist() for _ in range(stop)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [second.next_batch()["input_ids"][:, 0].tolist() for _ in range(15 - stop)]
    assert got == expected
    flat = [x for b in expected for x in b]
    for epoch in range(len(flat) // n):  # each epoch has each row once
        assert sorted(flat[epoch * n : (epoch + 1) * n]) == [100 + 2 * i for i in range(n)]


def test_a_position_over_other_data_is_refused() -> None:
    state = Loader(Rows(tokens(20), 2), 1, seed=3).state_dict()
    for rows, seed, said in (
        (Rows(tokens(20, fingerprint="g"), 2), 3, "the text"),
        (Rows(tokens(20), 4), 3, "max_length"),
        (Rows(tokens(20), 2), 4, "data.seed"),
    ):
        with pytest.raises(ConfigError, match=said):
            Loader(rows, 1, seed).load_state_dict(state)


def test_data_config() -> None:
    assert DataConfig(train="a.txt").train == ("a.txt",)  # type: ignore[arg-type]
    for bad in ({}, {"train": []}, {"train": ["a"], "max_length": 1}):
        with pytest.raises(ConfigError):
            DataConfig(**bad)
