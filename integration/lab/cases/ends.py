"""How streams end when nobody says goodbye: kill -9 of either side, and a host whose plug is pulled.

What plain Linux does is right: who is killed has sent what its send() took, then EOF; RDMA may lose what was in flight,
and then it is ECONNRESET, never a clean EOF with bytes missing. Nobody waits longer than on TCP.
"""

import re
import signal
import time

import trial

group = trial.Group(trial.TWO_HOSTS)
SIZE = 65536
WARM = 20 * SIZE  # so much has been received before anything happens, and a part of it over RDMA
LIFT = 20  # seconds that a lift may take here
SOON = 15  # seconds in which an end must be heard of; on TCP it is at once


class Flow:
    """A sender and a receiver (programs/flow.c) on two hosts."""

    def __init__(self, t, sends="client", listens="server", send="", receive="", port=None, **options):
        self.t, port = t, port or t.port
        hosts = {"server": t.server, "client": t.client}
        self.files = {}
        made = {}
        roles = {"send": sends, "receive": "client" if sends == "server" else "server"}
        options = dict(strict=False) | options
        for role in sorted(roles, key=lambda r: roles[r] != listens):  # who listens comes first
            way = "listen" if roles[role] == listens else "connect"
            self.files[role] = f"/dev/shm/{role}-{port}"
            made[role] = t.start(
                hosts[roles[role]], f"{t.tool('flow')} {role} {way} address={hosts[listens].address} port={port} "
                f"progress={self.files[role]} {send if role == 'send' else receive}",
                listens=port if way == "listen" else None, **options)
        self.sender, self.receiver = made["send"], made["receive"]

    def moved(self, role):
        program = self.sender if role == "send" else self.receiver
        return int(program.host.run(f"od -An -t u8 {self.files[role]}").out or 0)

    def arrives(self, size, seconds=40):
        """Waits until so many bytes have been received."""
        there = trial.wait_until(lambda: self.moved("receive") >= size or self.receiver.process.rc is not None, seconds)
        self.t.expect(f"{size} bytes arrive within {seconds} s", there and self.receiver.process.rc is None,
                      self.moved("receive"))

    def warm(self):
        """Waits until the flow is lifted, and moves."""
        both = (self.sender, self.receiver)
        if self.t.rdma:
            lifted = trial.wait_until(lambda: all(p.lifts_so_far() for p in both), LIFT)
            self.t.expect(f"both ends are on RDMA within {LIFT} s", lifted, [p.log()[-300:] for p in both])
        self.arrives(self.moved("receive") + WARM)

    def end(self, role, limit=SOON):
        """(bytes, how it ended) as the program says."""
        program = self.sender if role == "send" else self.receiver
        began = time.monotonic()
        self.t.finish(program, limit)
        words = re.search(r"^(?:sent|received) (\d+): (\w+)", program.out, re.M)
        self.t.note += f" {role}r: {words.group(2) if words else '?'} after {time.monotonic() - began:.1f} s."
        if not self.t.expect(f"the {role}r says how it ended, and no byte was wrong", words, program.out[-300:]):
            return 0, ""
        return int(words.group(1)), words.group(2)

    def ask_to_hold(self):
        """The sender stops sending and waits; the receiver gets everything."""
        self.sender.process.kill(signal.SIGUSR1)
        self.t.expect("the sender waits", self.sender.process.wait_output("holding", 20), self.sender.out)
        self.arrives(self.moved("send"))

    def finish(self, limit=60):
        """The sender is asked to end, and both ends are orderly and have the same bytes. Returns their number."""
        self.sender.process.kill(signal.SIGUSR1)
        sent, received = self.end("send", limit), self.end("receive", SOON)
        self.t.expect("all sent", sent[1] == "ok", sent)
        self.t.expect("all received, then EOF", received == (sent[0], "eof"), (sent, received))
        self.t.expect_bytes(self.sender, sent=sent[0])
        self.t.expect_bytes(self.receiver, received=sent[0])
        return sent[0]


def sender_is_gone(t, flow, limit=SOON):
    """The receiver has a beginning of what was taken, and knows whether that is all."""
    received, end = flow.end("receive", limit)
    taken = flow.moved("send")
    t.expect("EOF or ECONNRESET", end in ("eof", "ECONNRESET"), end)
    t.expect("no byte that was never sent", received <= taken + SIZE, (received, taken))
    t.expect("no clean EOF with bytes missing", end != "eof" or received >= taken, (received, taken, end))


def both_ways(name):
    """Each case with the connecting end as sender, and with the listening one."""
    def register(body):
        for sends in ("client", "server"):
            group.add(f"{name}.{sends}_sends", lambda t, s=sends: body(t, s), beside=True)
    return register


