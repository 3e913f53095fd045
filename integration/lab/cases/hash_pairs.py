"""Pairs that account for every byte (integration/hash_pair.*), between two hosts, and the shim's count beside theirs."""

import sys
import types

import trial

group = trial.Group(trial.LabKind(guests=False))
run_case = trial.script("run_case")
SHAPES = ("one_way", "server_first", "both", "exchange", "half_close")
IOS = ("blocking", "poll", "select", "epoll_lt", "epoll_et")
# With these no direction begins with so large a message that nothing is left for after the pause: a blocking send goes
# to its end on the path that it began on.
SEEDS = (3, 11, 21, 24, 28, 30, 35, 69, 70, 74, 76, 77, 101, 115, 121, 130, 155, 157, 169, 170, 173, 188, 200, 205, 234)
PAUSE_MS = 1000  # in the middle of each direction: long enough for a lift between emulated hosts


def moved(program, verb):
    return sum(int(value.split()[0]) for value in run_case.hashes(program, verb).values())


def hash_case(t, server="c", client="c", family=4, streams=1, io="blocking", shims=(True, True), strict=True, path=None,
              timeout=60, pause=PAUSE_MS, lift=True, **words):
    """Runs one pair and checks its bytes; the programs, for further questions. Also used by other groups."""
    host = t.server.address6 if family == 6 else t.server.address
    env = {"PAIR_HOST": host, "PAIR_PORT": str(t.port)}
    words = dict(total=4 << 20, seed=t.port) | words | dict(streams=streams, io=io, pause=pause)
    commands = []
    for kind, role in ((server, "server"), (client, "client")):
        program = t.hash_pair() if kind == "c" else f"{sys.executable} {trial.INTEGRATION / 'hash_pair.py'}"
        commands.append(f"{program} {role} {' '.join(f'{k}={v}' for k, v in words.items())}")
    serving = t.start(t.server, commands[0], shims[0], strict, path, env, listens=True)
    calling = t.start(t.client, commands[1], shims[1], strict, path, env)
    ends = []
    for program, role in ((calling, "client"), (serving, "server")):
        status = t.finish(program, timeout)
        t.expect(f"the {role} ends with 0 and no FAILED", status == 0 and "FAILED" not in program.out,
                 (status, [line for line in program.out.splitlines() if "FAILED" in line]))
        ends.append(types.SimpleNamespace(name=role, out=program.out))
    for complaint in run_case.hash_complaints(types.SimpleNamespace(client=ends[0], server=ends[1])):
        t.expect("what one sends the other receives", False, complaint)
    for program in (calling, serving):
        t.expect_bytes(program, moved(program, "sent"), moved(program, "received"))
    if lift:
        t.expect_lifted(calling, serving, streams=streams)
    return calling, serving


def add(name, beside=True, **words):
    group.add(name, lambda t: hash_case(t, **words), beside=beside)


for i, (shape, io) in enumerate((shape, io) for shape in SHAPES for io in IOS):
    # Both families, in turn: one in four is IPv6.
    add(f"c.{shape}.{io}", shape=shape, io=io, seed=SEEDS[i], family=6 if i % 4 == 3 else 4)
for io in ("blocking", "epoll_et"):
    # A blocked reader says READY when its call returns; with few bytes all would be sent by then. No strict mode: one
    # processor that carries 16 streams makes their queue pairs in its own time, and who was not heard asks again after 10 s.
    total, pause = (12 << 20, 14000) if io == "blocking" else (1 << 20, 5000)
    add(f"c.16_streams.{io}", beside=False, strict=False, streams=16, io=io, shape="both", total=total, pause=pause,
        timeout=100)
add("py.both.timeout", server="py", client="py", io="timeout", shape="both")
add("c_client.py_server.half_close", server="py", io="blocking", shape="half_close", family=6)
add("py_client.c_server.exchange", client="py", io="epoll_et", shape="exchange")
add("large.both", beside=False, shape="both", io="epoll_lt", total=24 << 20, timeout=100)
