"""Which streams get a queue pair, and which keep it: crowds, idle streams, the coldest for a hotter one, strict programs."""

import re
import signal
import time

import trial
from servers import ask, ended, serve

group = trial.Group(trial.TWO_HOSTS)

IDLE = "idle"
COLDEST = "a busier stream needed the queue pair"


def all_exact(t, server, client, sessions, timeout=120, enough=False):
    total, seen, broken = ended(t, client, timeout, enough)
    t.expect(f"{sessions} sessions, none broken", (seen, broken) == (sessions, 0), (seen, broken))
    t.expect("the server ends with 0", t.stop(server) == 0, server.process.rc)
    t.expect_bytes(client, total, total)
    t.expect_bytes(server, total, total)


@group.case()
def at_once_200(t):
    """All are hot at the same moment. One processor of a guest makes 200 queue pairs in its own time: as long as it takes,
    but none is left over. No strict mode: it gives each stream five seconds from its own threshold on."""
    server = serve(t, "threads", strict=False)
    client = ask(t, "conns=200 seconds=600 size=4096 pause=1000", strict=False)
    t.expect_lifts(client, 200, 100)
    t.expect_lifts(server, 200, 20)
    all_exact(t, server, client, 200, enough=True)
    t.expect_lifted(client, server, streams=200)


@group.case()
def in_turns_80(t):
    """Eight at a time, each within strict mode's five seconds; then all 80 together."""
    server = serve(t, "threads")
    client = ask(t, "conns=80 turns=10 rounds=24 size=4096 pause=100")
    all_exact(t, server, client, 80)
    t.expect_lifted(client, server, streams=80)


def back_again(program):
    return program.log().count(": on RDMA")


@group.case(beside=True)
def idle_set_down(t):
    """Two streams, active in turn and then both: the first is idle in the second's turn, is set down, and lifted again."""
    env = {"RSOCK_RDMA_IDLE_S": "2"}
    server = serve(t, "threads", env=env)
    client = ask(t, "conns=2 turns=2 rounds=70 size=8192 pause=100", env=env)
    all_exact(t, server, client, 2)
    t.expect_lifted(client, server, streams=2)
    if t.rdma:
        down = [program.reasons("set_down_for").get(IDLE, 0) for program in (client, server)]
        t.expect("the idle one is set down, by who looks first", sum(down) >= 1, (client.summary(), server.summary()))
        for program in (client, server):
            t.expect("nothing else is", set(program.reasons("set_down_for")) <= {IDLE}, program.reasons("set_down_for"))
            t.expect("the idle one is lifted again", back_again(program) >= 3, program.log())
        t.note += f" idle {down}"


@group.case(beside=True)
def busy_is_not_idle(t):
    """A byte now and then keeps the queue pair: pauses of less than the idle time."""
    env = {"RSOCK_RDMA_IDLE_S": "4", "RSOCK_LIFT_CALLS": "4"}
    server = serve(t, "threads", env=env)
    client = ask(t, "conns=2 rounds=20 size=4096 pause=700", env=env)
    all_exact(t, server, client, 2)
    t.expect_lifted(client, server, streams=2)
    if t.rdma:
        t.expect("none is set down", not client.set_down() and not server.set_down(), (client.summary(), server.summary()))


@group.case(beside=True)
def the_hotter_takes_it(t):
    """Two queue pairs and three streams, active in turn: the third takes one of an idle stream."""
    env = {"RSOCK_RDMA_STREAMS": "2"}
    server = serve(t, "threads", env=env, strict=False)
    client = ask(t, "conns=3 turns=3 rounds=60 size=8192 pause=100", env=env, strict=False)
    all_exact(t, server, client, 3)
    t.expect_lifted(client, server, streams=3)
    if t.rdma:
        down = [program.reasons("set_down_for").get(COLDEST, 0) for program in (client, server)]
        t.expect("the coldest goes", sum(down) >= 1, (client.summary(), server.summary()))
        t.note += f" coldest {down}"


# --- strict mode for who only receives -----------------------------------------------------------------------------

def flow(t, receiver, sender, **sends):
    """One way, until it is stopped. The programs (receiver, sender); who listens, the server, is there first."""
    def start(host, words, more):
        listens = host is t.server
        role, *rest = words.split(" ", 1)
        return t.start(host, f"{t.tool('flow')} {role} {'listen' if listens else 'connect'} address={t.server.address} "
                       f"port={t.port} {' '.join(rest)}", listens=listens, **more)
    into, out = (receiver, "receive", {}), (sender, "send size=16384 pause=20", sends)
    first, second = (into, out) if receiver is t.server else (out, into)
    programs = {host: start(host, words, more) for host, words, more in (first, second)}
    return programs[receiver], programs[sender]


def receives_only(t, receiver, sender):
    into, out = flow(t, receiver, sender)
    t.expect_lifts(into, 1, 12)
    time.sleep(8)  # past the strict limit of both
    out.process.kill(signal.SIGUSR1)
    t.finish(out)
    t.finish(into)
    sent, got = (re.search(r"(\d+): (\w+)", program.out) for program in (out, into))
    t.expect("both ends are orderly", sent and got and (sent[2], got[2]) == ("ok", "eof"), (out.out, into.out))
    t.expect("every byte", sent and got and sent[1] == got[1], (out.out, into.out))
    t.expect_lifted(into, out)
    if t.rdma and into.summary():
        t.expect("it only received", into.summary()[0]["bytes_sent"] == {"tcp": 0, "shm": 0, "rdma": 0}, into.summary())


@group.case(beside=True)
def strict_receiver_that_listens(t):
    receives_only(t, t.server, t.client)


@group.case(beside=True)
def strict_receiver_that_connects(t):
    receives_only(t, t.client, t.server)


@group.case(beside=True)
def strict_receiver_without_a_peer(t):
    """Nobody there lifts: the receiver's next call fails after five seconds, with one line that says why."""
    into, out = flow(t, t.server, t.client, shim=False)
    if not t.rdma:
        time.sleep(3)
        out.process.kill(signal.SIGUSR1)
    t.finish(into)
    t.finish(out)
    end = re.search(r"received (\d+): (\w+)", into.out)
    wanted = "ECONNABORTED" if t.rdma else "eof"
    t.expect(f"the receiver's call fails with {wanted}", end and end[2] == wanted, into.out)
    if t.rdma:
        lines = [line for line in into.log().splitlines() if "RSOCK_STRICT" in line]
        t.expect("one line names the reason", len(lines) == 1 and "is not lifted: the peer" in lines[0], into.log())
