"""Bounds of time and of descriptors: close with SO_LINGER, close and exit of a process that has no descriptor left or no
other thread, and strangers who want descriptors of ours.

What plain Linux does is right (run_lab --path tcp bounds): every byte, then the end, at once; a reset where SO_LINGER asks
for one.
"""

import re
import signal
import sys
import time

import hostile
import trial

group = trial.Group(trial.TWO_HOSTS)
LIFT = 20
TOTAL = 4 << 20


class Ending:
    """A sender that ends in some way, and a receiver (programs/closer.c)."""

    def __init__(self, t, send, receive="", total=TOTAL):
        self.t, self.total = t, total
        where = f"address={t.server.address} port={t.port}"
        self.receiver = t.start(t.server, f"{t.tool('closer')} receive {where} {receive}", strict=False,
                                listens=True)
        self.sender = t.start(t.client, f"{t.tool('closer')} send {where} total={total} {send}", strict=False)
        for program in (self.receiver, self.sender):
            t.expect("the stream is warm", program.process.wait_output("warm", 60), program.out)
        if t.rdma:
            lifted = trial.wait_until(lambda: all(p.lifts_so_far() for p in (self.receiver, self.sender)), LIFT)
            t.expect("both ends are on RDMA", lifted, [p.log()[-300:] for p in (self.receiver, self.sender)])

    def go(self, program):
        program.process.kill(signal.SIGUSR1)

    def closed_after(self):
        """Milliseconds that close() took."""
        self.t.finish(self.sender, 60)
        words = re.search(r"^close 0 after (\d+) ms", self.sender.out, re.M)
        self.t.expect("close says 0", words, self.sender.out[-300:])
        took = int(words.group(1)) if words else -1
        self.t.note += f" close: {took} ms."
        return took

    def received(self):
        self.t.finish(self.receiver, 60)
        words = re.search(r"^received (\d+): (\w+)", self.receiver.out, re.M)
        self.t.expect("the receiver says how it ended", words, self.receiver.out[-300:])
        return (int(words.group(1)), words.group(2)) if words else (0, "")

    def expect_all(self):
        seen = self.received()
        self.t.expect("every byte, then EOF", seen == (self.total, "eof"), seen)
        self.t.expect_lifted(self.receiver)


@group.case()
def linger_waits_for_the_bytes(t):
    """The network is slow: close returns when the bytes are there, not before."""
    e = Ending(t, "linger=30 size=65536")
    t.client.netem("delay 400ms")
    e.go(e.sender)
    took = e.closed_after()
    t.client.netem_clear()
    t.expect("close waited for a turn of the network", 350 <= took < 20000, took)
    e.expect_all()


@group.case()
def linger_ends_with_its_time(t):
    """Nothing comes through: close returns after its time, and the bytes go on without the program."""
    e = Ending(t, "linger=2", total=16384)
    t.client.netem("loss 100%")
    e.go(e.sender)
    # A process that has nothing else to do ends a second later, and waits for its bytes then (exit).
    t.expect("it closes", e.sender.process.wait_output("close", 30), e.sender.out)
    t.client.netem_clear()
    took = e.closed_after()
    t.expect("close took its two seconds", 1900 <= took < 5000, took)
    seen = e.received()
    t.expect("every byte and EOF, or a reset", seen == (e.total, "eof") or seen[1] == "ECONNRESET", seen)


@group.case(beside=True)
def linger_of_nothing_resets(t):
    e = Ending(t, "linger=0", receive="stop=1", total=16384)
    e.go(e.sender)
    took = e.closed_after()
    t.expect("close does not wait", took < 2000, took)
    e.go(e.receiver)
    got, end = e.received()
    t.expect("a reset", end == "ECONNRESET", (got, end))


def close_without_a_descriptor(t, how):
    e = Ending(t, f"how={how}")
    e.go(e.sender)
    e.closed_after()
    e.expect_all()


for way in ("full", "lowered"):
    group.add(f"close_without_a_descriptor.{way}", lambda t, way=way: close_without_a_descriptor(t, way), beside=True)


@group.case()
def last_thread_returns(t):
    """After pthread_exit of the first thread the process ends with the last one, and no later than that."""
    e = Ending(t, "how=last_thread", total=65536)
    e.go(e.sender)
    t.expect("it sends", e.sender.process.wait_output("sent", 30), e.sender.out)
    began = time.monotonic()
    status = t.finish(e.sender, 20)
    took = time.monotonic() - began
    t.expect("the process ends with 0, at once", status == 0 and took < 1.8, (status, took))
    t.note += f" {took:.1f} s."
    e.expect_all()


@group.case()
def two_thousand_lines(t):
    """A stranger opens line after line and proves himself (there is no key): the program keeps its descriptors, and streams
    of others are lifted all the same."""
    server, client = hostile.busy(t)
    port = hostile.line_port(t, server, client) if t.rdma else 0
    if port:
        hello = (hostile.greeting() + hostile.proof()).hex()
        holder = ("import resource,socket,time\n"
                  "resource.setrlimit(resource.RLIMIT_NOFILE,(4096,4096))\n"
                  "kept=[]\n"
                  "for i in range(2000):\n"
                  "  s=socket.create_connection((%r,%d),10)\n"
                  "  s.sendall(bytes.fromhex(%r))\n"
                  "  s.recv(4096)\n"
                  "  kept.append(s)\n"
                  "print('held',flush=True)\n"
                  "time.sleep(600)\n" % (t.server.address, port, hello))
        stranger = t.start(t.client, f"{sys.executable} -c \"{holder}\"", shim=False)
        t.expect("two thousand lines are opened", stranger.process.wait_output("held", 200), stranger.err[-300:])
        files = int(t.server.check(f"ls /proc/{server.process.pid}/fd | wc -l"))
        t.expect("the server has few descriptors in use", files < 300, files)
        t.note += f" {files} descriptors."
        second = hostile.ask(t, "conns=2 seconds=6 pause=30")
        hostile.ended(t, second)
        t.expect_lifted(second, streams=2)
        t.stop(stranger)
    hostile.unharmed(t, server, client)
    if t.rdma:
        refused = server.reasons("refused")
        t.expect("the server counts them", refused.get("too many lines from other hosts", 0) > 1500, refused)
