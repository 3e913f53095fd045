"""Strangers: at the RDMA port, at the line's port, without the key, on somebody else's port. They are refused, counted,
and harm nobody: streams of others are lifted beside them, and TCP goes on.

Messages are built here from the tables of core/wire/PROTOCOL.md, not by the library's own code.
"""

import os
import socket
import struct
import sys
import time

import trial
from servers import ask, ended, serve

group = trial.Group(trial.TWO_HOSTS)
NOBODY = 65534
VERSION, FIND, FOUND, JOIN = 1, 1, 2, 3
NOT_MINE, OK = 2, 0


def mapped(address):
    return b"\0" * 10 + b"\xff\xff" + socket.inet_aton(address)


def find(caller, callee, nonce=7, kind=FIND, version=VERSION, tail=b"\0" * 6):
    return struct.pack("<4sBBHH16s16sQ", b"RKCM", version, kind, caller[1], callee[1], mapped(caller[0]),
                       mapped(callee[0]), nonce) + tail


def join(nonce=99, address=4096, key=1, size=1 << 20):
    return struct.pack("<4sBBHQQIIQQ", b"RKCM", VERSION, JOIN, 0, nonce, address, key, size, 0, 0)


def line(kind, body):
    return struct.pack("<4sHH", b"RKLN", 8 + len(body), kind) + body


def greeting(keyed=0, low=VERSION, high=VERSION):
    return line(1, struct.pack("<HHHHQQ", low, high, keyed, 0, 1234, 5678))


def proof(mac=b"\0" * 32):
    return line(2, mac)


def want(caller, callee, nonce=77, ring=1 << 20):
    return line(3, struct.pack("<Q16s16sHHI", nonce, mapped(caller[0]), mapped(callee[0]), caller[1], callee[1], ring))


def call(t, port, data, count=1):
    """What the answers to a connection request are: [(event, status, private data)]."""
    client = t.client.run(f"{t.tool('cm_call')} {t.server.address} {port} {t.client.address} '{data.hex()}' {count}", 60)
    t.expect("cm_call works", client.rc == 0, client)
    return [(line.split() + ["", "", ""])[:3] for line in client.out.splitlines()]


def talk(t, port, *lines):
    """On a connection for each: [("open" or "closed", what came back)]."""
    talker = trial.INTEGRATION / "lab/programs/line_talk.py"
    words = " ".join(b"".join(messages).hex() for messages in lines)
    result = t.client.run(f"{sys.executable} {talker} {t.server.address} {port} {words}", 90)
    t.expect("the line's port can be talked to", result.rc == 0, result.err[-300:])
    answers = [(line.split() + [""])[:2] for line in result.out.splitlines()]
    return [(state, bytes.fromhex(data)) for state, data in answers]


def busy(t, words="conns=2 seconds=200 size=8192 pause=50", **options):
    """A server and a client that go on while strangers come."""
    server = serve(t, "threads", **options)
    client = ask(t, words, **options)
    t.expect_lifts(client, 2, 12)
    return server, client


def unharmed(t, server, client):
    total, sessions, broken = ended(t, client, enough=True)
    t.expect("no connection broke", broken == 0, broken)
    second = ask(t, "conns=2 seconds=6 pause=30")
    ended(t, second)
    t.expect("the server ends with 0", t.stop(server) == 0, server.process.rc)
    t.expect_lifted(client, second, streams=2)
    t.expect_lifted(server, streams=4)
    t.expect_bytes(client, total, total)


def refusals(t, program, at_least=1):
    counted = program.reasons("refused")
    t.expect(f"{program.name} counts {at_least} refusals", sum(counted.values()) >= at_least, counted)
    t.note += f" refused: {counted}."


