"""Where views come from: a running server that is asked again and again, or a recording."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meridian_patch.errors import MeridianError
from meridian_patch.operate.http_client import ServerClient
from meridian_patch.operate.scrape import Scrape, parse
from meridian_patch.operate.top import recording
from meridian_patch.operate.top.view import View, check_vllm, view


class LiveServer:
    """A running server.

    Args:
        client: asks it.
        record: file that every scrape is added to; None: none.
    """

    def __init__(self, client: ServerClient, record: Path | None) -> None:
        self.url = client.url
        self._client = client
        self._record = record

    def scrape(self) -> Scrape:
        """Its metrics now.

        Raises:
            MeridianError: it cannot be reached, its page cannot be read or is no vLLM server's, or
                the recording cannot be written.
        """
        text = self._client.metrics()
        now, time_of_day = time.monotonic(), time.time()
        scrape = parse(text, now)
        check_vllm(scrape)
        if self._record is not None:
            # Recordings of several starts of the machine may share a file: the time of day orders
            # them.
            recording.append(self._record, text, time_of_day)
        return scrape

    def watch(
        self, before: Scrape | None, is_ended: Callable[[], bool]
    ) -> Iterator[View | MeridianError]:
        """A view per scrape until the end is asked for; an error where the server does not tell.

        Args:
            before: an earlier scrape; None: the first one yields no view.
            is_ended: waits for the next scrape; True: there is to be none.
        """
        while not is_ended():
            try:
                after = self.scrape()
                shown = None if before is None else view(before, after)
            except MeridianError as error:
                yield error
                continue
            before = after
            if shown is not None:
                yield shown


def recorded(path: Path) -> Iterator[tuple[float, View]]:
    """The windows of a recording and when each ended, in seconds as recorded.

    Raises:
        ScrapeError: the file is no recording of a vLLM server.
    """
    scrapes = recording.read(path)
    before = next(scrapes)
    for after in scrapes:
        # The clock may have been set back, and a recording may be of several sessions.
        if after.at_s > before.at_s:
            yield after.at_s, view(before, after)
        before = after