@both_ways("sender_killed_sending")
def _(t, sends):
    flow = Flow(t, sends, send=f"size={SIZE} pause=20")
    flow.warm()
    flow.sender.process.kill(9)
    sender_is_gone(t, flow)
    t.expect_lifted(flow.receiver)


@both_ways("receiver_killed_sending")
def _(t, sends):
    flow = Flow(t, sends, send=f"size={SIZE} pause=20")
    flow.warm()
    flow.receiver.process.kill(9)
    _, end = flow.end("send")
    t.expect("EPIPE or ECONNRESET", end in ("EPIPE", "ECONNRESET"), end)
    t.expect_lifted(flow.sender)


@both_ways("sender_killed_waiting")
def _(t, sends):
    flow = Flow(t, sends, send=f"size={SIZE} pause=30 hold=1")
    flow.warm()
    flow.ask_to_hold()
    flow.sender.process.kill(9)
    sender_is_gone(t, flow)
    t.expect("nothing is missing", flow.moved("receive") == flow.moved("send"), flow.moved("receive"))
    t.expect_lifted(flow.receiver)


@both_ways("receiver_killed_waiting")
def _(t, sends):
    flow = Flow(t, sends, send=f"size={SIZE} pause=30 hold=1")
    flow.warm()
    flow.ask_to_hold()
    flow.receiver.process.kill(9)
    _, end = flow.end("send")
    t.expect("EOF or ECONNRESET", end in ("eof", "ECONNRESET"), end)
    t.expect_lifted(flow.sender)


def stopped_receiver(t):
    """The receiver sleeps (SIGSTOP) until its sender can send no more."""
    flow = Flow(t, send=f"size={SIZE}", receive="pause=5")
    flow.warm()
    flow.receiver.process.kill(signal.SIGSTOP)
    last = [-1]

    def still():
        before, last[0] = last[0], flow.moved("send")
        return before == last[0]

    t.expect("a full path stops the sender", trial.wait_until(still, 40, 1.0), last)
    return flow


@group.case()
def sender_killed_while_full(t):
    flow = stopped_receiver(t)
    flow.sender.process.kill(9)
    time.sleep(1)
    flow.receiver.process.kill(signal.SIGCONT)
    sender_is_gone(t, flow, 40)
    t.expect_lifted(flow.receiver)


@group.case()
def receiver_killed_while_full(t):
    flow = stopped_receiver(t)
    flow.receiver.process.kill(9)
    _, end = flow.end("send")
    t.expect("EPIPE or ECONNRESET", end in ("EPIPE", "ECONNRESET"), end)
    t.expect_lifted(flow.sender)


@group.case(beside=True)
def exit_without_close(t):
    """A sender that ends right after its last send has sent everything."""
    flow = Flow(t, send=f"size={SIZE} pause=10")
    flow.warm()
    flow.finish()
    t.expect_lifted(flow.sender, flow.receiver)


@group.case(spoils=True)
def power_off(t):
    """Of four flows with a host that goes off: who asked TCP for limits hears of it, the others can be ended."""
    words = f"size={SIZE} pause=60"
    flows = {"limit": Flow(t, "client", send=words + " user_timeout=5000"),
             "alive": Flow(t, "server", "client", send=words + " hold=1", receive="keepalive=1", port=t.port + 1),
             "patient": Flow(t, "client", "client", send=words, port=t.port + 2),
             "waiting": Flow(t, "server", send=words + " hold=1", port=t.port + 3)}
    for flow in flows.values():
        flow.warm()
    flows["alive"].ask_to_hold()
    flows["waiting"].ask_to_hold()
    t.server.power_off()
    off = time.monotonic()
    time.sleep(4)
    for name, program in (("patient", flows["patient"].sender), ("waiting", flows["waiting"].receiver)):
        t.expect(f"{name} has not ended by itself", program.process.rc is None, program.out)
        t.expect(f"{name} can be ended", t.stop(program, 15, 10) == 143, program.process.rc)
    # What was under way is lost for a queue pair, so ECONNRESET is right too. It must not take longer than TCP, which
    # gives up 5 s after the first byte that nobody acknowledged.
    for name, role in (("limit", "send"), ("alive", "receive")):
        _, end = flows[name].end(role, 45)
        t.expect(f"{name}: ETIMEDOUT or ECONNRESET", end in ("ETIMEDOUT", "ECONNRESET"), end)
    t.expect("nobody waits for more than 20 s", time.monotonic() - off < 20, f"{time.monotonic() - off:.0f} s")
    t.expect_lifted(flows["limit"].sender, flows["alive"].receiver)
