"""docs/from-deepspeed.md names what is there; docs/deepspeed-keys.md is the table that the code has. Snippets: test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zinf import cli
from zinf.errors import ConfigError
from zinf.integrations import deepspeed

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from-deepspeed.md").read_text()


def test_the_names_of_the_page_are_there() -> None:
    for name in re.findall(r"`deepspeed\.([a-z_]+(?:\.[A-Za-z_0-9]+)*)`", PAGE):
        if not name.startswith(("runtime", "ops")) and not name.endswith("_"):
            found: Any = deepspeed
            for part in name.split("."):
                found = getattr(found, part)


def test_the_table_of_keys_is_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Made by: zinf ds-config --keys --markdown > docs/deepspeed-keys.md"""
    assert cli.main(["ds-config", "--keys", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "deepspeed-keys.md").read_text()


def test_the_flag_of_a_command_line() -> None:
    assert deepspeed.take_argument(["--lr", "1", "--deepspeed=a.json", "--deepspeed", "b.json", "x"]) == ("b.json", ["--lr", "1", "x"])
    assert deepspeed.take_argument(["--lr", "1"]) == (None, ["--lr", "1"])
    with pytest.raises(ConfigError, match="--deepspeed needs a file"):
        deepspeed.take_argument(["--deepspeed"])
