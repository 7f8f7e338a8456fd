"""The modules that users deploy: there as they were written, or not at all."""

import random

import pytest

from protomq.wire.hashing import crc32c
from protomq_broker import filter_modules
from protomq_broker.filter_modules import FilterModules, ModuleInfo
from protomq_broker.filters.errors import FilterError
from protomq_broker.store.files.disk import Disk
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash


def made(disk=None):
    disk = disk or SimDisk()
    disk.make_folder("/s/config")
    return FilterModules(disk, "/s/config/filters"), disk


def test_modules_come_and_go():
    modules, disk = made()
    assert modules.all() == []
    assert modules.write("late", b"one")
    assert modules.write("a-1", b"two")
    assert modules.write("late", b"three")
    assert modules.read("late") == b"three"
    again = FilterModules(disk, "/s/config/filters")
    assert again.all() == [ModuleInfo("a-1", 3, crc32c(b"two")), ModuleInfo("late", 5, crc32c(b"three"))]
    assert modules.delete("late")
    assert not modules.delete("late")
    with pytest.raises(FilterError, match="the name of the module is empty"):
        modules.read("")
    with pytest.raises(FilterError, match="no module 'late' is deployed"):
        modules.read("late")


@pytest.mark.parametrize("name", ["", "../topics.json", "a/b", "a.b", "ä", "x" * 65, "a\0"])
def test_a_name_never_leads_out_of_the_folder(name):
    modules, _ = made()
    with pytest.raises(FilterError):
        modules.read(name)
    assert not modules.delete(name)


def test_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(filter_modules, "MODULES_MAX", 2)
    modules, _ = made()
    assert modules.write("a", b"1")
    assert modules.write("b", b"1")
    assert not modules.write("c", b"1")
    assert modules.write("a", b"2")


def test_a_module_whose_octets_have_changed_is_shown_as_damaged_and_cannot_be_had():
    modules, disk = made()
    modules.write("late", b"module")
    disk.flip_bit("/s/config/filters/late", 70)
    assert modules.all() == [ModuleInfo("late", 0, 0)]
    with pytest.raises(FilterError):
        modules.read("late")


def test_a_module_that_the_disk_cannot_read_is_not_gone_but_a_copy_replaces_it():
    modules, disk = made()
    modules.write("late", b"module")
    disk.spoil("/s/config/filters/late")
    assert modules.all() == [ModuleInfo("late", 0, 0)]
    for use in (modules.find, modules.read):
        with pytest.raises(OSError, match="/s/config/filters/late"):
            use("late")
    assert modules.swap("late", None, b"of the master")
    assert modules.read("late") == b"of the master"


def test_after_a_power_cut_there_is_the_old_module_or_the_new_one():
    for seed in range(40):
        modules, disk = made()
        if seed % 2:
            modules.write("late", b"old" * 500)
        disk.fail_at(1 + seed % 9, Fault.CRASH)
        try:
            modules.write("late", b"new" * 700)
            disk.crash(random.Random(seed))
        except SimulatedCrash:
            pass
        found = FilterModules(disk.crash(random.Random(seed)), "/s/config/filters").all()
        assert [module.size_bytes for module in found] in ([1500], [2100], [] if not seed % 2 else [1500])


def test_a_data_folder_that_is_named_from_here_takes_its_first_module(tmp_path, monkeypatch):
    """As `protomq standalone` has it: `protomq-data`."""
    monkeypatch.chdir(tmp_path)
    disk = Disk()
    disk.make_folder("protomq-data/config")
    modules = FilterModules(disk, "protomq-data/config/filters")
    assert modules.write("late", b"module")
    assert modules.read("late") == b"module"
