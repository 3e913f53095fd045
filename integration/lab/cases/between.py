"""Something stands between the two ends, and each sees other addresses than the other: TCP, every byte, and a reason.

The translators are the kernel's own (tc's action nat), for the program's connection only: the hosts reach each other
over RDMA all the time, and who asks there gets an answer, about another connection than its own.
"""

import contextlib

import trial
from servers import ask, ended, serve

group = trial.Group(trial.TWO_HOSTS)

OTHER_ADDRESSES = "the peer sees other addresses (NAT or a proxy)"


@contextlib.contextmanager
def translator(host, own, other, port, at):
    """The rest of the world knows `own` of this host as `other`, in connections to this TCP port. at: "dst", it is
    the listener's; "src", the caller's."""
    name = host.device
    theirs, ours = ("dst_port", "src_port") if at == "dst" else ("src_port", "dst_port")
    host.check(f"ip addr add {other}/24 dev {name}; tc qdisc add dev {name} clsact")
    try:
        host.check(f"tc filter add dev {name} ingress protocol ip flower ip_proto tcp dst_ip {other} {theirs} {port} "
                   f"action nat ingress {other}/32 {own}")
        host.check(f"tc filter add dev {name} egress protocol ip flower ip_proto tcp src_ip {own} {ours} {port} "
                   f"action nat egress {own}/32 {other}")
        yield
    finally:
        host.run(f"tc qdisc del dev {name} clsact; ip addr del {other}/24 dev {name}")


def stays_on_tcp(t, server, client, reason):
    total, sessions, broken = ended(t, client)
    t.expect("nothing broke", broken == 0, broken)
    t.expect("the server ends with 0", t.stop(server) == 0, server.process.rc)
    t.expect_on_tcp(client, server)
    t.expect_bytes(client, total, total)
    if t.rdma:
        t.expect(f"the client's reason is {reason!r}", client.reasons().get(reason) == 2, client.reasons())
        t.expect("the server has one too", sum(server.reasons().values()) == 2, server.reasons())
        t.expect("nobody is accused", not client.reasons("refused") and not server.reasons("refused"),
                 (client.reasons("refused"), server.reasons("refused")))
        t.note += f" client: {client.reasons()}; server: {server.reasons()}"


WORDS = "conns=2 rounds=150 size=8192 pause=40"


@group.case(beside=True)
def no_translator(t):
    """The same traffic without one is lifted."""
    server, client = serve(t, "threads", path="auto", strict=False), ask(t, WORDS, path="auto", strict=False)
    ended(t, client)
    t.stop(server)
    t.expect_lifted(client, server, streams=2)


@group.case(beside=True)
def listener_behind_nat(t):
    """A public address leads to the server's own (DNAT)."""
    public = t.server.address.rsplit(".", 1)[0] + ".101"
    with translator(t.server, t.server.address, public, t.port, "dst"):
        server = serve(t, "threads", path="auto", strict=False)
        client = t.start(t.client, f"{t.tool('echo_client')} address={public} port={t.port} {WORDS}", path="auto", strict=False)
        stays_on_tcp(t, server, client, OTHER_ADDRESSES)


@group.case(beside=True)
def caller_behind_nat(t):
    """The caller goes out by another address (SNAT, masquerading)."""
    public = t.client.address.rsplit(".", 1)[0] + ".102"
    with translator(t.client, t.client.address, public, t.port, "src"):
        server, client = serve(t, "threads", path="auto", strict=False), ask(t, WORDS, path="auto", strict=False)
        stays_on_tcp(t, server, client, OTHER_ADDRESSES)


@group.case(beside=True)
def a_relay(t):
    """A program between them, without the shim: two connections, of which neither leads from shim to shim."""
    server = serve(t, "threads", path="auto", strict=False)
    relay = t.start(t.server, f"socat TCP-LISTEN:{t.port + 1},bind={t.server.address},fork,reuseaddr "
                    f"TCP:{t.server.address}:{t.port}", shim=False, listens=t.port + 1)
    client = t.start(t.client, f"{t.tool('echo_client')} address={t.server.address} port={t.port + 1} {WORDS}", path="auto",
                     strict=False)
    stays_on_tcp(t, server, client, "the peer's library is not there or not listening")
    t.stop(relay)