@group.case(beside=True)
def garbage_requests(t):
    """Malformed and truncated private data at the RDMA port: rejected, each of them."""
    server, client = busy(t)
    here, there = (t.client.address, 1111), (t.server.address, t.port)
    good = find(here, there)
    strangers = {"nothing": b"", "zeros": b"\0" * 56, "random": os.urandom(56), "truncated": good[:20],
                 "one byte short": good[:49], "another version": find(here, there, version=9),
                 "an answer": find(here, there, kind=FOUND), "another type": find(here, there, kind=77),
                 "a tail": find(here, there, tail=b"x" * 6), "join of nobody": join(),
                 "join with a wrong ring": join(size=12345), "port 0": find((here[0], 0), there)}
    if t.rdma:
        for name, data in strangers.items():
            events = call(t, t.port, data)
            t.expect(f"{name}: rejected", events and events[0][0] == "RDMA_CM_EVENT_REJECTED", events)
        for name, data in (("unknown stream", good), ("another host's stream", find(("10.77.0.9", 1111), there)),
                           ("another listener", find(here, (t.server.address, t.port + 1)))):
            events = call(t, t.port, data)
            t.expect(f"{name}: rejected", events and events[0][0] == "RDMA_CM_EVENT_REJECTED", events)
            answer = bytes.fromhex(events[0][2]) if events else b""
            verdict = struct.unpack_from("<H", answer, 6)[0] if len(answer) >= 8 else None
            t.expect(f"{name}: not granted", verdict != OK, events)
    unharmed(t, server, client)
    if t.rdma:
        refusals(t, server, 8)


def stream_of(t, client):
    """(local, remote) of a connection of the client's."""
    lines = t.client.check(f"ss -tnH state established dst {t.server.address} dport = :{t.port}").splitlines()
    local = lines[0].split()[2]
    return (t.client.address, int(local.rsplit(":", 1)[1])), (t.server.address, t.port)


def line_port(t, server, client):
    """Where the server's keeper takes lines: its other listening port. A stream that is lifted is looked for meanwhile."""
    answers = call(t, t.port, find(*stream_of(t, client)), 5)
    verdicts = [struct.unpack_from("<H", bytes.fromhex(a[2]), 6)[0] for a in answers if len(a[2]) >= 16]
    t.expect("five answers, and none says that the stream is free", len(verdicts) == 5 and OK not in verdicts, answers)
    listening = t.server.check("ss -ltnHp").splitlines()
    ports = {int(line.split()[3].rsplit(":", 1)[1]) for line in listening if f"pid={server.process.pid}," in line}
    ports -= {t.port}
    t.expect("the keeper listens for lines", len(ports) == 1, listening)
    return ports.pop() if ports else 0


@group.case(beside=True)
def garbage_on_the_line(t):
    server, client = busy(t)
    port = line_port(t, server, client) if t.rdma else 0
    if port:
        caller, callee = stream_of(t, client)
        hello = greeting() + proof()
        wrong = {"random": [os.urandom(512)], "an unknown type": [hello, line(99, b"\0" * 8)],
                 "a wrong length": [hello, struct.pack("<4sHH", b"RKLN", 9, 3) + b"x"],
                 "a huge length": [hello, struct.pack("<4sHH", b"RKLN", 65535, 3)],
                 "a word before the greeting": [line(5, b"\0" * 24)], "another version": [greeting(low=7, high=9)],
                 "two greetings": [greeting(), greeting()], "a key that the other has not": [greeting(keyed=1), proof()],
                 "a wrong proof": [greeting(), proof(b"\1" * 32)], "a WANT with a wrong ring": [hello, want(
                     caller, callee, ring=12345)]}
        for name, (state, answer) in zip(wrong, talk(t, port, *wrong.values())):
            t.expect(f"{name}: closed", state == "closed", (state, answer.hex()))
        dropped, unknown, doubled, often = talk(
            t, port, [hello, line(5, struct.pack("<QHHHHQ", 4242, 3, 0, 0, 0, 5))],
            [hello, want((t.client.address, 1111), callee)], [hello, want(caller, callee)],
            [hello] + [want(caller, callee, nonce=n) for n in range(100, 150)])
        t.expect("a word of an unknown channel is dropped", dropped[0] == "open", dropped)
        for name, answer in (("an unknown stream", unknown), ("a stream that is lifted", doubled),
                             ("the same fifty times", often)):
            t.expect(f"WANT of {name}: refused", offer_verdict(answer[1]) not in (OK, None), answer)
    unharmed(t, server, client)
    if t.rdma:
        refusals(t, server, 5)


