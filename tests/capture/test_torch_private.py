"""Private names of torch stay behind one file, so that a new torch is one file's work."""

import re
from pathlib import Path

import laminar

PRIVATE = re.compile(r"torch\._(?!_)|from torch\.\S*\._|\b_C\.|\b_VF\b|proxy_tensor|\._schema\b|\._overloadname\b")


def test_only_one_file_uses_private_names_of_torch() -> None:
    """Whoever needs another one adds it to capture/torch_private.py."""
    root = Path(laminar.__file__).parent
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found, "\n".join(found)
