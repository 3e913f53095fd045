"""Servers of all shapes, many connections at once, a server that goes and comes back."""

import re
import signal

import trial

group = trial.Group(trial.LabKind(guests=False))


def ended(t, client, timeout=90, enough=False):
    """(bytes, sessions, broken) of an echo client, which checks its bytes itself. enough: it is asked to end."""
    if enough:
        client.process.kill(signal.SIGUSR1)
    status = t.finish(client, timeout)
    words = re.search(r"^ok bytes=(\d+) sessions=(\d+) broken=(\d+)", client.out, re.M)
    t.expect("the client ends with ok", status == 0 and words, (status, client.out[-300:]))
    return tuple(map(int, words.groups())) if words else (0, 0, 0)


def serve(t, shape, words="", **options):
    return t.start(t.server, f"{t.tool('echo_server')} {shape} address={t.server.address} port={t.port} {words}",
                   listens=True, **options)


def ask(t, words, **options):
    return t.start(t.client, f"{t.tool('echo_client')} address={t.server.address} port={t.port} {words}", **options)


def echo(t, shape, conns=8, words="seconds=8 size=16384 pause=30"):
    server, client = serve(t, shape), ask(t, f"conns={conns} {words}")
    total, sessions, broken = ended(t, client)
    t.expect(f"{conns} sessions, none broken", (sessions, broken) == (conns, 0), (sessions, broken))
    if shape == "fork":  # SIGTERM goes to children too: those that are about to end shall do it on their own
        t.server.run(f"while pgrep -P {server.process.pid}; do sleep 0.1; done", 20)
    t.expect("the server ends with 0", t.stop(server) == 0, server.process.rc)
    t.expect_lifted(client, server, streams=conns)
    t.expect_bytes(client, total, total)
    t.expect_bytes(server, total, total)
    return server, client


@group.case(beside=True)
def fork_after_accept(t):
    server, _ = echo(t, "fork")
    lines = server.summary()
    t.expect("each child writes a line of its own", len(lines) >= 8, len(lines))


@group.case(beside=True)
def preforked(t):
    echo(t, "prefork")


@group.case(beside=True)
def threaded(t):
    echo(t, "threads")


@group.case(beside=True)
def reuseport_workers(t):
    server, _ = echo(t, "reuseport", conns=12)
    busy = sum(1 for line in server.summary() if line["streams"])
    t.note += f" by {busy} workers"


@group.case(beside=True)
def reuseport_two_clients(t):
    """Two client processes: each must find the right worker of four."""
    server = serve(t, "reuseport")
    clients = [ask(t, "conns=6 seconds=10 pause=30") for _ in range(2)]
    for client in clients:
        _, sessions, broken = ended(t, client)
        t.expect("6 sessions, none broken", (sessions, broken) == (6, 0), (sessions, broken))
    t.stop(server)
    t.expect_lifted(*clients, streams=6)
    t.expect_lifted(server, streams=12)


@group.case()
def connections_200(t):
    # No strict mode: one processor makes 200 queue pairs in its own time.
    server = serve(t, "threads", strict=False)
    client = ask(t, "conns=200 seconds=20 size=4096 pause=400", strict=False)
    total, sessions, broken = ended(t, client, 150)
    t.expect("200 sessions, none broken", (sessions, broken) == (200, 0), (sessions, broken))
    t.expect("the server ends with 0", t.stop(server) == 0, server.process.rc)
    # All of them are hot at once; what the device has room for is lifted, and every byte counts.
    t.expect_lifted(client, server, streams=100)
    t.expect_bytes(client, total, total)
    t.expect_bytes(server, total, total)
    t.note += f" {client.total('lifted', 'rdma')} lifted"


@group.case(beside=True)
def successive_connections(t):
    """20, one after another, between two processes: later ones take the queue pairs of former ones."""
    server = serve(t, "threads", strict=False)
    client = ask(t, "conns=1 again=19 rounds=40 size=16384 pause=15", strict=False)
    total, sessions, broken = ended(t, client)
    t.expect("20 sessions, none broken", (sessions, broken) == (20, 0), (sessions, broken))
    t.stop(server)
    t.expect_lifted(client, server, streams=20)
    t.expect_bytes(client, total, total)
    t.expect_bytes(server, total, total)
    for program in (client, server) if t.rdma else ():
        made, reused = (program.total("queue_pairs", key) for key in ("made", "reused"))
        t.expect(f"{program.name} makes few queue pairs", made <= 6 and made + reused >= 20, (made, reused))
        t.note += f" {made} made, {reused} used again"


@group.case(beside=True)
def short_connections(t):
    """Connections below the threshold stay what they are."""
    server = serve(t, "threads")
    client = ask(t, "conns=50 rounds=1 size=512")
    ended(t, client)
    t.stop(server)
    t.expect_on_tcp(client, server)


def came_back(t, sessions, broken):
    """Twice, who reconnects in the moment in which the old server still listens and already ends."""
    t.expect("each connection broke, and came back", 4 <= broken <= 8 and sessions == 4 + broken, (sessions, broken))


@group.case()
def server_restarts(t):
    """The client reconnects until its time is over; both servers lift what it sends."""
    first = serve(t, "threads", strict=False)
    client = ask(t, "conns=4 seconds=100 size=16384 pause=30", strict=False)
    t.expect_lifts(client, 4, 12)
    t.expect("the first server ends with 0", t.stop(first) == 0, first.process.rc)
    second = serve(t, "threads", strict=False)
    t.expect_lifts(client, 8, 20)
    total, sessions, broken = ended(t, client, enough=True)
    t.stop(second)
    came_back(t, sessions, broken)
    t.expect_lifted(client, streams=8)
    t.expect_lifted(first, second, streams=4)


@group.case()
def server_killed_and_restarted(t):
    first = serve(t, "threads", strict=False)
    client = ask(t, "conns=4 seconds=100 size=16384 pause=30", strict=False)
    t.expect_lifts(client, 4, 12)
    t.stop(first, 9)
    second = serve(t, "threads", strict=False)
    t.expect_lifts(client, 8, 20)
    total, sessions, broken = ended(t, client, enough=True)
    t.stop(second)
    came_back(t, sessions, broken)
    t.expect_lifted(client, streams=8)
    t.expect_lifted(second, streams=4)
