"""Whatever is applied, undone and rebound by others, no class is ever lost."""

import pytest
import toy_package
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_package import PATCHES, SITES, bindings, bound, module

from meridian_patch.errors import PatchRefused
from meridian_patch.patching.fingerprint import source_hash
from meridian_patch.patching.registry import Registry
from meridian_patch.patching.source import SourceTree

APPLY, UNDO, REBIND, RELEASE = "apply", "undo", "rebind", "release"

operation = st.one_of(
    st.just((APPLY, 0)),
    st.just((UNDO, 0)),
    st.tuples(st.sampled_from([REBIND, RELEASE]), st.integers(0, len(SITES) - 1)),
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory):
    with toy_package.toy_package(tmp_path_factory.mktemp("toy")) as toy:
        yield toy


class Model:
    """The toy package, one registry, and another plugin that rebinds sites."""

    def __init__(self, toy) -> None:
        self.upstream = toy.upstream
        self.registry = Registry()
        self.originals = bindings()
        # Site number -> (their class, what it replaced).
        self.theirs: dict[int, tuple[type, type]] = {}

    def run(self, kind: str, index: int) -> None:
        if kind == REBIND and index not in self.theirs:
            overwritten = bound(SITES[index])
            self.theirs[index] = (type("Foreign", (overwritten,), {}), overwritten)
            self._bind(index, self.theirs[index][0])
        elif kind == RELEASE and index in self.theirs:
            self._bind(index, self.theirs.pop(index)[1])
        elif kind == APPLY:
            self._attempt(lambda: self.registry.apply(PATCHES, self.upstream))
        elif kind == UNDO:
            self._attempt(self.registry.undo)

    def _bind(self, index: int, cls: type) -> None:
        setattr(module(SITES[index]), SITES[index].attribute, cls)

    def _attempt(self, action) -> None:
        before = bindings()
        try:
            action()
        except PatchRefused:
            assert self.theirs, "refused although no other had rebound a site"
            assert bindings() == before

    def check(self) -> None:
        held = bindings()
        ours = []
        for index, cls in enumerate(held):
            if index in self.theirs:
                assert cls is self.theirs[index][0]
            elif cls is not self.originals[index]:
                assert cls.__bases__ == (self.originals[index],)
                assert vars(cls)["__meridian_patch__"]
                ours.append(index)
        untouched = [index for index in range(len(held)) if index not in self.theirs]
        assert ours in ([], untouched), "some sites hold ours and some the original"


@given(st.lists(operation, max_size=12))
@settings(deadline=None)
def test_sites_hold_the_original_ours_or_theirs(toy, operations: list[tuple[str, int]]) -> None:
    """Sites are all original or all ours; what others bound stays; undo restores identity."""
    model = Model(toy)
    for kind, index in operations:
        model.run(kind, index)
        model.check()
    for index in range(len(SITES)):
        model.run(RELEASE, index)
    model.registry.undo()
    assert all(now is before for now, before in zip(bindings(), model.originals, strict=True))


BODY = (
    "text = f\"{budget} # kept\" + '# kept'",
    "if text:",
    "    return [",
    "        1,",
    "    ]",
    "return None",
)
noise = st.lists(st.sampled_from(["", "# note", "\n    # deep note\n", "   "]), max_size=3)


@given(st.lists(noise, min_size=len(BODY), max_size=len(BODY)), st.lists(st.booleans()))
@settings(deadline=None)
def test_comments_and_blank_lines_never_count(
    before: list[list[str]], has_comment: list[bool]
) -> None:
    """Comments and blank lines anywhere in a body leave its hash as it is."""
    ends = [*has_comment, *[False] * len(BODY)]
    lines = []
    for line, noisy, end in zip(BODY, before, ends, strict=False):
        lines += [*noisy, f"        {line}{'  # why' if end else ''}"]
    assert _hash("\n".join(lines)) == _hash("\n".join(f"        {line}" for line in BODY))


def _hash(body: str) -> str:
    text = f"class Scheduler:\n    def run(self, budget):\n{body}\n"
    tree = SourceTree("pkg", {"pkg/__init__.py": text}.get)
    return source_hash(tree.find_method(tree.find_class("pkg", "Scheduler"), "run"))
