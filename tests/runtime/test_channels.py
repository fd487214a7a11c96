"""Edges, lines and orders, each by itself: what goes over them, in what order, and what they refuse."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from laminar.errors import NetError
from laminar.ir.net import Actor, Net, Queue
from laminar.runtime.pipeline.agenda import Agenda, agendas, imagined, rings
from laminar.runtime.pipeline.c10d_channels import InOrderReceiver, InOrderSender, PostedReceiver, PostedSender
from laminar.runtime.pipeline.channels import (
    QueueRoute,
    Route,
    from_bytes,
    message_bytes,
    message_layout,
    parse_layout,
    queue_routes,
    straight,
)
from laminar.runtime.pipeline.control_sockets import BYE, DATA, GONE, ControlMessage, TcpConnections
from tests.support.actor_nets import check, edges_of, pipeline, place, random_net
from tests.support.in_process_net import Hall, Sums, first_values


class Done:
    """A work that is over, or will be."""

    def __init__(self, done: bool = True) -> None:
        self.done = threading.Event()
        if done:
            self.done.set()

    def wait(self, timeout: Any = None) -> None:
        """Waiting for what never comes is the failure looked for."""
        assert self.done.wait(100), "this would wait for ever"


class Tagged:
    """One direction between two ranks on Gloo: sends must find their receive posted, and may be short."""

    def __init__(self) -> None:
        self.posted: dict[int, tuple[Tensor, Done]] = {}
        self.sent = 0

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        """Post a receive."""
        assert tag not in self.posted, "posted twice"
        self.posted[tag] = tensors[0], Done(False)
        return self.posted[tag][1]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        """Fill it."""
        assert tag in self.posted, "nobody is ready to receive this"
        to, work = self.posted.pop(tag)
        assert tensors[0].numel() <= to.numel(), "too long a message aborts the receiver"
        to[: tensors[0].numel()] = tensors[0]
        work.done.set()
        self.sent += 1
        return Done()


class InOrder:
    """One direction between two ranks on NCCL: no tags, the n-th receive meets the n-th send, sizes must agree."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.dtype, torch.Size]] = []
        self.flying: deque[Tensor] = deque()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        """Start to send."""
        self.calls.append(("send", tensors[0].dtype, tensors[0].shape))
        self.flying.append(tensors[0].clone())
        return Done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        """Receive what was sent first."""
        self.calls.append(("recv", tensors[0].dtype, tensors[0].shape))
        tensors[0].copy_(self.flying.popleft())
        return Done()


@pytest.mark.parametrize("seed", range(20))
def test_a_send_always_finds_its_receive_posted(seed: int) -> None:
    """On Gloo a send waits for its receiver: none is made before the receive, whatever comes first, none is left."""
    net = next(n for n in random_nets(seed) if any(map(n.crosses, n.queues)))
    groups: dict[Any, Tagged] = {}

    def channels(wire: QueueRoute, src: int, dst: int) -> tuple[Any, Any]:
        group = groups[wire.number, src, dst] = Tagged()
        receiver = PostedReceiver(group, 0, 7, wire, torch.device("cpu"), 1.0)
        sender = PostedSender(group, 0, 7, wire)
        sender.inline_bytes = 64 if seed % 4 == 0 else 0
        return sender, receiver

    runs = {r: Sums(net, r) for p in net.places for r in p.ranks}
    hall = Hall(net, runs.__getitem__, edges_of(net), lambda r: first_values(net, r), channels=channels)
    steps = 0 if seed % 5 == 0 else 2
    hall.play(steps, seed)
    check(net, hall, runs, steps)
    hall.close()
    assert all(not g.posted for g in groups.values())


def random_nets(seed: int) -> Iterator[Net]:
    """Nets that finish."""
    dice = random.Random(seed)
    for _ in range(1000):
        net = random_net(dice)
        if net is not None:
            yield net


