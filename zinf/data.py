"""From text to batches: read, tokenise, cut into rows, shuffle, and know exactly where we are.

    file       .jsonl/.ndjson: one document a line, {"text": ...} or {"messages": [{"role": ..., "content": ...}, ...]};
               anything else is plain text, one document a file
    document   a run of tokens that ends with EOS. In a conversation only what the assistant says is learned
    row        what the model sees at once. Packed: all documents end to end, cut every max_length tokens, so that no token is
               padding (a row may hold the end of one document and the beginning of the next). Not packed: one document, cut off
               at max_length, padded to the longest of its batch
    position   (epoch, index): how many rows of which epoch have been given out. The order of an epoch is a pure function of
               (seed, epoch), so a position in a file is all that it takes to go on with the same rows

Tokens are kept on disk (int32, memory-mapped), under the hash of the text and of the tokenizer, and made once.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zinf.config import cache_dir, convert_fields, expand_path, option, require
from zinf.errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("zinf")

IGNORE = -100  # label of a token that is not learned: what torch's and transformers' losses skip
PIECE = 1 << 20  # characters: plain text is tokenised in pieces of about this, cut at blank lines
VERSION = 1  # of the token cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `data` section of a training file."""

    train: tuple[str, ...] = option((), "files to learn from (names, or patterns with * and **)")
    eval: tuple[str, ...] = option((), "files to measure the loss on, never learned from")
    max_length: int = option(1024, "tokens of a row")
    packing: bool = option(True, "documents end to end without padding; false: one document a row")
    shuffle: bool = option(True, "another order in each epoch; false: the order of the files")
    seed: int = option(0, "of the order")

    def __post_init__(self) -> None:
        convert_fields(self)
        require(len(self.train) > 0, "train", list(self.train), "at least one file")
        require(self.max_length >= 2, "max_length", self.max_length, "2 or more")
        require(self.seed >= 0, "seed", self.seed, "zero or more")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """All documents of some files, end to end.

    ids: int32 [n]; learn: bool [n], is this token a target; ends: int64 [documents], where each one ends; bos: the token with
    which the tokenizer wants a text to begin, or None; fingerprint: names text and tokenizer.
    """

    ids: np.ndarray
    learn: np.ndarray
    ends: np.ndarray
    bos: int | None
    fingerprint: str


# --------------------------------------------------------------------------------------------------------------- tokens


def find_files(patterns: Sequence[str]) -> list[str]:
    """The files that the patterns name, each pattern's in sorted order.

    Raises:
        ConfigError: a pattern names nothing.
    """
    files: list[str] = []
    for pattern in patterns:
        path = expand_path(pattern)
        found = [path] if os.path.isfile(path) else sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
        if not found:
            raise ConfigError(f"data: {pattern}: no such file")
        files += [f for f in found if f not in files]
    return files


def tokenise(files: Sequence[str], tokenizer: Any, cache: Path | None = None) -> Tokens:
    """Tokens of the files, from the cache folder (default: `tokens` in zinf's cache) if they are there.

    Args:
        tokenizer: a transformers tokenizer, of the fast kind where there are conversations.

    Raises:
        ConfigError: a file is no text, or a line is no document (named by file and line).
    """
    cache = cache_dir() / "tokens" if cache is None else cache
    name = _fingerprint(files, tokenizer)
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            _write(tmp, _documents(files, tokenizer))
            try:
                tmp.rename(folder)
            except OSError:  # another process was faster: the same name means the same content
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    ids, learn, ends = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("ids", "learn", "ends"))
    chat = (folder / "chat").exists()
    return Tokens(ids, learn, ends, None if chat else _bos(tokenizer), name)


