"""Which weights the LoRA adapter of a request has: two engines may serve others under one name.

The digest is of all bytes of the two files that vLLM loads, and of the settings with which it loads
them. So adapters with the same digest have the same weights. Any other difference, as a comment in
``adapter_config.json``, costs no more than a KV cache that is computed again.

What cannot be told is ``NOT_KNOWN``, which is equal to nothing: a name of a hub, an adapter that
was never in a file, and files that cannot be read or are still being read. So are files that have
changed since the engine's first request with them, until it starts again: workers may have the old
or the new weights in memory, and the prefix cache, whose key is the path, may have blocks of both.
Changed weights belong under a new path, as vLLM says of ``load_inplace``, too.

What is not noticed, because the scheduler does not see what workers load:

- files that were replaced after vLLM loaded them, and before the engine's first request with them;
- an adapter that is loaded in place from another path, until the first request with it;
- files that differ between the machines of one engine's workers.
"""

import hashlib
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm.lora.request import LoRARequest

from meridian_patch.handoff.ticket import NOT_KNOWN

# Load-bearing: names of the files that vLLM loads, and the order in which it looks for weights.
_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Load-bearing: settings of vLLM's LoRA configuration that change what an adapter adds.
_SETTINGS: Final = (
    "lora_dtype",
    "target_modules",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
# Files of this size are read within a step, which takes tens of milliseconds once per adapter;
# vLLM loads the adapter between steps, too. Larger ones are read by a thread.
READ_AT_ONCE_BYTES: Final = 16 * 2**20
# Far more adapters than an engine has in memory. One that is forgotten counts as new.
_MOST_KNOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class Weights:
    """What is known of an adapter's weights.

    Attributes:
        digest: ``NOT_KNOWN`` if they are not known.
        why: why not; empty if they are known.
    """

    digest: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    # They differ once the content was written or the file was replaced.
    stamps: tuple[int, ...]


_PENDING: Final = Weights(
    NOT_KNOWN, "its files are still being read, and later requests are handed off"
)


class _Reading:
    """The digest of files, read at once or by a thread."""

    def __init__(self, folder: Path, files: tuple[_File, ...], turn: threading.Lock) -> None:
        self.files = files
        self.result = _PENDING
        self._folder = folder
        self._turn = turn
        if sum(file.size for file in files) <= READ_AT_ONCE_BYTES:
            self._read()
            return
        try:
            # The thread ends with the process, which must not wait for it.
            threading.Thread(target=self._read_in_turn, daemon=True).start()
        except RuntimeError as error:
            self.result = Weights(NOT_KNOWN, str(error))

    @property
    def has_failed(self) -> bool:
        """Whether reading the same files again may help."""
        return bool(self.result.why) and self.result is not _PENDING

    def _read_in_turn(self) -> None:
        with self._turn:
            self._read()

    def _read(self) -> None:
        whole = hashlib.sha256()
        try:
            for file in self.files:
                with Path(file.path).open("rb") as opened:
                    # Python's lock is free meanwhile: the engine's steps go on.
                    content = hashlib.file_digest(opened, "sha256").digest()
                whole.update(Path(file.path).name.encode() + b"\0" + content)
            if _files_in(self._folder) != self.files:
                self.result = Weights(NOT_KNOWN, "its files changed while they were read")
                return
        except (OSError, ValueError) as error:
            self.result = Weights(NOT_KNOWN, str(error))
            return
        self.result = Weights(whole.hexdigest())


@dataclass(slots=True, eq=False)
class Loaded:
    """An adapter's files.

    Attributes:
        folder: where they are.
        first: the reading of the files as they were at the engine's first request with them; None
            if they could not be seen.
        newest: the reading of the files as they were seen last.
        why: why the weights will not be known any more; empty if they may be.
    """

    folder: Path
    first: _Reading | None = None
    newest: _Reading | None = None
    why: str = ""


class AdapterWeights:
    """Digests of the weights of an engine's LoRA adapters. No method raises.

    Args:
        lora_config: vLLM's; None if the engine has no adapters.
    """

    def __init__(self, lora_config: Any) -> None:
        self._settings = [(name, str(getattr(lora_config, name, None))) for name in _SETTINGS]
        # By folder, and the newest of each of vLLM's ids. Those last used are at the end.
        self._by_folder: dict[Path, Loaded] = {}
        self._by_id: dict[int, Loaded] = {}
        # Threads read one after another.
        self._turn = threading.Lock()

    def begin(self, adapter: Any) -> Loaded | None:
        """A request with this adapter begins: remember the adapter's files as they are now.

        Args:
            adapter: the request's ``lora_request``; None without one.
        """
        if adapter is None:
            return None
        folder = _folder_of(adapter)
        loaded = self._by_folder.pop(folder, None) or self._look(folder)
        _put_last(self._by_folder, folder, loaded)
        before = self._by_id.pop(adapter.lora_int_id, loaded)
        # Load-bearing: workers have one adapter per id, and only `load_inplace` replaces it.
        _put_last(self._by_id, adapter.lora_int_id, loaded if adapter.load_inplace else before)
        return loaded

    def of(self, adapter: Any, loaded: Loaded) -> Weights:
        """Digest of a request's adapter weights and settings; ``NOT_KNOWN`` and why if unknown.

        Args:
            adapter: the request's ``lora_request``.
            loaded: what ``begin`` returned for the request.
        """
        if type(adapter) is not LoRARequest:
            return Weights(NOT_KNOWN, f"it is a {type(adapter).__name__}, perhaps of no file")
        if self._by_id.get(adapter.lora_int_id) is not loaded:
            return Weights(NOT_KNOWN, "vLLM has another adapter under its id")
        read = self._read(loaded)
        if read.why:
            return read
        values = [read.digest, *self._settings, adapter.is_3d_lora_weight]
        return Weights(hashlib.sha256(repr(values).encode()).hexdigest()[:32])

    def difference(self, adapter: Any, loaded: Loaded | None, theirs: str | None) -> str:
        """Why the LoRA adapter forbids using a ticket's KV cache here; empty if it does not.

        Weights that are unknown on either side forbid it, too.

        Args:
            adapter: the request's ``lora_request``; None without one.
            loaded: what ``begin`` returned for the request.
            theirs: ``Facts.adapter`` of its ticket.
        """
        if loaded is None and theirs is None:
            return ""
        if loaded is None or theirs is None:
            there = {None: "none", NOT_KNOWN: "unknown"}.get(theirs, f"one of digest {theirs!r}")
            here = "none" if loaded is None else repr(adapter.lora_name)
            return f"the LoRA adapter is {there} there and {here} here"
        name = adapter.lora_name
        ours = self.of(adapter, loaded)
        if ours.why:
            return f"the weights of LoRA adapter {name!r} are unknown here: {ours.why}"
        if theirs == NOT_KNOWN:
            return f"the weights of LoRA adapter {name!r} are unknown there"
        digests = f"{theirs!r} there and {ours.digest!r} here"
        is_same = theirs == ours.digest
        return "" if is_same else f"the digest of LoRA adapter {name!r} is {digests}"

    def _look(self, folder: Path) -> Loaded:
        try:
            reading = _Reading(folder, _files_in(folder), self._turn)
        except (OSError, ValueError) as error:
            return Loaded(folder, why=str(error))
        return Loaded(folder, reading, reading)

    def _read(self, loaded: Loaded) -> Weights:
        first, newest = loaded.first, loaded.newest
        if loaded.why or first is None or newest is None:
            return Weights(NOT_KNOWN, loaded.why)
        try:
            files = _files_in(loaded.folder)
        except (OSError, ValueError) as error:
            return Weights(NOT_KNOWN, str(error))
        if newest.result is _PENDING:
            # One reading at a time: files that keep changing must not fill EngineCore with threads.
            return _PENDING
        if newest.files != files or newest.has_failed:
            loaded.newest = newest = _Reading(loaded.folder, files, self._turn)
            if files == first.files:
                loaded.first = first = newest
        if files != first.files and not newest.result.why and newest.result != first.result:
            loaded.why = "its files have changed; load changed weights from a new path"
            return Weights(NOT_KNOWN, loaded.why)
        return newest.result


def _put_last(known: dict[Any, Loaded], key: Any, loaded: Loaded) -> None:
    known[key] = loaded
    while len(known) > _MOST_KNOWN:
        del known[next(iter(known))]


def _folder_of(adapter: Any) -> Path:
    """Where vLLM finds an adapter's files; a name of a hub gives a folder that does not exist."""
    # Load-bearing: as in `vllm.lora.utils.get_adapter_absolute_path`.
    return Path(os.path.expanduser(adapter.lora_path))  # noqa: PTH111 (that one raises)


def _files_in(folder: Path) -> tuple[_File, ...]:
    """The files that vLLM would load from a folder.

    Raises:
        OSError: one is missing or cannot be seen.
        ValueError: the folder's name is none.
    """
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise FileNotFoundError(f"{folder} has none of {', '.join(_WEIGHTS)}")
    return tuple(_seen(path) for path in (folder / _CONFIG, weights))


def _seen(path: Path) -> _File:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        # To open a pipe may take forever.
        raise FileNotFoundError(f"{path} is no file")
    stamps = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    return _File(str(path), found.st_size, stamps)
