"""A hook of mkdocs: code in a table may break after a comma, so that long settings leave room for other columns."""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"(?<=<t[dh]><code>)[^<]+(?=</code>)")


def on_page_content(html: str, **_: Any) -> str:
    return CODE.sub(lambda code: code[0].replace(",", ",<wbr>"), html)
