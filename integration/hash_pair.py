#!/usr/bin/env python3
"""hash_pair.c's twin: the same protocol and options through Python's socket module, so that a C
program can be paired with an interpreter that makes other calls for the same work.

  hash_pair.py server|client [seed=N] [family=4|6] [shape=SHAPE] [io=IO] [total=BYTES] [streams=N] [pause=MS]

IO is one of blocking, timeout (settimeout: Python then polls by itself), poll, select, epoll_lt,
epoll_et.
"""

import math
import os
import random
import select
import socket
import struct
import sys
import threading
import time
import zlib

TILE = (1 << 20) + 7
LARGEST = 8 << 20
MASK = (1 << 64) - 1
WAIT_S = 20


class SplitMix:
    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def size(self, largest):
        """As random_size() in hash_pair.c: `exchange` needs the same sizes at both ends."""
        exponent = (self.next() >> 11) / 9007199254740992.0
        return max(1, min(largest, int(math.exp(exponent * math.log(largest + 1.0)))))


def make_ribbon(seed):
    numbers = SplitMix(seed)
    tile = b"".join(struct.pack("<Q", numbers.next()) for _ in range((TILE + 7) // 8))[:TILE]
    return memoryview((tile * (2 + LARGEST // TILE + 1))[:TILE + LARGEST])


class Fault(Exception):
    """The pair is not sound; the message says where."""


class Direction:
    def __init__(self, pair, stream, from_server, total):
        self.pair, self.stream, self.from_server = pair, stream, from_server
        self.total, self.done, self.crc, self.message_left = total, 0, 0, 0
        self.paused = False
        self.random = random.Random("%d %d %d" % (pair.seed, stream, from_server))
        self.buffer = bytearray(1 << 20)

    def expected(self, offset, size):
        start = (offset + self.stream * 7919 + (524287 if self.from_server else 0)) % TILE
        return self.pair.ribbon[start:start + size]

    def account(self, data):
        self.crc = zlib.crc32(data, self.crc)
        self.done += len(data)

    def size(self, largest):
        return max(1, int(math.exp(self.random.random() * math.log(largest + 1))))

    def send_some(self, sock):
        if not self.paused and self.done > self.total // 8:
            self.paused = True
            time.sleep(self.pair.pause_s)
        if self.message_left == 0:
            self.message_left = min(self.size(LARGEST), self.total - self.done)
        data = self.expected(self.done, self.message_left)
        third = len(data) // 3
        call = self.random.randrange(4)
        if call == 0:
            n = os.write(sock.fileno(), data) if sock.gettimeout() is None else sock.send(data)
        elif call == 1:
            n = sock.sendmsg([data[:third], b"", data[third:]])
        elif call == 2 and sock.gettimeout() is None and len(data) < 1 << 16:
            sock.sendall(data)
            n = len(data)
        else:
            n = sock.send(data)
        self.account(data[:n])
        self.message_left -= n

    def receive_some(self, sock):
        size = min(self.size(1 << 20), self.total - self.done)
        view = memoryview(self.buffer)[:size]
        call = self.random.randrange(4)
        if call == 0:
            n = sock.recvmsg_into([view[:size // 2], view[size // 2:]])[0]
        elif call == 1:
            data = sock.recv(size)
            n = len(data)
            view[:n] = data
        else:
            n = sock.recv_into(view)
        if n == 0:
            raise Fault("stream %d ends after %d of %d" % (self.stream, self.done, self.total))
        if view[:n] != self.expected(self.done, n):
            wanted = self.expected(self.done, n)
            at = next(i for i in range(n) if view[i] != wanted[i])
            raise Fault("stream %d: wrong byte at offset %d" % (self.stream, self.done + at))
        self.account(view[:n])

    def open(self):
        return self.done < self.total

    def report(self, sent):
        if self.open():
            raise Fault("stream %d: %d of %d bytes" % (self.stream, self.done, self.total))
        say("%s %d %s: %d %08x" % ("sent" if sent else "received", self.stream,
                                   "from_server" if self.from_server else "from_client",
                                   self.done, self.crc))


class Waiter:
    """Readiness by the call that the options name."""

    def __init__(self, sock, io):
        self.sock, self.io = sock, io
        self.interest = 0
        self.epoll = select.epoll() if io.startswith("epoll") else None

    def wait(self, reading, writing):
        if self.io == "select":
            ready = any(select.select([self.sock] if reading else [], [self.sock] if writing else [],
                                      [], WAIT_S))
        elif self.io == "poll":
            poll = select.poll()
            poll.register(self.sock, (select.POLLIN if reading else 0) |
                          (select.POLLOUT if writing else 0))
            ready = poll.poll(WAIT_S * 1000)
        else:
            interest = (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if writing else 0)
            if self.io == "epoll_et":
                interest = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
            if self.interest == 0:
                self.epoll.register(self.sock, interest)
            elif self.interest != interest:
                self.epoll.modify(self.sock, interest)
            self.interest = interest
            ready = self.epoll.poll(WAIT_S)
        if not ready:
            raise Fault("no readiness for %s%s" % ("in " * reading, "out" * writing))


class Stream:
    def __init__(self, pair, index, sock):
        self.pair, self.sock = pair, sock
        self.waits_itself = pair.io in ("blocking", "timeout")
        if pair.io == "timeout":
            sock.settimeout(WAIT_S)
        elif not self.waits_itself:
            sock.setblocking(False)
        self.waiter = None if self.waits_itself else Waiter(sock, pair.io)
        totals = {False: pair.total if pair.shape != "server_first" else 0,
                  True: pair.total if pair.shape != "one_way" else 0}
        self.out = Direction(pair, index, pair.is_server, totals[pair.is_server])
        self.into = Direction(pair, index, not pair.is_server, totals[not pair.is_server])

    def send_all(self):
        while self.out.open():
            self.out.send_some(self.sock)

    def receive_all(self):
        while self.into.open():
            self.into.receive_some(self.sock)

    def move(self, sending, receiving):
        if self.waits_itself:
            writer = None
            if sending and receiving:
                writer = self.pair.thread(self.send_all)
            elif sending:
                self.send_all()
            if receiving:
                self.receive_all()
            if writer:
                writer.join()
            return
        while (sending and self.out.open()) or (receiving and self.into.open()):
            blocked = [self.burst(self.out, self.out.send_some) if sending else True,
                       self.burst(self.into, self.into.receive_some) if receiving else True]
            writing, reading = sending and self.out.open(), receiving and self.into.open()
            if all(blocked) and (reading or writing):
                self.waiter.wait(reading, writing)

    def burst(self, direction, act):
        """True when nothing more can be done now."""
        for _ in range(8):
            if not direction.open():
                return True
            try:
                act(self.sock)
            except BlockingIOError:
                return True
        return False

    def exchange(self):
        sizes = SplitMix(self.pair.seed + self.out.stream)
        totals = {d: d.total for d in (self.out, self.into)}
        from_server = False
        while any(d.done < totals[d] for d in totals):
            mine = from_server == self.pair.is_server
            direction = self.out if mine else self.into
            direction.total = min(direction.done + sizes.size(LARGEST // 8), totals[direction])
            self.move(mine, not mine)
            from_server = not from_server

    def expect_end(self):
        while True:
            try:  # before waiting: the edge may have come with the last data
                if self.sock.recv(1):
                    raise Fault("more data instead of the end")
                return
            except BlockingIOError:
                self.waiter.wait(True, False)

    def run(self):
        shape = self.pair.shape
        first = self.pair.is_server if shape == "server_first" else not self.pair.is_server
        if shape == "both":
            self.move(True, True)
        elif shape == "exchange":
            self.exchange()
        else:
            self.move(first, not first)
        if shape == "half_close":
            if first:
                self.sock.shutdown(socket.SHUT_WR)
            else:
                self.expect_end()
            self.move(not first, first)
        if not (shape == "half_close" and first):
            self.sock.shutdown(socket.SHUT_WR)
        if not (shape == "half_close" and not first):
            self.expect_end()
        self.out.report(True)
        self.into.report(False)
        self.sock.close()


class HashPair:
    def __init__(self, role, options):
        self.is_server = role == "server"
        self.seed = int(options.get("seed", 1))
        self.total = int(options.get("total", 24 << 20))
        self.streams = int(options.get("streams", 1))
        self.family = socket.AF_INET6 if options.get("family") == "6" else socket.AF_INET
        self.io = options.get("io", "blocking")
        self.shape = options.get("shape", "both")
        self.pause_s = int(options.get("pause", 80)) / 1000
        self.ribbon = make_ribbon(self.seed)
        self.host = os.environ.get("PAIR_HOST")  # two hosts: no control channel between them
        self.control = None if self.host else socket.socket(fileno=int(os.environ["PAIR_CONTROL_FD"]))

    def thread(self, body):
        thread = threading.Thread(target=guarded, args=(body,))
        thread.start()
        return thread

    def listen(self):
        if self.host:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server(self.address(), family=family, backlog=64)
        listener = socket.create_server(("::1" if self.family == socket.AF_INET6 else "127.0.0.1",
                                         0), family=self.family, backlog=64)
        port = listener.getsockname()[1]
        if self.family == socket.AF_INET6:
            name = struct.pack("=HHI16sI", socket.AF_INET6, socket.htons(port), 0,
                               socket.inet_pton(socket.AF_INET6, "::1"), 0)
        else:
            name = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port),
                               socket.inet_aton("127.0.0.1"))
        self.control.send(name)
        return listener

    def address(self):
        if self.host:
            return (self.host, int(os.environ["PAIR_PORT"]))
        name = self.control.recv(64)
        family, port = struct.unpack_from("=HH", name)
        return ("::1" if family == socket.AF_INET6 else "127.0.0.1", socket.ntohs(port))

    def run(self):
        if self.is_server:
            listener = self.listen()
            socks = [listener.accept()[0] for _ in range(self.streams)]
        else:
            address = self.address()
            socks = [socket.create_connection(address) for _ in range(self.streams)]
            for sock in socks:
                sock.settimeout(None)
        threads = [self.thread(Stream(self, i, sock).run) for i, sock in enumerate(socks)]
        for thread in threads:
            thread.join()


def say(text):
    os.write(1, (text + "\n").encode())


def guarded(body):
    try:
        body()
    except (Fault, OSError) as why:
        say("FAILED %s: %s" % (type(why).__name__, why))
        os._exit(99)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not {"PAIR_CONTROL_FD", "PAIR_HOST"} & set(os.environ):
        sys.exit("usage: hash_pair.py server|client KEY=VALUE... (started by run_case)")
    guarded(HashPair(sys.argv[1], dict(word.split("=") for word in sys.argv[2:])).run)