def _fingerprint(files: Sequence[str], tokenizer: Any) -> str:
    h = hashlib.sha256(f"{VERSION} {PIECE} {tokenizer.chat_template} {tokenizer.bos_token_id} {tokenizer.eos_token_id}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    h.update((backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    for file in files:
        with open(file, "rb") as f:
            digest = hashlib.sha256()
            while block := f.read(1 << 20):
                digest.update(block)
        h.update(os.path.splitext(file)[1].encode() + digest.digest())
    return h.hexdigest()[:24]


def _bos(tokenizer: Any) -> int | None:
    """The BOS token if the tokenizer puts it before a text by itself (Llama, Gemma do; SmolLM2, Qwen do not)."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None and ids and ids[0] == tokenizer.bos_token_id else None


def _write(folder: Path, documents: Iterator[tuple[np.ndarray, np.ndarray, bool]]) -> None:
    ids, learn, ends, end = [np.zeros(0, np.int32)], [np.zeros(0, bool)], [], 0
    for doc_ids, doc_learn, is_chat in documents:
        ids.append(doc_ids)
        learn.append(doc_learn)
        end += len(doc_ids)
        ends.append(end)
        if is_chat:
            (folder / "chat").touch()
    np.save(folder / "ids.npy", np.concatenate(ids))
    np.save(folder / "learn.npy", np.concatenate(learn))
    np.save(folder / "ends.npy", np.array(ends, np.int64))


def _documents(files: Sequence[str], tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """(ids, learn, is it a conversation) of each document."""
    for file in files:
        if os.path.splitext(file)[1].lower() in (".jsonl", ".ndjson"):
            with open(file, encoding="utf-8") as f:
                for number, line in enumerate(f, start=1):
                    if line.strip():
                        yield _json_document(line, f"{file}, line {number}", tokenizer)
        else:
            try:
                text = Path(file).read_text(encoding="utf-8")
            except UnicodeDecodeError as e:
                raise ConfigError(f"{file}: not UTF-8 text (byte {e.start}); data files are plain text or .jsonl") from None
            yield _text_document(text, tokenizer)


def _text_document(text: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    pieces = list(_pieces(text))
    encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids if pieces else []
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = np.concatenate([*(np.array(e, np.int32) for e in encoded), np.array(eos, np.int32)])
    return ids, np.ones(len(ids), bool), False


def _pieces(text: str) -> Iterator[str]:
    """`text` cut after blank lines into pieces of at least PIECE characters, so that memory and time stay linear in it."""
    at = 0
    while at < len(text):
        cut = text.find("\n\n", at + PIECE)
        end = len(text) if cut < 0 else cut + 2
        yield text[at:end]
        at = end


def _json_document(line: str, where: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{where}: not JSON: {e}") from None
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return _text_document(row["text"], tokenizer)
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return (*chat_document(row["messages"], where, tokenizer, tools=row.get("tools")), True)
    found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    raise ConfigError(f'{where}: expected "text": "..." or "messages": [...], found {found}')


def chat_document(messages: list[dict[str, Any]], where: str, tokenizer: Any, tools: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, learn bool) of a conversation in the model's own template; only what the assistant says, and its end, is learned.

    The template is rendered up to before and up to after each assistant message; the characters between the two are its turn.
    So it works with any template that renders a conversation's beginning as the beginning of the conversation, and says so of
    one that does not.
    """

    def render(upto: int, prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:upto], tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception as e:  # templates raise whatever Jinja raises
            raise ConfigError(f"{where}: the chat template refuses this conversation: {e}") from e

    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{where}: this model's tokenizer has no chat template, so `messages` cannot be used; give `text`")
    if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ConfigError(f'{where}: every message needs a "role" and a "content"')
    text = render(len(messages), False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(i, True), render(i + 1, False)
            if not (text.startswith(after) and after.startswith(before)):
                raise ConfigError(f"{where}: the chat template renders message {i + 1} differently when others follow: cannot tell the assistant's part")
            spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
    learn = np.zeros(len(starts), bool)
    for start, end in spans:
        learn |= (starts >= start) & (starts < end)
    return np.array(encoded["input_ids"], np.int32), learn


# ----------------------------------------------------------------------------------------------------------------- rows


class Rows:
    """The rows of some tokens: `rows[i]` is (ids int64 [length], labels int64 [length])."""

    def __init__(self, tokens: Tokens, max_length: int, packing: bool = True) -> None:
        self.tokens, self.max_length, self.packing = tokens, max_length, packing
        room = max_length - (tokens.bos is not None)
        if packing:
            starts = np.arange(0, len(tokens.ids) - room + 1, room)
            ends = starts + room
        else:
            starts = np.concatenate([[0], tokens.ends[:-1]]).astype(np.int64)
            ends = np.minimum(tokens.ends, starts + room)
        # The first token of a row is nobody's target, so a row is worth reading if a later one is.
        first = starts + (tokens.bos is None)
        learned = np.concatenate([[0], np.cumsum(tokens.learn)])
        keep = (ends > first) & (learned[np.maximum(ends, first)] > learned[np.minimum(first, len(tokens.ids))])
        self._starts, self._ends = starts[keep], ends[keep]
        if not len(self._starts):
            raise ConfigError(f"data: {len(tokens.ids)} tokens make no row of {max_length} with something to learn; give more text, or a smaller max_length")
        if dropped := len(keep) - len(self._starts):
            log.info("data: left out %d of %d rows, they hold nothing to learn", dropped, len(keep))
        self.fingerprint = hashlib.sha256(f"{tokens.fingerprint} {max_length} {packing}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        t = self.tokens
        ids = np.array(t.ids[self._starts[i] : self._ends[i]], np.int64)
        labels = np.where(t.learn[self._starts[i] : self._ends[i]], ids, IGNORE)
        if t.bos is not None:
            ids, labels = np.concatenate([[t.bos], ids]), np.concatenate([[IGNORE], labels])
        return ids, labels

    def batch(self, indices: Sequence[int], pad: int = 0) -> dict[str, torch.Tensor]:
        """input_ids and labels, int64 [rows, length], and attention_mask where rows differ in length (padded to a multiple of 8)."""
        import torch

        rows = [self[i] for i in indices]
        lengths = [len(ids) for ids, _ in rows]
        if len(set(lengths)) == 1:
            return {"input_ids": torch.from_numpy(np.stack([r[0] for r in rows])), "labels": torch.from_numpy(np.stack([r[1] for r in rows]))}
        width = min(-(-max(lengths) // 8) * 8, self.max_length)
        ids = torch.full((len(rows), width), pad)
        labels = torch.full((len(rows), width), IGNORE)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for i, (row, label) in enumerate(rows):
            ids[i, : len(row)], labels[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), torch.from_numpy(label), 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    def spread(self, count: int, batch_size: int = 1, pad: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """Batches of `count` rows, evenly spaced over all: a fair sample to measure on."""
        count = min(count, len(self))
        indices = [i * len(self) // count for i in range(count)]
        for at in range(0, count, batch_size):
            yield self.batch(indices[at : at + batch_size], pad)


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), a pure function of its arguments.

    Sorts by raw words of PCG64, whose stream NumPy keeps the same from version to version (that of `permutation` may change).
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(words, kind="stable")


class Loader:
    """An endless stream of batches with an exact position."""

    def __init__(self, rows: Rows, batch_size: int, seed: int = 0, shuffle: bool = True, pad: int = 0) -> None:
        self.rows, self.batch_size, self.seed, self.shuffle, self.pad = rows, batch_size, seed, shuffle, pad
        self.epoch, self.index = 0, 0
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def next_batch(self) -> dict[str, torch.Tensor]:
        """The next batch_size rows; where an epoch ends inside, the batch goes on with the next epoch."""
        indices: list[int] = []
        while len(indices) < self.batch_size:
            if self._order[0] != self.epoch:
                n = len(self.rows)
                self._order = (self.epoch, epoch_order(n, self.seed, self.epoch) if self.shuffle else np.arange(n))
            take = self._order[1][self.index : self.index + self.batch_size - len(indices)]
            indices += take.tolist()
            self.index += len(take)
            if self.index == len(self.rows):
                self.epoch, self.index = self.epoch + 1, 0
        return self.rows.batch(indices, self.pad)

    def state_dict(self) -> dict[str, Any]:
        """Where we are: plain values for a commit."""
        return {"epoch": self.epoch, "index": self.index, "seed": self.seed, "shuffle": self.shuffle, "rows": self.rows.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` says.

        Raises:
            ConfigError: it was taken over other text, another tokenizer, length or order.
        """
        mine = self.state_dict()
        for key in ("rows", "seed", "shuffle"):
            if state[key] != mine[key]:
                what = "the text, the tokenizer, max_length or packing" if key == "rows" else f"data.{key}"
                raise ConfigError(f"{what} changed since the run was committed ({state[key]} then, {mine[key]} now): put it back, or start over with --fresh")
        self.epoch, self.index = state["epoch"], state["index"]
