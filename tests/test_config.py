"""Configuration: every key is honoured or refused, and the refusal says what to write instead."""

import dataclasses

import pytest

from zinf.config import Config, cache_dir, expand_path, format_bytes, parse_bytes
from zinf.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("20gib", 20 << 30),
        ("1.5T", 3 << 39),
        ("64GB", 64_000_000_000),
        ("1_000KB", 1_000_000),
        ("9007199254740993B", 9007199254740993),  # not through a float
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "64 potatoes", "-1", -1, "1e9", "0.3B", "1.0000001KiB", True, None, 1.5])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)  # type: ignore[arg-type]


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 96, 1023, 1024, 1536, 512 << 20, 1500 << 20, 5 << 40)] == [
        "0 B", "96 B", "1023 B", "1 KiB", "1.5 KiB", "512 MiB", "1.5 GiB", "5 TiB"
    ]  # fmt: skip


def test_values_are_converted_to_their_types() -> None:
    c = Config.from_dict(
        {
            "lr": "1e-5",  # how PyYAML reads 1e-5
            "host_memory": "48GiB",
            "nvme_path": "/mnt/a",
            "betas": [0.9, "0.95"],
            "queue_depth": 32.0,
            "max_grad_norm": 1,
            "state": 0.25,
            "crash_safe": "no",
            "blocks": ["Block"],
            "cpu_threads": None,
        }
    )
    assert c.lr == 1e-5 and c.host_memory == 48 << 30 and c.nvme_path == ("/mnt/a",) and c.betas == (0.9, 0.95)
    assert c.queue_depth == 32 and isinstance(c.queue_depth, int)
    assert c.max_grad_norm == 1.0 and isinstance(c.max_grad_norm, float)
    assert c.state == 0.25 and c.weights == "auto" and c.crash_safe is False and c.blocks == ("Block",) and c.cpu_threads is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"host_mem": "1GiB"}, "unknown key 'host_mem'; did you mean 'host_memory'?"),
        ({"qqq": 1}, "unknown key 'qqq'; it can be nvme_path, run_name"),
        ({"backend": "urin"}, "backend is 'urin', expected one of auto, uring, threads, python; did you mean 'uring'?"),
        ({"host_memory": "lots"}, "host_memory: 'lots' is not a size; write it like 512MiB, 20GiB or 4096"),
        ({"host_memory": 0}, "host_memory is 0, expected a positive number"),
        ({"chunk_size": 1000}, "chunk_size is 1000, expected a positive multiple of 2048"),
        ({"block_size": "5KB"}, "block_size is 5000, expected a multiple of 4096"),
        ({"lr": "fast"}, "lr is 'fast', expected a number"),
        ({"lr": -1}, "lr is -1.0, expected zero or more"),
        ({"lr": float("nan")}, "lr is nan, expected a number"),
        ({"lr": True}, "lr is True, expected a number"),
        ({"queue_depth": 1.5}, "queue_depth is 1.5, expected a whole number"),
        ({"queue_depth": "inf"}, "queue_depth is 'inf', expected a whole number"),
        ({"betas": [0.9]}, "betas is [0.9], expected a list of 2"),
        ({"betas": [0.9, 1]}, "betas is [0.9, 1.0], expected two numbers in [0, 1)"),
        ({"state": 1.5}, "state is 1.5, expected auto, device, host, nvme, or a fraction from 0 to 1"),
        ({"crash_safe": "maybe"}, "crash_safe is 'maybe', expected true or false"),
        ({"nvme_path": 3}, "nvme_path is 3, expected a list"),
        ({"run_name": "../x"}, "run_name is '../x', expected letters, digits"),
        ({"lr": None}, "lr is None, expected a number"),
    ],
)
def test_refusals_name_the_key_and_the_way_out(values: dict, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        Config.from_dict(values, "run.yaml")
    assert str(e.value).startswith(f"run.yaml: {said}")
    assert "\n" not in str(e.value)


def test_keywords_win_over_variables_win_over_the_file(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-5\nweight_decay: 0.1\neps: 1e-6\nnvme_path: [/a, /b]\n")
    env = {"ZINF_LR": "2e-5", "ZINF_WEIGHT_DECAY": "0.2", "ZINF_HOST_MEMORY": "1GiB", "ZINF_BETAS": "[0.8, 0.9]", "ZINF_ISA": "avx2", "HOME": "/x"}
    c = Config.load(file, env, lr=3e-5)
    assert (c.lr, c.weight_decay, c.eps, c.host_memory, c.betas, c.nvme_path) == (3e-5, 0.2, 1e-6, 1 << 30, (0.8, 0.9), ("/a", "/b"))


def test_round_trip_through_plain_values() -> None:
    import yaml

    c = Config(nvme_path=["/a", "/b"], lr="3e-4", host_memory="1GiB", state=0.5)  # type: ignore[arg-type]
    assert Config.from_dict(yaml.safe_load(yaml.safe_dump(c.to_dict()))) == c


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "lr: [1, 2", "a.yaml: while parsing a flow sequence"),
        ("a.json", '{"lr": 1', "a.json: Expecting"),
        ("a.yaml", "- 1\n- 2\n", "a.yaml: expected keys and values, found list"),
        ("a.yaml", "lr 1e-5\n", "a.yaml: expected keys and values, found str"),
        ("a.yaml", "host_mem: 1GiB\n", "a.yaml: unknown key 'host_mem'; did you mean 'host_memory'?"),
    ],
)
def test_bad_files(tmp_path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as e:
        Config.load(tmp_path / name, {})
    assert said in str(e.value) and "\n" not in str(e.value)


def test_missing_and_empty_files(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Config.load(tmp_path / "none.yaml", {})
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert Config.load(tmp_path / "empty.yaml", {}) == Config()


def test_paths(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("DRIVE", "/mnt/nvme")
    for name in ("ZINF_CACHE", "XDG_CACHE_HOME", "NOT_SET"):
        monkeypatch.delenv(name, raising=False)
    assert str(cache_dir()) == "/home/u/.cache/zinf"
    assert expand_path("~/x") == "/home/u/x" and expand_path("$DRIVE/a ${DRIVE}b") == "/mnt/nvme/a /mnt/nvmeb"
    assert expand_path("$ZINF_CACHE/m") == "/home/u/.cache/zinf/m"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert expand_path("$ZINF_CACHE/m") == "/c/zinf/m"
    monkeypatch.setenv("ZINF_CACHE", "/z")
    assert expand_path("$ZINF_CACHE/m") == "/z/m"
    with pytest.raises(ConfigError, match="the variable NOT_SET is not set"):
        expand_path("$NOT_SET/x")


def test_a_message_shows_the_beginning_of_what_is_long() -> None:
    for values in ({"weights": "x" * 100_000}, {"x" * 100_000: 1}, {"lr": ["x" * 100_000]}):
        with pytest.raises(ConfigError) as e:
            Config.from_dict(values)
        assert len(str(e.value)) < 3000 and "xxx" in str(e.value)
