"""Filters are compiled once, elsewhere, and kept."""

import threading

from protomq_broker.filters import filter_book
from protomq_broker.filters.errors import FilterError
from protomq_broker.filters.filter_book import FilterBook, FilterKey, Refused


class Compiler:
    """Notes what it is asked for; waits for `go`."""

    def __init__(self):
        self.asked = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, key):
        self.go.wait(30)
        self.asked.append(key.text)
        if key.text == "bad":
            raise FilterError("bad")
        return f"filter {key.text}"


def prepared(book, text):
    done, found = threading.Event(), []

    def take(made):
        found.append(made)
        done.set()

    assert book.prepare(FilterKey("sql", text), take)
    assert done.wait(30)
    return found[0]


def kept(book, text, language="sql"):
    """What is found, as anything that can be compared."""
    made: object = book.find(FilterKey(language, text))
    return made


def test_a_filter_is_compiled_once_and_found_from_then_on():
    compiler = Compiler()
    book = FilterBook(compiler)
    assert kept(book, "a") is None
    assert prepared(book, "a") == "filter a"
    assert kept(book, "a") == "filter a"
    assert kept(book, "a", "cel") is None
    book.forget(FilterKey("sql", "a"))
    assert book.find(FilterKey("sql", "a")) is None
    book.close()


def test_what_is_wrong_is_kept_too():
    book = FilterBook(Compiler())
    made = prepared(book, "bad")
    assert isinstance(made, Refused)
    assert book.find(FilterKey("sql", "bad")) is made
    book.close()


def test_who_asks_for_the_same_waits_for_one_compilation():
    compiler = Compiler()
    compiler.go.clear()
    book = FilterBook(compiler)
    done = threading.Semaphore(0)
    for _ in range(3):
        assert book.prepare(FilterKey("sql", "a"), lambda made: done.release())
    compiler.go.set()
    assert all(done.acquire(timeout=30) for _ in range(3))
    assert compiler.asked == ["a"]
    book.close()


def test_both_numbers_are_bounded(monkeypatch):
    monkeypatch.setattr(filter_book, "KEPT_MAX", 2)
    monkeypatch.setattr(filter_book, "WAITING_MAX", 1)
    compiler = Compiler()
    book = FilterBook(compiler)
    for text in "abc":
        prepared(book, text)
    found = [kept(book, text) for text in "abc"]
    assert found == [None, "filter b", "filter c"]
    compiler.go.clear()
    assert book.prepare(FilterKey("sql", "d"), lambda made: None)
    assert not book.prepare(FilterKey("sql", "e"), lambda made: None)
    compiler.go.set()
    book.close()


def test_what_is_replaced_while_it_is_compiled_is_compiled_again():
    texts, began, go = ["old"], threading.Event(), threading.Event()

    def compile_(key):
        text = texts[0]
        began.set()
        assert go.wait(30)
        return text

    book = FilterBook(compile_)
    done, found = threading.Event(), []

    def take(made):
        found.append(made)
        done.set()

    key = FilterKey("module", "m")
    assert book.prepare(key, take)
    assert began.wait(30)
    texts[0] = "new"
    book.forget(key)
    go.set()
    assert done.wait(30)
    assert found == ["new"]
    assert kept(book, "m", "module") == "new"
    book.close()


def test_a_disk_that_cannot_read_is_asked_again():
    failures = [OSError(5, "the disk cannot read it")]

    def compile_(key):
        if failures:
            raise failures.pop()
        return "module"

    book = FilterBook(compile_)
    made = prepared(book, "m")
    assert isinstance(made, Refused)
    assert isinstance(made.error, OSError)
    assert kept(book, "m") is None
    assert prepared(book, "m") == "module"
    book.close()
