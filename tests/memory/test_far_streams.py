"""The stream lane's orders to the device, written down by streams that record what they are asked."""

import weakref

import pytest
import torch

from planish.memory import lanes
from planish.memory.lanes import StreamLane, Transfer
from planish.memory.slab import Region


class Recorded:
    """A device: the orders it got, in order, and how far it is."""

    def __init__(self):
        self.orders = []
        self.past = set()
        self.current = FakeStream(self, "compute")


class FakeEvent:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def query(self):
        return self.name in self.device.past


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name, self.count = device, name, 0

    def wait_event(self, event):
        self.device.orders.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        self.count += 1
        self.device.orders.append(f"{self.name} records {self.name}-{self.count}")
        return FakeEvent(self.device, f"{self.name}-{self.count}")

    def synchronize(self):
        self.device.orders.append(f"the host waits for {self.name}")

    def __enter__(self):
        self.device.orders.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.device.orders.append(f"leave {self.name}")


class Medium:
    capacity_bytes = 4096

    def __init__(self, device):
        self.device = device

    def store(self, offset, source):
        self.device.orders.append("store")

    def load(self, offset, target):
        self.device.orders.append("load")


@pytest.fixture
def device(monkeypatch):
    device = Recorded()
    names = iter(("out", "in"))
    monkeypatch.setattr(lanes.torch, "Stream", lambda _: FakeStream(device, next(names)))
    monkeypatch.setattr(lanes.torch.accelerator, "current_stream", lambda _: device.current)
    return device


def transfer(device, tensor, *, outward, ready=None):
    return Transfer(medium=Medium(device), region=Region(0, 4096), tensor=tensor, outward=outward, ready=ready)


def test_a_copy_comes_after_the_computation_so_far_and_after_its_slot_s_last_reader(device):
    outward, inward = StreamLane(torch.device("cuda")), StreamLane(torch.device("cuda"))
    ready = device.current.record_event()
    read = inward.submit(transfer(device, torch.zeros(4), outward=False, ready=ready))
    del device.orders[:]
    later = device.current.record_event()
    outward.submit(transfer(device, torch.zeros(4), outward=True, ready=later), after=[read]).wait()
    assert device.orders == [
        "compute records compute-2",
        "out waits for compute-2",
        "out waits for in-1",
        "enter out",
        "store",
        "leave out",
        "out records out-1",
        "compute waits for out-1",
    ]


def test_waiting_orders_the_stream_that_is_current_then(device):
    lane = StreamLane(torch.device("cuda"))
    event = lane.submit(transfer(device, torch.zeros(4), outward=True))
    device.current = FakeStream(device, "another")
    event.wait()
    assert device.orders[-1] == "another waits for out-1"


def test_a_tensor_is_held_until_someone_waits_or_the_device_is_past_it(device):
    lane = StreamLane(torch.device("cuda"))
    waited, abandoned = torch.zeros(4), torch.zeros(4)
    alive = [weakref.ref(waited.untyped_storage()), weakref.ref(abandoned.untyped_storage())]
    event = lane.submit(transfer(device, waited, outward=True))
    lane.submit(transfer(device, abandoned, outward=True))
    del waited, abandoned
    assert [each() is not None for each in alive] == [True, True]
    event.wait()
    assert [each() is not None for each in alive] == [False, True]
    lane.submit(transfer(device, torch.zeros(4), outward=True)).wait()
    assert alive[1]() is not None
    device.past.add("out-2")
    lane.submit(transfer(device, torch.zeros(4), outward=True)).wait()
    assert alive[1]() is None


def test_closing_waits_for_the_device(device):
    lane = StreamLane(torch.device("cuda"))
    lane.submit(transfer(device, torch.zeros(4), outward=True))
    lane.close()
    assert device.orders[-1] == "the host waits for out"
