"""What a start finds in the files of the consume queues beside what the table says. It looks first, and cuts later.

A queue is what the table says. What a file has behind that, and a folder that the table does not know, come again from the log. Where the
log has lost a part, only these files tell how far a queue went. So they are cut after their ends are kept: a start may be killed at any
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from protomq_broker.store.files.side_files import OpenFiles, cut_file, read_entries, size_of_file

from .consume_queue import ENTRIES_PER_FILE, FILE_SIZE_BYTES, NO_FOLDER, ConsumeQueue
from .entry_check import opened, position_in, salt_of
from .queue_ends import QueueEnd, end_in_file, ends_below
from .selection import ENTRY_SIZE_BYTES


class FoundFiles:
    """See the module's docstring.

    Attribute: cuts: call these when the ends are kept.
    """

    def __init__(self, folder: str, files: OpenFiles, ends: list[QueueEnd]) -> None:
        """`folder`: that of all consume queues. `ends` takes how far queues went where files say more than the table."""
        self.cuts: list[Callable[[], None]] = []
        self._ends = ends
        self._folder = folder
        self._files = files
        self._disk = files.disk

    def end_of_entries(self, queue: ConsumeQueue, min_offset: int, end_offset: int, last_position: int) -> int:
        """Up to which offset the files of a queue hold entries, at most `end_offset`. What they have behind that is noted.

        `last_position`: where the record of the last one stands, else the last file is another one; 0: not known.
        """
        offset = min_offset
        while offset < end_offset:
            file_start = offset // ENTRIES_PER_FILE * ENTRIES_PER_FILE
            wanted = min(end_offset - file_start, ENTRIES_PER_FILE)
            path = queue.path_of(offset)
            size = size_of_file(self._disk, path) or 0
            if size < wanted * ENTRY_SIZE_BYTES:
                return max(min_offset, file_start + size // ENTRY_SIZE_BYTES)
            if size >= FILE_SIZE_BYTES and file_start + wanted == end_offset:
                self._note_files_behind(queue, path)
            if size > wanted * ENTRY_SIZE_BYTES:
                self._note_end(queue, path)
                self.cuts.append(partial(cut_file, self._disk, path, wanted * ENTRY_SIZE_BYTES))
            offset = file_start + wanted
        if last_position and offset > min_offset and self._is_older(queue, end_offset - 1, last_position):
            return max(min_offset, (end_offset - 1) // ENTRIES_PER_FILE * ENTRIES_PER_FILE)
        return end_offset

    def _is_older(self, queue: ConsumeQueue, queue_offset: int, position: int) -> bool:
        """Whether an entry holds and leads elsewhere. One that does not hold is healed when somebody reads it."""
        fd = self._disk.open_read_only(queue.path_of(queue_offset))
        try:
            at = queue_offset % ENTRIES_PER_FILE * ENTRY_SIZE_BYTES
            data = read_entries(self._disk, fd, ENTRY_SIZE_BYTES, at)
        finally:
            self._disk.close(fd)
        if len(data) < ENTRY_SIZE_BYTES or position_in(data) == position:
            return False
        _, good = opened(data, 1, queue_offset, salt_of(queue.topic, queue.queue_id))
        return good == 1

    def note_strays(
        self, topics: Mapping[str, Mapping[int, ConsumeQueue]], table_file_name: str
    ) -> None:
        """Notes the folders that the table does not know: made after the last checkpoint, they come again from the log."""
        for topic in self._disk.list(self._folder):
            if topic == table_file_name:
                continue
            path = f"{self._folder}/{topic}"
            queues = topics.get(topic)
            if queues is None:
                if self._disk.is_folder(path):
                    self._note_folder(path)
                else:
                    self._files.unlink(path)
                continue
            known = {
                str(queue_id)
                for queue_id, queue in queues.items()
                if queue.synced_offset != NO_FOLDER
            }
            for name in self._disk.list(path):
                if name not in known:
                    self._note_folder(f"{path}/{name}")

    def _note_folder(self, path: str) -> None:
        self._ends += ends_below(self._disk, self._folder, path)
        self.cuts.append(partial(self._files.remove_folder, path))

    def _note_files_behind(self, queue: ConsumeQueue, last_path: str) -> None:
        """They go for good before the last file is cut: behind a shorter one, no start looks for them."""
        behind = [path for name in self._disk.list(queue.folder) if (path := f"{queue.folder}/{name}") > last_path]
        for path in behind:
            self._note_end(queue, path)
            self.cuts.append(partial(self._files.unlink, path))
        if behind:
            self.cuts.append(partial(self._disk.fsync_dir, queue.folder))

    def _note_end(self, queue: ConsumeQueue, path: str) -> None:
        end = end_in_file(self._disk, path, queue.topic, queue.queue_id, queue.known_min_offset)
        if end is not None:
            self._ends.append(end)
