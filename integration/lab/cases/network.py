"""A network that loses, delays, reorders, parts and comes back; a device that goes; limits that are reached."""

import re
import time

import trial
from ends import SIZE, Flow
from hash_pairs import hash_case
from servers import ask, ended, serve
from worth import COLDEST

group = trial.Group(trial.TWO_HOSTS)
NOBODY = 65534


def rough(t, spec, **words):
    """The same bytes come out, whatever the cable does with packets of either direction."""
    try:
        for host in (t.server, t.client):
            host.netem(spec)
        hash_case(t, strict=False, timeout=110, **words)
    finally:
        for host in (t.server, t.client):
            host.netem_clear()


for name, spec in (("loss", "loss 1%"), ("delay", "delay 20ms"), ("reorder", "delay 5ms reorder 25% 50%")):
    group.add(f"{name}.both", lambda t, s=spec: rough(t, s, shape="both", io="epoll_lt", total=2 << 20, pause=3000))
    group.add(f"{name}.exchange", lambda t, s=spec: rough(t, s, shape="exchange", total=1 << 20, pause=1500))


def interrupted(t, cut, join, sends="client"):
    """A flow that is cut for 2 s in its middle."""
    flow = Flow(t, sends, send=f"size={SIZE} pause=30")
    flow.warm()
    cut()
    time.sleep(2)
    before = flow.moved("receive")
    join()
    flow.arrives(before + 4 * SIZE, 30)
    flow.finish()
    t.expect_lifted(flow.sender, flow.receiver)


@group.case()
def partition(t):
    def cut():
        for host in (t.server, t.client):
            host.netem("loss 100%")

    def join():
        for host in (t.server, t.client):
            host.netem_clear()

    try:
        interrupted(t, cut, join)
    finally:
        join()


@group.case()
def link_down(t):
    """Of the sender's host: rxe's queue pairs go to ERR at the next send."""
    try:
        interrupted(t, t.client.link_down, t.client.link_up)
    finally:
        t.client.link_up()


@group.case()
def link_down_at_receiver(t):
    try:
        interrupted(t, t.server.link_down, t.server.link_up)
    finally:
        t.server.link_up()


@group.case()
def partition_of_echoes(t):
    server = serve(t, "threads", strict=False)
    client = ask(t, "conns=4 seconds=16 size=16384 pause=30", strict=False)
    t.expect_lifts(client, 4, 12)
    try:
        t.client.netem("loss 100%")
        time.sleep(2)
    finally:
        t.client.netem_clear()
    total, sessions, broken = ended(t, client)
    t.expect("no connection broke", (sessions, broken) == (4, 0), (sessions, broken))
    t.stop(server)
    t.expect_lifted(client, server, streams=4)
    t.expect_bytes(client, total, total)


