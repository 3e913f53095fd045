"""Where one end cannot: no shim, no device, no module, no library. Everything passes on TCP, and the summary says why."""

import trial
from hash_pairs import hash_case
from servers import ask, ended, serve

group = trial.Group(trial.TWO_HOSTS)
BARE = trial.LabKind(rdma_modules=False)
EMPTY = trial.LabKind(rdma_modules=False, rdma_libs=False)
NO_LIBRARIES = trial.LabKind(rdma_libs=False)


def on_tcp(t, *programs, reason=True):
    t.expect_on_tcp(*programs)
    for program in programs:
        if program.shim and reason and t.rdma:
            why = {k: n for k, n in program.reasons().items() if k not in trial.NO_REASON}
            t.expect(f"{program.name} says why", why, program.reasons())
            t.note += f" {program.host.name}: {'; '.join(why)}."


def pair(t, shims, **words):
    on_tcp(t, *hash_case(t, shims=shims, strict=False, path="auto", lift=False, **words), reason=False)


for name, shims in (("server_only", (True, False)), ("client_only", (False, True))):
    group.add(f"{name}.both.epoll_et", lambda t, s=shims: pair(t, s, shape="both", io="epoll_et"), beside=True)
    group.add(f"{name}.half_close.blocking", lambda t, s=shims: pair(t, s, shape="half_close"), beside=True)
    group.add(f"{name}.exchange.py", lambda t, s=shims: pair(t, s, shape="exchange", server="py", io="poll"), beside=True)
    group.add(f"{name}.iperf3", lambda t, s=shims: iperf3(t, s), beside=True)
    group.add(f"{name}.fork_server", lambda t, s=shims: forked(t, s), beside=True)


def iperf3(t, shims):
    server = t.start(t.server, f"iperf3 -s -1 -p {t.port}", shims[0], False, "auto", listens=True)
    client = t.start(t.client, f"iperf3 -c {t.server.address} -p {t.port} --bidir -t 2", shims[1], False, "auto")
    for program in (client, server):
        t.expect(f"{program.name} ends with 0", t.finish(program) == 0, program.process.rc)
    on_tcp(t, server, client, reason=False)


def forked(t, shims):
    server = serve(t, "fork", shim=shims[0], strict=False, path="auto")
    client = ask(t, "conns=4 rounds=40 pause=20", shim=shims[1], strict=False, path="auto")
    ended(t, client)
    t.stop(server)
    on_tcp(t, server, client, reason=False)


def both(t, **words):
    """Both have the shim; what is missing is beneath it."""
    on_tcp(t, *hash_case(t, strict=False, path="auto", lift=False, shape="both", pause=1500, **words))


@group.case()
def deleted_device(t):
    """One host has no device (any more): TCP, and a reason at that end at least."""
    t.client.rdma_delete().wait(30)
    try:
        programs = hash_case(t, strict=False, path="auto", lift=False, shape="both", pause=1500)
        t.expect_on_tcp(*programs)
        on_tcp(t, programs[0])
    finally:
        t.client.rdma_add()


@group.case()
def lifted_again_afterwards(t):
    hash_case(t, shape="both", pause=1500)


for prefix, kind in (("no_modules", BARE), ("no_libraries", NO_LIBRARIES), ("neither", EMPTY)):
    group.add(f"{prefix}.hash_pair", lambda t: both(t), kind=kind, beside=True)
    group.add(f"{prefix}.16_streams", lambda t: both(t, streams=16, io="epoll_lt", total=512 << 10), kind=kind, beside=True)


@group.case(kind=EMPTY, beside=True)
def strict_without_rdma(t):
    """RSOCK_PATH=rdma, strict, and no way to have it: the program is told at once, in one line."""
    # One end: whoever is told first ends the connection of both.
    programs = [serve(t, "threads", path="rdma", strict=False), ask(t, "rounds=40 pause=20", path="rdma")]
    if not t.rdma:
        ended(t, programs[1])
        return
    status = t.finish(programs[1])
    t.expect("the client hears ECONNABORTED", status == 99 and "ECONNABORTED" in programs[1].out, programs[1].out)
    t.expect("a line says why", "rdma" in programs[1].log(), programs[1].log())