def offer_verdict(answer):
    """Of the first OFFER among the messages of a line."""
    while len(answer) >= 8:
        _, length, kind = struct.unpack_from("<4sHH", answer)
        if kind == 4 and length == 24 and len(answer) >= 24:
            return struct.unpack_from("<H", answer, 16)[0]
        answer = answer[max(length, 8):]
    return None


@group.case(beside=True)
def silent_on_the_line(t):
    """Lines that say nothing, many of them: nobody waits for them."""
    server, client = busy(t)
    port = line_port(t, server, client) if t.rdma else 0
    if port:
        holder = ("import socket,time; s=[socket.create_connection((%r,%d),5) for _ in range(100)]; time.sleep(8)"
                  % (t.server.address, port))
        t.expect("a hundred lines", t.client.run(f"python3 -c \"{holder}\"", 60).rc in (0, 1))
    unharmed(t, server, client)


def keys(t, server_key, client_key, lifted):
    """A key as root would place it; None: no key."""
    options, file = [], f"/run/key-{t.port}"
    for host, key in ((t.server, server_key), (t.client, client_key)):
        if key:
            host.check(f"install -m 600 /dev/null {file} && echo {key} > {file}")
        options.append({"RSOCK_KEY_FILE": file} if key else {})
    strict = dict(strict=lifted, path=None if lifted else "auto")
    server = serve(t, "threads", env=options[0], **strict)
    client = ask(t, "conns=2 seconds=7 pause=30", env=options[1], **strict)
    ended(t, client)
    t.expect("the server ends with 0", t.stop(server) == 0, server.process.rc)
    if lifted:
        t.expect_lifted(client, server, streams=2)
        return
    t.expect_on_tcp(client, server)
    if t.rdma:
        refused = {**client.reasons("refused"), **server.reasons("refused")}
        t.expect("an end counts it as refused", refused, (client.reasons(), server.reasons()))
        t.note += f" {'; '.join(refused)}; {'; '.join(client.reasons())}"


A, B = "0123456789abcdef-one", "0123456789abcdef-two"
for name, row in {"same_key": (A, A, True), "wrong_key": (A, B, False), "key_at_server_only": (A, None, False),
                  "key_at_client_only": (None, A, False)}.items():
    group.add(name, lambda t, row=row: keys(t, *row), beside=True)


@group.case(beside=True)
def squatter(t):
    """Another user sits on the RDMA port of the server's TCP port, and takes any call."""
    squat = t.start(t.server, f"rping -s -P -p {t.port} -a {t.server.address}", shim=False, user=NOBODY)
    time.sleep(1)
    t.expect("rping holds the port", squat.process.rc is None, squat.err)
    server = serve(t, "threads", strict=False, path="auto")
    client = ask(t, "conns=2 rounds=80 size=8192 pause=40", strict=False, path="auto")
    total, sessions, broken = ended(t, client)
    t.expect("nothing broke", broken == 0, broken)
    t.stop(server)
    t.expect_on_tcp(client, server)
    if t.rdma:
        refusals(t, server)
        t.expect("the client says why", set(client.reasons()) - trial.NO_REASON, client.reasons())
        t.note += f" {'; '.join(client.reasons())}; {'; '.join(server.reasons())}"
    t.stop(squat)


@group.case(beside=True)
def no_owner_at_the_port(t):
    """A TCP server without the shim, and an RDMA stranger at its port: the client stays on TCP and counts."""
    squat = t.start(t.server, f"rping -s -P -p {t.port} -a {t.server.address}", shim=False)
    time.sleep(1)
    server = serve(t, "threads", shim=False)
    client = ask(t, "conns=2 rounds=80 size=8192 pause=40", strict=False, path="auto")
    ended(t, client)
    t.stop(server)
    t.stop(squat)
    t.expect_on_tcp(client)
