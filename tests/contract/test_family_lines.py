"""What the family files quote from installed packages still stands there."""

import importlib.util
from pathlib import Path

import pytest

from meridian_patch.config.family_files import load_families

PACKAGED = load_families()


@pytest.mark.parametrize("package", ["vllm", "mistral_common", "meridian_patch"])
def test_lines_of_installed_files_still_stand(package):
    """What renders prompts on this machine can be read again: it must say what is quoted."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: run scripts/setup"
    root = Path(spec.submodule_search_locations[0]).parent
    quoted = [
        (root / evidence.source.split()[0], evidence.line)
        for file in PACKAGED.values()
        if (evidence := file.family.history_evidence) and evidence.source.startswith(f"{package}/")
    ]
    assert quoted
    for path, line in quoted:
        assert " ".join(line.split()) in " ".join(path.read_text(encoding="utf-8").split()), path