def device_goes(t, host):
    """rdma, tcp, rdma: the device is deleted in mid-transfer, and added again later."""
    flow = Flow(t, send=f"size={SIZE // 2} pause=25")
    flow.warm()
    before = flow.moved("send")
    removal = host.rdma_delete()
    # It ends when the library has closed the device; until then none can be added.
    t.expect("the library lets the device go", removal.wait(20) == 0, removal.errors())
    try:
        gone = flow.moved("send")
        time.sleep(4)
        back = flow.moved("send")
    finally:
        host.rdma_add()
    t.expect("the flow goes on without the device", back - gone > 10 * SIZE, back - gone)
    if t.rdma:
        again = trial.wait_until(lambda: flow.sender.lifts_so_far() > 1 and flow.receiver.lifts_so_far() > 1, 40, 0.5)
        t.expect("both ends are on RDMA again within 40 s", again, flow.sender.log()[-600:])
    flow.arrives(flow.moved("send") + 10 * SIZE)
    flow.finish()
    t.expect_lifted(flow.sender, flow.receiver)
    if t.rdma:
        rdma, tcp = (flow.sender.total("bytes_sent", path) for path in ("rdma", "tcp"))
        down = flow.sender.set_down() + flow.receiver.set_down()
        t.expect("an end says that it set it down", down >= 1, down)
        t.expect("bytes go over TCP meanwhile", tcp >= (back - gone) // 2, (tcp, back - gone))
        # More than can have gone over the first queue pair.
        t.expect("and it is lifted again", rdma > gone + SIZE, f"rdma {rdma}, sent by the removal {before} to {gone}")
        t.note += f" rdma {rdma >> 10} KiB, tcp {tcp >> 10} KiB."


group.add("device_deleted.at_sender", lambda t: device_goes(t, t.client))
group.add("device_deleted.at_receiver", lambda t: device_goes(t, t.server))


@group.case()
def device_deleted_between_streams(t):
    """Some queue pairs wait for a later stream, their connections not quite over: the removal waits for none of them."""
    server = serve(t, "threads", strict=False)
    client = ask(t, "conns=1 again=19 rounds=30 size=16384 pause=15", strict=False)
    t.expect_lifts(client, 4, 20)
    for host in (t.client, t.server):
        removal = host.rdma_delete()
        t.expect("the library lets the device go", removal.wait(20) == 0, removal.errors())
        host.rdma_add()
    total, sessions, broken = ended(t, client)
    t.expect("20 sessions, none broken", (sessions, broken) == (20, 0), (sessions, broken))
    t.stop(server)
    t.expect_bytes(client, total, total)
    t.expect_bytes(server, total, total)


def memlock(t, which):
    """64 KiB may be pinned, as ulimit -l says on many machines. Not as root, whom no limit holds."""
    limit = {"user": NOBODY, "memlock": 65536}
    options = {side: limit if side in which else {} for side in ("server", "client")}
    server = serve(t, "threads", strict=False, path="auto", **options["server"])
    client = ask(t, "conns=2 seconds=7 size=16384 pause=30", strict=False, path="auto", **options["client"])
    total, sessions, broken = ended(t, client)
    t.expect("nothing broke", (sessions, broken) == (2, 0), (sessions, broken))
    t.stop(server)
    t.expect_on_tcp(client, server)
    for program, side in ((client, "client"), (server, "server")):
        if t.rdma and side in which:
            words = " ".join(program.reasons()) + program.log()
            t.expect(f"{program.name}'s reason or log names memlock", re.search(r"memlock|ulimit -l", words),
                     (program.reasons(), program.log()[-500:]))
            t.note += f" {'; '.join(program.reasons())}."


group.add("memlock_too_low.client", lambda t: memlock(t, ("client",)), beside=True)
group.add("memlock_too_low.server", lambda t: memlock(t, ("server",)), beside=True)


@group.case(beside=True)
def another_user(t):
    """No root, no limit: lifted."""
    server = serve(t, "threads", user=NOBODY)
    client = ask(t, "conns=2 seconds=7 pause=30", user=NOBODY)
    ended(t, client)
    t.stop(server)
    t.expect_lifted(client, server, streams=2)


@group.case(beside=True)
def more_streams_than_allowed(t):
    """Eight queue pairs for 24 connections that are busy eight at a time: the coldest give theirs up."""
    env = {"RSOCK_RDMA_STREAMS": "8"}
    server = serve(t, "threads", strict=False, env=env)
    client = ask(t, "conns=24 turns=3 rounds=70 size=8192 pause=60", strict=False, env=env)
    total, sessions, broken = ended(t, client, 100)
    t.expect("no connection broke", (sessions, broken) == (24, 0), (sessions, broken))
    t.stop(server)
    t.expect_bytes(client, total, total)
    t.expect_bytes(server, total, total)
    t.expect_lifted(client, server, streams=9)
    if t.rdma:
        lifted, down = client.total("lifted", "rdma"), client.set_down()
        coldest = sum(program.reasons("set_down_for").get(COLDEST, 0) for program in (client, server))
        # When all are busy in the end, who ends leaves his to another without being set down.
        t.expect("the coldest are set down", 0 < coldest and down >= (lifted - 8) // 2, f"{lifted} lifted, {down} set down")
        t.note += f" {lifted} lifted, {down} set down."