@pytest.mark.parametrize("seed", range(10))
def test_receives_follow_the_order_of_sends_where_there_are_no_tags(seed: int) -> None:
    """NCCL matches the n-th receive with the n-th send of a pair, across all edges between these two ranks."""
    net = next(n for n in random_nets(seed) if sum(map(n.crosses, n.queues)) > 1)
    groups: dict[Any, InOrder] = {}

    def channels(wire: QueueRoute, src: int, dst: int) -> tuple[Any, Any]:
        group = groups.setdefault((src, dst), InOrder())
        return InOrderSender(group, 1), InOrderReceiver(group, 0, torch.device("cpu"))

    runs = {r: Sums(net, r) for p in net.places for r in p.ranks}
    hall = Hall(net, runs.__getitem__, edges_of(net), lambda r: first_values(net, r), channels=channels)
    hall.play(2)
    check(net, hall, runs, 2)
    hall.close()
    for group in groups.values():
        sends = [c[1:] for c in group.calls if c[0] == "send"]
        assert sends == [c[1:] for c in group.calls if c[0] == "recv"]
        assert sends
        assert not group.flying


def test_a_layout_is_the_same_on_both_sides() -> None:
    """The reader knows nothing but what the announcement says."""
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(True), torch.empty(0, 4), torch.arange(3, dtype=torch.int8)]
    layout = message_layout(tensors)
    assert layout.nbytes == 3 * 64
    assert parse_layout(layout.code) == layout
    for a, b in zip(from_bytes(parse_layout(layout.code), message_bytes(layout, tensors)), tensors, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert from_bytes(message_layout([]), b"") == []
    grown = torch.ones(2, requires_grad=True)
    assert not from_bytes(message_layout([grown]), message_bytes(message_layout([grown]), [grown]))[0].requires_grad


def two_places(bytes_: int = 64) -> Net:
    """One queue from two ranks to one."""
    actors = (Actor("a", "forward", 0), Actor("b", "forward", 1))
    queue = Queue("q", "a", ("b",), 1, bytes=bytes_)
    return Net((place(0, 1), place(2)), actors, (queue,), ((("a", 0),), (("b", 0),)))


def test_edges_that_make_no_sense_are_refused() -> None:
    """By name, before anything is connected."""
    net = two_places()
    with pytest.raises(NetError, match="queue q leads from 2 ranks to 1"):
        queue_routes(net)
    with pytest.raises(NetError, match="gives nothing to ranks"):
        queue_routes(net, {("q", 1): Route((), 64)})
    with pytest.raises(NetError, match="a pair twice"):
        queue_routes(net, {("q", 1): Route(((0, 2), (0, 2)), 64)})
    with pytest.raises(NetError, match="not from"):
        queue_routes(net, {("q", 1): Route(((2, 2),), 64)})
    with pytest.raises(NetError, match="how large"):
        queue_routes(net, {("q", 1): Route(((0, 2),), 0)})
    with pytest.raises(NetError, match="not in the net"):
        queue_routes(net, {("q", 1): Route(((0, 2),), 64), ("q", 0): Route((), 64)})
    even = pipeline([place(0, 1), place(2, 3)], 1)
    assert straight(even, next(q for q in even.queues if q.name == "act0"), 1).pairs == ((0, 2), (1, 3))


@pytest.fixture
def lines() -> Iterator[tuple[TcpConnections, TcpConnections]]:
    """Both ends of a line."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        a = socket.create_connection(door.getsockname())
        b, _ = door.accept()
    left, right = TcpConnections(0, {1: a}), TcpConnections(1, {0: b})
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_whole_and_in_order(lines: tuple[TcpConnections, TcpConnections]) -> None:
    """Long tails, many at once, more than the system takes: nobody blocks, nothing is lost."""
    left, right = lines
    sent = [(DATA, k % 7, k, -k, bytes([k % 256]) * (k * 997 % 70_000)) for k in range(400)]
    for kind, which, a, b, tail in sent:
        left.post(1, kind, which, a, b, tail)
    began = time.monotonic()
    left.flush()
    got: list[ControlMessage] = []
    while len(got) < len(sent):
        left.flush()
        got += right.receive(0.01)
        assert time.monotonic() - began < 200
    assert [m[1:] for m in got] == sent


def test_an_ended_line_is_heard_once_after_what_was_said(lines: tuple[TcpConnections, TcpConnections]) -> None:
    """A goodbye on its way is not lost by the end."""
    left, right = lines
    left.post(1, BYE, 0, 2)
    left.close()
    heard: list[ControlMessage] = []
    while not heard or heard[-1].kind != GONE:
        heard += right.receive(1.0)
    assert [m.kind for m in heard] == [BYE, GONE]
    right.post(0, DATA)
    assert right.receive(0.01) == []


def test_waiting_ends_with_the_first_message(lines: tuple[TcpConnections, TcpConnections]) -> None:
    """A rank that waits wakes up for whatever comes, from any thread of another."""
    left, right = lines

    def later() -> None:
        left.post(1, DATA, 0, 5)
        left.flush()

    timer = threading.Timer(0.1, later)
    timer.start()
    assert [m.a for m in right.receive(30.0)] == [5]
    timer.join()


def test_a_window_takes_the_earliest_that_is_ready() -> None:
    """Not beyond the window, and never one firing of an actor before another of it."""
    order = (("F", 0), ("F", 1), ("B", 0), ("B", 1))
    able: set[str] = {"B"}
    assert Agenda(0, order, 0).next(able.__contains__) is None
    assert Agenda(0, order, 1).next(able.__contains__) is None
    wide = Agenda(0, order, 2)
    assert wide.next(able.__contains__) == 2
    wide.fired(2)
    assert wide.next(able.__contains__) is None, "B.1 is three places ahead"
    able.add("F")
    for at in (0, 1, 3):
        assert wide.next(able.__contains__) == at
        wide.fired(at)
    assert (wide.step, wide.choices) == (1, 4)


def test_a_follower_does_what_it_is_told_in_that_order() -> None:
    """Choices carry numbers, so one that overtakes another waits."""
    follower = Agenda(0, (("F", 0), ("B", 0)), None, leader=3)
    follower.told(1, 0)
    assert follower.next(lambda name: True) is None
    follower.told(0, 1)
    assert follower.next(lambda name: name == "F") is None, "B.0 was chosen, though F is ready"
    assert follower.next(lambda name: True) == 1
    follower.fired(1)
    assert follower.next(lambda name: True) == 0


def test_places_joined_in_more_than_one_way_share_an_order() -> None:
    """A rank in two places is no harm; two ranks in two places are, and so is a ring of three."""

    def net_on(*places_: tuple[int, ...]) -> Net:
        actors = tuple(Actor(f"a{i}", "forward", i) for i in range(len(places_)))
        orders = tuple(((a.name, 0),) for a in actors)
        return Net(tuple(place(*p) for p in places_), actors, (), orders)

    assert rings(net_on((0, 1), (1, 2), (3,), (3,))) == []
    assert rings(net_on((0, 1), (2,), (1, 0))) == [{0, 2}]
    assert rings(net_on((0, 1), (1, 2), (2, 0), (4, 5))) == [{0, 1, 2}]
    shared = agendas(net_on((0, 1), (1, 2), (2, 0)), 2)
    assert [a.order for a in shared] == [(("a1", 0), ("a2", 0))]


def test_orders_that_registers_cannot_keep_are_refused() -> None:
    """An imagined run that comes to a halt says where."""
    actors = (Actor("a", "forward", 0, 2), Actor("b", "forward", 0, 2))
    queue = Queue("q", "a", ("b",), 1, bytes=64)
    stuck = Net((place(0),), actors, (queue,), ((("a", 0), ("a", 1), ("b", 0), ("b", 1)),))
    with pytest.raises(NetError, match=r"a\.1 at place 0"):
        list(imagined(stuck))
